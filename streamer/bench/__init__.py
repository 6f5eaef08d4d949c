"""In-process benchmarks behind `streamer bench`, and the fake model they and the tests run on."""

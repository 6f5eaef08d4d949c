"""`streamer loadtest compare`: this engine beside installed others, on equal workloads."""

"""`streamer loadtest compare`: this engine beside installed others, on the same workloads."""

"""`streamer bench offline`: throughput, latency of a batch and swap, without a server."""

"""Benchmarks of the engine's parts in process, behind `streamer bench`."""

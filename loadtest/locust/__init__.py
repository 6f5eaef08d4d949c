"""Locust users of a server for language models: `python -m streamer.loadtest.locust --help`."""

"""Locust users of a server for language models: `streamer loadtest locust --help`."""

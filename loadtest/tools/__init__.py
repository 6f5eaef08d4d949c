"""Public tools, unchanged, against a server: `python -m streamer.loadtest.tools --help`."""

"""`streamer bench page`: the page in a browser. Needs a checkout."""

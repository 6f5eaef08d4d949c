"""`streamer bench gpu`: a GPU's figures, each beside its target."""

"""`streamer bench speculation`: on beside off, on edits and on text with nothing to repeat."""

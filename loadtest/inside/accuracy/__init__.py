"""`streamer bench accuracy`: what quantization costs in accuracy. Needs a checkout."""

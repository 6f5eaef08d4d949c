"""Quantized weights of safetensors checkpoints: schemes, their parsers, and quantizing."""

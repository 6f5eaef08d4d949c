"""GGUF: llama.cpp's file format, read as a checkpoint."""

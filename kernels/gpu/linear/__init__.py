"""Weights: matrix products with what is fused to them, and rows of an embedding table."""

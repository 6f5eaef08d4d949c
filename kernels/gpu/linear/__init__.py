"""Weights, dense and as codes: matrix products and what follows them; rows of a table."""

"""The native CPU backend: C compiled on first use. native.py is the Backend."""

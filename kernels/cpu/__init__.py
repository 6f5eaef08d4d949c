"""The native CPU backend: C compiled on first use. native.py is the Backend."""

MAX_HEAD, MAX_SHARE = 1024, 128  # head_dim, query heads a KV head: rope.c's, attention.c's limits

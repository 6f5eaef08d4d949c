"""Ranks: processes that compute one model together, each with a part of every matrix."""

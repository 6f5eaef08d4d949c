"""The fake model: no torch, unbounded context, output that counts and so can be checked."""

"""The fake model: no torch, unbounded context, counting tokens that prove themselves."""

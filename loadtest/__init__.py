"""Black-box measurements: what a user or another program sees of an engine, not its internals."""

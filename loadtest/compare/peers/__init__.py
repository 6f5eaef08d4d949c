"""Programs that run one engine each in its own interpreter; they import stdlib and that engine."""

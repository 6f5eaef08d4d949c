"""Programs that run one engine each, in that engine's own interpreter: stdlib and that engine."""

"""Replicas: processes that each have a whole engine, and the ingress that spreads requests."""

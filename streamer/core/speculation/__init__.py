"""Speculation: which provisional tokens a row verifies in a step, and how many."""

"""Paged attention: launches (paged.py), one program (tile.py), a step as they read it (rows.py)."""

"""Ollama's API, as far as clients of a served model use it: its bodies, its lines, its routes."""

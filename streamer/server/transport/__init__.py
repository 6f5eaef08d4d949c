"""Bytes of one connection: uvicorn's protocols, SSE, back pressure and stuck readers."""

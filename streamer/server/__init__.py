"""HTTP and WebSocket over the engine: OpenAI's API, our subprotocol, the page, metrics.

Speaks to the engine through submit, read, cancel and info alone; never imports torch or the model.
"""

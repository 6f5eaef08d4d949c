"""HTTP and WebSocket over the engine: OpenAI's API, our subprotocol, the page, metrics.

Reaches the engine through Engine and its TokenStreams; never imports torch or the model.
"""

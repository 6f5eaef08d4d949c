"""Everything that computes with torch: loading, the decoder, sampling, the runner.

The only room that imports torch, transformers' modelling code and the kernels. Owned and called by
the engine's GPU thread; never imports asyncio, the engine or the server.
"""

"""Where sync meets async: the step on its own thread, the streams on the event loop.

Never imports torch, the model or the server; runner and tokenizer arrive behind Protocols.
"""

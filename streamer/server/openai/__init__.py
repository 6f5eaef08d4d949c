"""The wire of OpenAI's API: typed bodies, one table of known fields each, and event builders.

Pure: bytes in, values out, values in, bytes out. No socket and no engine is touched here.
"""

"""Formats of tool calls and reasoning: their declarations, and the parser that reads them all.

Pure: text in, events out; the wire's bodies and events are made of these events elsewhere.
"""

"""Anthropic's Messages API: a second face of chats. Its bodies, its events, and its two routes."""

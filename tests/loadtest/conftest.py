"""Fixtures: a real server over the fake model, slow enough for its streams to be cut."""

from __future__ import annotations

from tests.server.conftest import slow

__all__ = ["slow"]

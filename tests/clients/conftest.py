"""Fixtures: real servers, over the fake model and over the bundled one, and a line to cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import bundled, scripted, server, server_with, slow
from tests.server.support.relay import Relay

__all__ = [
    "bundled",
    "scripted",
    "server",
    "server_with",
    "slow",
]  # fixtures of the server's tests, for these too


@pytest.fixture
def relay(server_with: Any) -> Iterator[Relay]:
    """To a server that still makes an answer of 150 tokens when a client that is late cuts it."""
    with Relay(server_with(model="fake:tokens_per_s=100")) as relay:
        yield relay

"""Fixtures: real servers, over the fake model and over the bundled one, and a line to cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import bundled, scripted, server, server_with, slow
from tests.server.support.relay import Relay
from tests.server.support.running import Running

__all__ = [
    "bundled",
    "scripted",
    "server",
    "server_with",
    "slow",
]  # fixtures of the server's tests, for these too


@pytest.fixture
def relay(slow: Running) -> Iterator[Relay]:
    with Relay(slow) as relay:
        yield relay

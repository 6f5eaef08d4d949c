"""Fixtures: real servers, over the fake model and over the bundled one, and a line to cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamer.demo import CHECKPOINT
from tests.clients.relay import Relay
from tests.server.conftest import server, slow
from tests.server.running import Running

__all__ = ["server", "slow"]  # fixtures of the server's tests, for these too


@pytest.fixture
def relay(slow: Running) -> Iterator[Relay]:
    with Relay(slow) as relay:
        yield relay


@pytest.fixture(scope="module")
def bundled() -> Iterator[Running]:
    """A server over the bundled model; `streamer serve` with nothing else said."""
    assert CHECKPOINT.is_dir(), "the bundled model is not there"
    running = Running(model=None, num_gpu_blocks_override=64).start()
    yield running
    running.stop()

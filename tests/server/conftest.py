"""Fixtures: a real server on a real socket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from streamer.demo import CHECKPOINT
from streamer.server.telemetry import refusals
from tests.server.support.running import BUNDLED, Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server a test module, with the default settings."""
    running = Running().start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """A server whose answers take long enough to be cut, joined or forked while they are made."""
    running = Running(model="fake:tokens_per_s=400").start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def scripted(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server whose model gives the answers of the test module's SCRIPT."""
    running = Running(script=request.module.SCRIPT).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def bundled() -> Iterator[Running]:
    """A server over the bundled model."""
    assert CHECKPOINT.is_dir(), "the bundled model is not there"
    running = Running(**BUNDLED).start()
    yield running
    running.stop()


@pytest.fixture
def server_with() -> Iterator[Any]:
    """A function that starts a server with other settings; all are stopped at the end."""
    with ExitStack() as started:  # each is stopped, whatever becomes of the others

        def start(**settings: Any) -> Running:
            running = Running(**settings)
            started.callback(running.stop)
            return running.start()

        yield start


@pytest.fixture
def refusal_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """The log with a line for every refusal, however many the tests before had in this second."""
    monkeypatch.setattr(refusals, "REFUSALS_A_SECOND", 1_000_000)
    with caplog.at_level(logging.INFO, "streamer.refused"):
        yield caplog

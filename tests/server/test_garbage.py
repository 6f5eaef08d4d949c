"""Requests that have ended leave no cycles: their memory does not wait for a garbage collection."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.support.running import Running

NUM_REQUESTS = 20


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def in_cycles() -> Counter[str]:
    """Objects that only a garbage collection frees, by type; they are freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(type(each).__qualname__ for each in gc.garbage)
    gc.garbage.clear()
    gc.collect()  # what was saved is garbage still, and would be found again
    return found


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize(
    ("asked", "status"),
    [({"stream": True}, 200), ({"stream": False}, 200), ({"max_tokens": "no"}, 400), (None, 403)],
)
def test_a_request_that_has_ended_leaves_no_cycle(
    server_with: Any, asked: dict[str, Any] | None, status: int, connection: str
) -> None:
    server: Running = server_with()
    body = {"prompt": "count", "max_tokens": 8, **(asked or {})}
    headers = {"connection": connection} | ({"host": "evil.example"} if asked is None else {})
    with httpx.Client(base_url=server.url, headers=headers) as client:

        def ask() -> None:
            for _ in range(NUM_REQUESTS):
                assert client.post("/v1/completions", json=body).status_code == status
            server.wait_idle()

        ask()
        in_cycles()
        ask()
        found = in_cycles()
    ours = {"Sequence", "RequestResponseCycle", "EventStream", "Task", "coroutine"}
    ours |= {"limited.<locals>.Limited", "TurnTransport"}
    assert {name: found[name] for name in ours if found[name] >= NUM_REQUESTS} == {}

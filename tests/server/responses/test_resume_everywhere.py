"""Cut after every event and at random bytes, resumed over the same transport and from each to each.

The joined events are those of an uninterrupted run: text, token ids, and every other event once.
Second readers, the official helper and single cursors: test_resume.py, test_socket_resume.py.
"""

from __future__ import annotations

import random
from itertools import count, cycle
from typing import Any

import pytest

from streamer.fake.model import expected_text, expected_tokens
from tests.server.responses.test_resume import (
    CHAT_BODY,
    NUM_TOKENS,
    RESPONSE,
    chat_of,
    check_response,
)
from tests.server.responses.test_socket import FINAL
from tests.server.responses.test_socket_resume import numbered
from tests.server.support.bare import JSON, MSGPACK, Bare, BareSocket, BareSse
from tests.server.support.counting import Event
from tests.server.support.running import Running

SSE, CHAT = "sse", "chat"
CREATE = {k: v for k, v in RESPONSE.items() if k != "stream"}


def begin(server: Running, transport: str) -> Bare:
    """Send the create."""
    if transport == SSE:
        return BareSse(server.url, "/v1/responses", RESPONSE)
    if transport == CHAT:
        return BareSse(server.url, "/v1/chat/completions", CHAT_BODY)
    socket = BareSocket(server.url, transport)
    socket.send("response.create", **CREATE)
    return socket


def resume(server: Running, transport: str, events: list[Any], *, by_header: bool = False) -> Bare:
    """Resume after the last of these events."""
    last = events[-1].id
    if transport in (SSE, CHAT):
        if transport == CHAT:
            path = f"/v1/chat/completions/{events[0].json['id']}?stream=true"
        else:
            path = f"/v1/responses/{events[0].json['response']['id']}?stream=true"
        if by_header:
            return BareSse(server.url, path, **{"last-event-id": last})
        return BareSse(server.url, f"{path}&starting_after={last}")
    socket = BareSocket(server.url, transport)
    response_id = events[0].json["response"]["id"]
    socket.send("response.resume", response_id=response_id, starting_after=int(last))
    return socket


def standard(client: Bare) -> list[Any]:
    """The events that have numbers, in one form for all transports."""
    if isinstance(client, BareSse):
        return list(client.events)
    return numbered([e for e in client.events if e["type"] != "session.created"])


def is_last(event: Any) -> bool:
    """Whether this event, in any form, is a response's or a chat's last."""
    if isinstance(event, dict):
        return event["type"] in FINAL
    return event.kind in FINAL or is_done(event)


def is_done(event: Any) -> bool:
    """Whether it is a chat's last."""
    return isinstance(event, Event) and event.is_done


def check(events: list[Any]) -> None:
    """Check that these are all events, each once."""
    if not is_done(events[-1]):
        check_response(events)
        return
    texts, ids = chat_of(events, 1)
    assert (texts, ids) == ([expected_text(NUM_TOKENS)], [expected_tokens(0, NUM_TOKENS)])
    bodies = [e.json for e in events[:-1]]
    ends = [c["choices"][0]["finish_reason"] for c in bodies if c["choices"]]
    assert [e for e in ends if e] == ["length"]
    assert [b["usage"]["completion_tokens"] for b in bodies if b["usage"]] == [NUM_TOKENS]
    assert sum("role" in c["delta"] for b in bodies for c in b["choices"]) == 1


SAME = [(t, t) for t in (SSE, CHAT, JSON, MSGPACK)]
CROSSED = [(SSE, JSON), (JSON, SSE), (SSE, MSGPACK), (MSGPACK, JSON)]


@pytest.mark.parametrize(("first", "second"), SAME + CROSSED)
def test_cut_after_every_event(slow: Running, first: str, second: str) -> None:
    for num_events in count(1):
        with begin(slow, first) as client:
            client.read_until(
                lambda e: is_last(e) or len(standard(client)) >= num_events  # noqa: B023
            )
            events = standard(client)[:num_events]
        if is_last(events[-1]):
            check(events)
            break
        with resume(slow, second, events) as client:
            client.read_until(is_last)
            check(events + standard(client))
    assert num_events > NUM_TOKENS  # some steps may have been merged


@pytest.mark.parametrize("transport", [SSE, CHAT, JSON, MSGPACK])
def test_cut_at_random_bytes_again_and_again(slow: Running, transport: str) -> None:
    """Each answer is cut, and so are its resumes, inside heads, chunks and frames."""
    rng = random.Random(20)
    num_cuts = 0
    for _ in range(8):
        events: list[Any] = []
        while not events:  # cut before it had an id: it is created again
            with begin(slow, transport) as client:
                client.read_until(is_last, rng.randrange(1, 4000))
                events = standard(client)
        while not is_last(events[-1]):
            by_header = rng.random() < 0.5
            with resume(slow, transport, events, by_header=by_header) as client:
                client.read_until(is_last, rng.randrange(1, 4000))
                events += standard(client)
            num_cuts += 1
        check(events)
    assert num_cuts > 8


def test_another_transport_after_every_event(slow: Running) -> None:
    """From SSE to a WebSocket, to MessagePack and back, an event at a time, while it is made."""
    events: list[Any] = []
    transports = cycle((SSE, JSON, MSGPACK))
    while not events or not is_last(events[-1]):
        transport = next(transports)
        with resume(slow, transport, events) if events else begin(slow, transport) as client:
            client.read_until(lambda _: bool(standard(client)))
            events.append(standard(client)[0])
    check(events)

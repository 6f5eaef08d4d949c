"""One WebSocket of OpenAI's Responses mode, blocking; under gevent other users run meanwhile.

`is_ours` offers Streamer's subprotocol, which adds cancel, resume, acknowledgements and forks;
`Missing` is raised if the server does not accept it.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ..responses import DECODER, Event, Log
from ..sse import BadAnswer
from ..target import TIMEOUT_S, Target
from .meter import Meter

OURS = Subprotocol("streamer.v1.json")


class Missing(Exception):
    """The server lacks a feature that the user needs."""


class Session:
    """An open socket; a context manager, or closed by `close`."""

    def __init__(self, target: Target, is_ours: bool, user: str) -> None:
        """Missing, with what `user` needs, if the server refuses the WebSocket or the
        subprotocol; OSError if no connection is made."""
        headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        try:
            self._connection = connect(
                target.socket_url,
                subprotocols=[OURS] if is_ours else None,
                additional_headers=headers,
                compression=None,
                open_timeout=TIMEOUT_S,
                max_size=None,
                max_queue=None,  # else close() waits until the queued messages are read
            )
        except (InvalidHandshake, InvalidMessage) as error:
            raise Missing(f"{user} needs a WebSocket at {target.socket_url}: {error}") from None
        if not is_ours:
            return
        if self._connection.subprotocol != OURS:
            self.close()
            raise Missing(
                f"{user} needs Streamer's subprotocol {OURS}; the server does not offer it"
            )
        self.receive()  # session.created

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close with a WebSocket close handshake."""
        self._connection.close()

    def drop(self) -> None:
        """Close the connection without a handshake, as a failing network does."""
        self._connection.close_socket()

    def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        self._connection.send(msgspec.json.encode({"type": kind, **fields}).decode())

    def receive(self) -> Event:
        """The next event; BadAnswer if it is an error, TimeoutError if none comes."""
        event = DECODER.decode(self._connection.recv(TIMEOUT_S))
        if event.type == "error":
            raise BadAnswer(f"an error event: {event.error or event.message}")
        return event

    def follow(self, log: Log, meter: Meter | None = None) -> None:
        """Read one answer to its end; no other answer is open on the socket."""
        while not log.is_final:
            if log.add(self.receive()) and meter is not None:
                meter.text()

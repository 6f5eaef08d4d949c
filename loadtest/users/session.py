"""One WebSocket of OpenAI's Responses mode, blocking; under gevent other users go on meanwhile.

`is_ours` offers Streamer's subprotocol, which adds cancel, resume, acknowledgements and forks; a
server that does not take it up is told of by `Missing`.
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
    """The server has no such thing."""


class Session:
    """An open socket. To be used in `with`, or closed."""

    def __init__(self, target: Target, is_ours: bool, user: str) -> None:
        """Missing, with what `user` needs, where the server has no such socket; OSError if none."""
        headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
        try:
            self._connection = connect(
                target.socket_url,
                subprotocols=[OURS] if is_ours else None,
                additional_headers=headers,
                compression=None,
                open_timeout=TIMEOUT_S,
                max_size=None,
                max_queue=None,  # else close() waits until somebody has read what piled up
            )
        except (InvalidHandshake, InvalidMessage) as error:
            raise Missing(f"{user} needs a WebSocket at {target.socket_url}: {error}") from None
        if not is_ours:
            return
        if self._connection.subprotocol != OURS:
            self.close()
            raise Missing(f"{user} needs Streamer's subprotocol {OURS}; the server has it not")
        self.hear()  # session.created

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Politely."""
        self._connection.close()

    def drop(self) -> None:
        """As a network does that goes away."""
        self._connection.close_socket()

    def say(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        self._connection.send(msgspec.json.encode({"type": kind, **fields}).decode())

    def hear(self) -> Event:
        """The next event; BadAnswer if it is an error, TimeoutError if none comes."""
        event = DECODER.decode(self._connection.recv(TIMEOUT_S))
        if event.type == "error":
            raise BadAnswer(f"an error event: {event.error or event.message}")
        return event

    def follow(self, log: Log, meter: Meter | None = None) -> None:
        """One answer, alone on the socket, to its end."""
        while not log.is_final:
            if log.add(self.hear()) and meter is not None:
                meter.text()

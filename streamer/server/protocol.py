"""LimitedHttpProtocol: uvicorn's, with bounds on a head, and a way to drop a connection.

Nothing of ours sees a request until its head is complete, and uvicorn keeps heads of any size for
any time; the same holds for trailers. lifecycle.py names this class to uvicorn. Every
connection begins here, and writes through a TurnTransport (loop_turn.py).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from streamer.errors import InvalidRequest, StreamerError, TooLarge
from streamer.server.loop_turn import WRITE_PART, TurnTransport
from streamer.server.openai.common import error_body
from streamer.server.stuck import ABORT

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0


class _HeadTooLarge(Exception):
    """Raised into the parser, which then stops."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 beyond MAX_HEAD_BYTES of head or trailers; closes after HEAD_TIMEOUT_S of head.

    Two counts: what the parser has handed out of this request, and what it has swallowed since it
    last handed out anything that leads on (a header that never ends is in no callback).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_kept = 0
        self._num_swallowed = 0
        self._has_advanced = False
        self._is_too_large = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: its first head has to come in time."""
        super().connection_made(TurnTransport(transport, self.loop))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see whether that has led anywhere."""
        self._has_advanced = False
        super().data_received(data)
        self._num_swallowed = 0 if self._has_advanced else self._num_swallowed + len(data)
        if self._num_swallowed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._num_kept = 0
        self._start_timer()
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._keep(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._keep(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._has_advanced = True
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # it is no upgrade
            short = partial(write_part, self.cycle)
            self.scope["extensions"][WRITE_PART] = short  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """A piece of the body; security.py counts these."""
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._has_advanced = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser's errors end in, ours among them."""
        if self._is_too_large:
            self._refuse()
        else:
            self._answer(b"400 Bad Request", InvalidRequest(msg, code="invalid_http"))
            self.transport.close()

    def _keep(self, size: int) -> None:
        self._num_kept += size
        if self._num_kept > MAX_HEAD_BYTES:
            self._is_too_large = True
            raise _HeadTooLarge

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            error = TooLarge(f"the head of a request has more than {MAX_HEAD_BYTES} bytes")
            self._answer(b"431 Request Header Fields Too Large", error)
        self.transport.close()

    def _answer(self, status: bytes, error: StreamerError) -> None:
        body = error_body(error)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
        )

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_timer)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timer(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # a next head has begun while an answer still goes out
            self._start_timer()


def write_part(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a piece of a chunked body (RFC 9112, 7.1), not empty, if that is all there is to do.

    False: nothing was done, and it is the business of uvicorn's `send`.
    """
    is_open = cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected)
    if not is_open or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True

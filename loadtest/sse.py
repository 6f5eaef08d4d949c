"""Parses HTTP answers and server-sent events from timed reads. No socket, no clock.

Everything is lazy: each read is parsed before the next one is requested, so the same code serves
complete answers and answers that are still arriving.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

HEAD_END = b"\r\n\r\n"
DONE = b"[DONE]"
Read = tuple[float, bytes]  # arrival time, bytes


class BadAnswer(Exception):
    """A server answered with an error, or not with what was requested."""


class Head(msgspec.Struct, frozen=True):
    """The head of an HTTP answer; `text` is in lower case."""

    status: int
    text: bytes

    @property
    def is_stream(self) -> bool:
        return b"text/event-stream" in self.text


def split(reads: Iterator[Read]) -> tuple[Head, Iterator[Read]]:
    """The head, and the body's reads without chunk framing; BadAnswer if there is no head."""
    data, at = b"", 0.0
    while HEAD_END not in data and (read := next(reads, None)) is not None:
        at = read[0]
        data += read[1]
    text, found, rest = data.partition(HEAD_END)
    words = text.split(b"\r\n")[0].split()
    if not found or len(words) < 2 or not words[1].isdigit():
        start = data[:200].decode(errors="replace")
        raise BadAnswer(
            f"no HTTP answer: {start!r}" if start else "the connection ended unanswered"
        )
    head = Head(int(words[1]), text.lower())
    bodies = itertools.chain([(at, rest)], reads)
    is_chunked = b"transfer-encoding: chunked" in head.text
    return head, _dechunked(bodies) if is_chunked else bodies


def whole(bodies: Iterator[Read]) -> bytes:
    """All bytes of a body."""
    return b"".join(data for _, data in bodies)


def started(reads: Iterator[Read]) -> tuple[Head, Iterator[Read]]:
    """As `split`; a status other than 200 raises BadAnswer with the server's message."""
    head, bodies = split(reads)
    if head.status != 200:
        raise BadAnswer(f"{head.status}: {whole(bodies)[:500].decode(errors='replace').strip()}")
    return head, bodies


def events(bodies: Iterator[Read]) -> Iterator[Read]:
    """The data of every event, with the time its line was complete; `[DONE]` is left out."""
    lines = Lines()
    for at, data in bodies:
        yield from ((at, payload) for payload in lines.feed(data) if payload != DONE)


class Lines:
    """Collects the data lines of events, `[DONE]` included; other lines are ignored."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data lines that these bytes complete."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _dechunked(bodies: Iterator[Read]) -> Iterator[Read]:
    chunks = _Chunks()
    for at, data in bodies:
        yield at, chunks.feed(data)
        if chunks.is_done:
            return  # a server that keeps the connection open has nothing more to send


class _Chunks:
    """Decodes HTTP/1.1 chunks (RFC 9112, 7.1) incrementally; trailers are ignored."""

    def __init__(self) -> None:
        self.is_done = False
        self._line = b""
        self._left = -1  # bytes until the chunk's end and its CRLF; -1: in the size line

    def feed(self, data: bytes) -> bytes:
        """The part of the body that these bytes contain."""
        out = []
        while data and not self.is_done:
            if self._left < 0:
                line, found, data = data.partition(b"\n")
                self._line += line
                if found:
                    size = int(self._line.partition(b";")[0].strip() or b"0", 16)
                    self._line, self._left = b"", size + 2
                    self.is_done = size == 0
            else:
                part, data = data[: self._left], data[self._left :]
                out.append(part[: max(0, self._left - 2)])
                self._left = self._left - len(part) or -1
        return b"".join(out)

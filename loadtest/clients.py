"""Clients of a completions server: many at once on plain sockets, one connection a request.

While answers come they do nothing but note when which bytes came; chunks, events and JSON are taken
apart afterwards, so that the clients cost every server the same little on the cores they share.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

import msgspec

READ_BYTES = 1 << 16
HEAD_END = b"\r\n\r\n"


class Ask(msgspec.Struct, frozen=True):
    """One request: `prompt` as token ids, or as text for a server that takes nothing else.

    ignore_eos  absent for a server that refuses to know it; the checkpoints never end early anyway
    """

    model: str
    prompt: list[int] | str
    max_tokens: int
    stream: bool = True
    ignore_eos: bool | msgspec.UnsetType = True

    def bytes(self) -> bytes:
        """The whole HTTP request."""
        body = msgspec.structs.asdict(self) | {"temperature": 0}
        if self.ignore_eos is msgspec.UNSET:
            del body["ignore_eos"]
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        data = msgspec.json.encode(body)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        return head + data


class Answer(msgspec.Struct, frozen=True):
    """Seconds from the request to each event with text (to the end, of one that is whole)."""

    at_s: tuple[float, ...]
    tokens: int


class Measured(msgspec.Struct, frozen=True):
    """All answers of one round, and the time from the first request to the last answer's end."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def first_s(self) -> list[float]:
        """Time to the first text of each answer."""
        return [answer.at_s[0] for answer in self.answers if answer.at_s]

    @property
    def gaps_s(self) -> list[float]:
        """Times between texts, of all answers."""
        return [b - a for answer in self.answers for a, b in itertools.pairwise(answer.at_s)]


class BadAnswer(Exception):
    """A server answered with an error, or something that is no completion."""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


DECODER = msgspec.json.Decoder(_Chunk)
Reads = list[tuple[float, bytes]]  # when, what


def run(port: int, clients: Sequence[Sequence[Ask]]) -> Measured:
    """Each client makes its requests one after the other, all clients at once."""
    begin = time.perf_counter()
    raw = asyncio.run(_all(port, [[ask.bytes() for ask in asks] for asks in clients]))
    seconds = max(reads[-1][0] for reads in raw) - begin
    return Measured(seconds, tuple(map(parse, raw)))


async def _all(port: int, clients: Sequence[Sequence[bytes]]) -> list[Reads]:
    async def client(requests: Sequence[bytes]) -> list[Reads]:
        return [await _fetch(port, request) for request in requests]

    return [reads for each in await asyncio.gather(*map(client, clients)) for reads in each]


async def _fetch(port: int, request: bytes) -> Reads:
    """(time of the request, b"") and then every read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    reads = [(time.perf_counter(), b"")]
    try:
        writer.write(request)
        while data := await reader.read(READ_BYTES):
            reads.append((time.perf_counter(), data))
    finally:
        writer.close()
    return reads


def parse(reads: Reads) -> Answer:
    """The answer that these reads make up; BadAnswer if it is none."""
    whole = b"".join(data for _, data in reads)
    head, _, _ = whole.partition(HEAD_END)
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise BadAnswer(whole[:500].decode(errors="replace"))
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    start, bodies = reads[0][0], _bodies(reads, len(head) + len(HEAD_END), is_chunked)
    if b"text/event-stream" not in head.lower():
        body = b"".join(data for _, data in bodies)
        return Answer((reads[-1][0] - start,), _tokens(DECODER.decode(body)))
    at_s, tokens = [], 0
    for at, event in _events(bodies):
        chunk = DECODER.decode(event)
        tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
        if any(choice.text for choice in chunk.choices):
            at_s.append(at - start)
    return Answer(tuple(at_s), tokens)


def _tokens(chunk: _Chunk) -> int:
    if chunk.usage is None:
        raise BadAnswer("an answer without usage")
    return chunk.usage.completion_tokens


def _bodies(reads: Reads, skip: int, is_chunked: bool) -> Iterator[tuple[float, bytes]]:
    """The body's bytes with their times: without the head, and without chunks' frames."""
    chunks = _Chunks()
    for at, data in reads:
        if skip >= len(data):
            skip -= len(data)
            continue
        part, skip = data[skip:], 0
        yield at, chunks.feed(part) if is_chunked else part


class _Chunks:
    """HTTP/1.1 chunks (RFC 9112, 7.1) taken apart as they come; trailers are not looked at."""

    def __init__(self) -> None:
        self._line = b""
        self._left = -1  # bytes until the chunk's end and its CRLF; -1: in the size line

    def feed(self, data: bytes) -> bytes:
        """What these bytes bring of the body."""
        out = []
        while data:
            if self._left < 0:
                line, found, data = data.partition(b"\n")
                self._line += line
                if found:
                    size = int(self._line.partition(b";")[0].strip() or b"0", 16)
                    self._line, self._left = b"", size + 2 if size else 1 << 62
            else:
                part, data = data[: self._left], data[self._left :]
                wanted = max(0, self._left - 2)
                out.append(part[:wanted] if self._left < 1 << 61 else b"")
                self._left = self._left - len(part) or -1
        return b"".join(out)


def _events(bodies: Iterator[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of every server-sent event, at the time when its line was whole."""
    pending = b""
    for at, data in bodies:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield at, payload

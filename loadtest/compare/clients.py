"""Clients of a completions server: many at once on plain sockets, one connection a request.

While answers stream the clients only record each read and its time. Chunks, events and JSON are
parsed afterwards, so that the clients cost every server the same CPU time on the shared cores.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import msgspec

from ..processes import ANSWER_S
from ..replies import DECODER, Chunk
from ..sse import BadAnswer, Read, events, split, whole

READ_BYTES = 1 << 16


class Ask(msgspec.Struct, frozen=True):
    """One request: `prompt` as token ids, or as text for a server that takes nothing else.

    ignore_eos  absent for a server that rejects it; the checkpoints never end early anyway
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
    """Seconds from the request to each event with text (to the end for a plain JSON answer)."""

    at_s: tuple[float, ...]
    tokens: int


class Round(msgspec.Struct, frozen=True):
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


Reads = list[Read]


def run(port: int, clients: Sequence[Sequence[Ask]], timeout_s: float = ANSWER_S) -> Round:
    """Run all clients at once; each makes its requests one after the other.

    OSError (TimeoutError after `timeout_s`) or BadAnswer.
    """
    requests = [[ask.bytes() for ask in asks] for asks in clients]
    begin = time.perf_counter()
    raw = asyncio.run(_all(port, requests, timeout_s))
    seconds = max(reads[-1][0] for reads in raw) - begin
    return Round(seconds, tuple(map(parse, raw)))


async def _all(port: int, clients: Sequence[Sequence[bytes]], timeout_s: float) -> list[Reads]:
    async def client(requests: Sequence[bytes]) -> list[Reads]:
        return [await _fetch(port, request) for request in requests]

    async with asyncio.timeout(timeout_s):
        return [reads for each in await asyncio.gather(*map(client, clients)) for reads in each]


async def _fetch(port: int, request: bytes) -> Reads:
    """(time of the request, b""), then every read."""
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
    """The answer in these reads; BadAnswer if there is none."""
    head, bodies = split(iter(reads))
    if head.status != 200:
        raise BadAnswer(b"".join(data for _, data in reads)[:500].decode(errors="replace"))
    start = reads[0][0]
    if not head.is_stream:
        return Answer((reads[-1][0] - start,), _tokens(DECODER.decode(whole(bodies))))
    at_s, tokens = [], 0
    for at, event in events(bodies):
        chunk = DECODER.decode(event)
        tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
        if chunk.text:
            at_s.append(at - start)
    return Answer(tuple(at_s), tokens)


def _tokens(chunk: Chunk) -> int:
    if chunk.usage is None:
        raise BadAnswer("an answer without usage")
    return chunk.usage.completion_tokens

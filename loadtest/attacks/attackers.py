"""Hostile clients: each attack is a coroutine that runs until its time is over.

Plain asyncio sockets that send at a given rate, so that the attacker's CPU time does not decide the
result. A connection that the server closes is opened again at once. attacks/command.py runs one
attack in its own process and measures the share of its tokens that a neighbour keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from ..target import Target

SLICE_S = 0.01  # between two sends of a connection that has a rate
GIVE_UP_S = 10.0  # without an answer to a handshake
AGAIN_S = 0.05  # after a server has closed at once
MASK = bytes(4)  # masks nothing: the payload is sent as it is
JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"
REFUSALS = (b"HTTP/1.1 4", b"HTTP/1.1 5", b'"type":"error"', b"\xa4type\xa5error")


class Tally(msgspec.Struct):
    """What a server did to an attack.

    refused     answers with an error status, and `error` events
    closed      connections that the server ended
    after_s     from a request to its refusal, from opening a connection to its end
    """

    sent_bytes: int = 0
    refused: int = 0
    closed: int = 0
    after_s: list[float] = []


class Connection:
    """One connection of the attacker; every method raises OSError if the server has ended it."""

    def __init__(
        self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._line = line
        self._writer = writer
        self.reader = reader
        self._reading: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        """Send at the line's rate."""
        if self.reader.at_eof():
            raise ConnectionResetError
        self._writer.write(data)
        await self._writer.drain()
        await self._line.pay(len(data))

    async def upgrade(self, subprotocol: str) -> None:
        """Upgrade the connection to a WebSocket."""
        target = self._line.target
        head = f"GET {target.prefix}/v1/responses HTTP/1.1\r\nHost: {target.origin}\r\n"
        head += f"Authorization: Bearer {target.key}\r\nSec-WebSocket-Protocol: {subprotocol}\r\n"
        head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        head += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        self._writer.write(head.encode())
        try:
            answer = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), GIVE_UP_S)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError from None
        if b" 101 " not in answer.split(b"\r\n")[0]:
            raise ConnectionRefusedError

    def read_all(self) -> None:
        """From now on read and discard everything, but count refusals."""
        self._reading = asyncio.create_task(self._read())

    def read_nothing(self) -> None:
        """From now on read nothing: the kernels' buffers fill."""
        transport = cast("asyncio.Transport", self._writer.transport)
        transport.pause_reading()

    def drop(self) -> None:
        """End it now."""
        if self._reading is not None:
            self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self.reader.read(1 << 16):
                self._line.tally.refused += sum(map(data.count, REFUSALS))


class Line:
    """The attacker's line to the server: `mbit_s`, shared by all its connections."""

    def __init__(self, target: Target, seconds: float, mbit_s: float) -> None:
        self.target = target
        self.tally = Tally()
        self._end = time.monotonic() + seconds
        self._bytes_s = mbit_s * 1e6 / 8
        self._free_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the attack's time is up."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds until the attack's time is up."""
        return self._end - time.monotonic()

    async def ask(self, request: bytes, patience_s: float) -> bool | None:
        """Send a request on a new connection and count it; False: it was refused or closed.

        None: no answer within `patience_s`.
        """
        began, tally = time.monotonic(), self.tally
        writer = None
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await asyncio.open_connection(self.target.host, self.target.port)
                writer.write(request)
                tally.sent_bytes += len(request)
                answer = await reader.read()
        except TimeoutError:
            return None
        except OSError:
            tally.closed += 1
            return False
        finally:
            if writer is not None:
                writer.transport.abort()
        if any(code in answer for code in REFUSALS):
            tally.refused += 1
            tally.after_s.append(time.monotonic() - began)
            return False
        return True

    async def pay(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - SLICE_S) + size / self._bytes_s
        self.tally.sent_bytes += size
        await asyncio.sleep(max(0.0, self._free_at - now))

    async def again(self, attack: Callable[[Connection], Awaitable[None]]) -> None:
        """Attack on a connection; when the server ends it, count that and open another one."""
        while not self.is_over:
            began = time.monotonic()
            try:
                opening = asyncio.open_connection(self.target.host, self.target.port)
                connection = Connection(self, *await asyncio.wait_for(opening, GIVE_UP_S))
                try:
                    await attack(connection)
                finally:
                    connection.drop()
            except OSError:
                self.tally.closed += 1
                self.tally.after_s.append(time.monotonic() - began)
                await asyncio.sleep(AGAIN_S)


Attack = Callable[[Line], Awaitable[None]]


def frame(opcode: int, data: bytes = b"", is_last: bool = True) -> bytes:
    """A client's WebSocket frame (RFC 6455, 5.2)."""
    length = len(data)
    head = bytes([opcode | (0x80 if is_last else 0)])
    if length < 126:
        return head + bytes([0x80 | length]) + MASK + data
    if length < 1 << 16:
        return head + b"\xfe" + struct.pack("!H", length) + MASK + data
    return head + b"\xff" + struct.pack("!Q", length) + MASK + data


# ---------------------------------------------------------------- the attacks


async def pipelining(line: Line) -> None:
    """Requests without a key, pipelined on one connection."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: %s\r\n\r\n" % line.target.origin.encode()

    async def attack(connection: Connection) -> None:
        connection.read_all()
        while not line.is_over:
            await connection.send(request * 300)

    await line.again(attack)


def flooding(data: bytes, *, begin: bytes = b"", name: str = JSON, is_read: bool = True) -> Attack:
    """An attack of one WebSocket that sends `begin`, then the same frames until the end."""
    many = data * max(1, (1 << 14) // len(data))

    async def flood(line: Line) -> None:
        async def attack(connection: Connection) -> None:
            await connection.upgrade(name)
            (connection.read_all if is_read else connection.read_nothing)()
            await connection.send(begin)
            while not line.is_over:
                await connection.send(many)

        await line.again(attack)

    return flood


def holding(num_connections: int, size: int, *, is_known: bool = True) -> Attack:
    """An attack of `num_connections`, each with a body that stops at `size` bytes, unfinished."""

    async def hold(line: Line) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {line.target.origin}\r\n"
        head += f"Authorization: Bearer {line.target.key if is_known else 'no'}\r\n"
        head += "Content-Length: 4000000\r\n\r\n"

        async def attack(connection: Connection) -> None:
            connection.read_all()
            await connection.send(head.encode())
            for _ in range(size // 50_000):
                await connection.send(b"x" * 50_000)
            while not line.is_over:
                await asyncio.sleep(0.5)
                await connection.send(b"x")

        await asyncio.gather(*(line.again(attack) for _ in range(num_connections)))

    return hold


async def json_bodies(line: Line) -> None:
    """Repeated requests with a body of 4 MB of `[[],[],...`."""
    data = b'{"input": "x", "tools": [' + b"[]," * 1_390_000 + b"[]]}"
    head = f"POST /v1/responses HTTP/1.1\r\nHost: {line.target.origin}\r\n"
    head += f"Authorization: Bearer {line.target.key}\r\nContent-Length: {len(data)}\r\n\r\n"

    async def attack(connection: Connection) -> None:
        while not line.is_over:
            began = time.monotonic()
            await connection.send(head.encode() + data)
            answer = await connection.reader.read(1 << 16)
            line.tally.refused += sum(map(answer.count, REFUSALS))
            line.tally.after_s.append(time.monotonic() - began)

    await line.again(attack)


def _packed(count: int) -> bytes:
    """{"type": "response.create", "input": [[], [], ...]} as MessagePack."""
    head = b"\x82\xa4type\xafresponse.create\xa5input\xdd" + struct.pack("!I", count)
    return head + b"\x90" * count


JSON_BOMB = b'{"type": "response.create", "input": "x", "tools": [' + b"[]," * 349_000 + b"[]]}"


CROWDED_ROWS, NEIGHBOUR_ROWS, STEPS_S = 8, 4, 200  # of the server, and of what it has in a second
CROWD_TOKENS, PATIENCE_S = 100, 15.0


def completion(target: Target, num: int, max_tokens: int, **fields: object) -> bytes:
    """A request for an answer of `max_tokens`, with a prompt that no other request has."""
    body = {"model": "fake", "prompt": f"{num}", "max_tokens": max_tokens, "ignore_eos": True}
    return target.request("POST", "/v1/completions", body | fields)


async def overload(line: Line) -> None:
    """Eight times as many requests as can be answered, from clients that give up after PATIENCE_S.

    loadtest/overload.py measures what becomes of them; this, what they leave to another key."""
    rate = 8 * (CROWDED_ROWS - NEIGHBOUR_ROWS) * STEPS_S / CROWD_TOKENS
    began = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for i in range(int(rate * line.left_s)):
            await asyncio.sleep(began + i / rate - time.monotonic())
            request = completion(line.target, i, CROWD_TOKENS, stream=True)
            clients.create_task(line.ask(request, PATIENCE_S))


def asking(num_clients: int, request: Callable[[Target, int], bytes]) -> Attack:
    """An attack of `num_clients` that send the next request as soon as one is answered."""

    async def crowd(line: Line) -> None:
        async def ask(first: int) -> None:
            num = first
            while not line.is_over:
                if await line.ask(request(line.target, num), GIVE_UP_S) is False:
                    await asyncio.sleep(AGAIN_S)
                num += num_clients

        await asyncio.gather(*(ask(i) for i in range(num_clients)))

    return crowd


def most_urgent(target: Target, num: int) -> bytes:
    """A request for 2,000 tokens at the highest priority."""
    return completion(target, num, 2000, stream=True, priority=-(1 << 31))


def long_text(target: Target, num: int) -> bytes:
    """A request to tokenize a text of 4 MB."""
    return target.request("POST", "/tokenize", {"prompt": f"{num} " * (4_000_000 // 8)})


class Plan(msgspec.Struct, frozen=True):
    """An attack, and its line's rate in Mbit/s. says: what it sends, for the table.

    serve    flags of its server;  seconds  its minimum duration
    """

    says: str
    attack: Attack
    mbit_s: float = 12.0
    serve: str = ""
    seconds: float = 0.0


PLANS: dict[str, Plan] = {
    "pipelining": Plan("requests without a key, 9 Mbit/s", pipelining, 9.0),
    "pings": Plan("empty pings, 12 Mbit/s", flooding(frame(9))),
    "pongs": Plan("empty pongs, 12 Mbit/s", flooding(frame(10))),
    "fragments": Plan(
        "empty fragments, 12 Mbit/s",
        flooding(frame(0, is_last=False), begin=frame(1, is_last=False)),
    ),
    "one-byte": Plan("text frames of one byte, 12 Mbit/s", flooding(frame(1, b"{"))),
    "unread-pings": Plan(
        "pings of 125 bytes, pongs not read, 200 Mbit/s",
        flooding(frame(9, bytes(125)), is_read=False),
        200.0,
    ),
    "held-bodies": Plan("300 bodies of 4 MB that never end", holding(300, 3_900_000), 1600.0),
    "held-without-key": Plan(
        "the same without a key", holding(300, 3_900_000, is_known=False), 1600.0
    ),
    "json-bodies": Plan("4 MB of [[],[],... as a body", json_bodies, 100.0),
    "json-events": Plan("1 MB of the same as an event", flooding(frame(1, JSON_BOMB)), 100.0),
    "msgpack-events": Plan(
        "1 MB of empty arrays, MessagePack",
        flooding(frame(2, _packed(1_000_000)), name=MSGPACK),
        100.0,
    ),
    "overload": Plan(
        "8 times as many answers as there can be, given up after 15 s",
        overload,
        serve=f"--max-num-seqs {CROWDED_ROWS}",
        seconds=30.0,
    ),
    "priority": Plan(
        "answers of priority -2**31",
        asking(16, most_urgent),
        serve=f"--max-num-seqs {CROWDED_ROWS}",
    ),
    "tokenizing": Plan("8 texts of 4 MB to /tokenize at once", asking(8, long_text)),
}


def run(name: str, target: Target, seconds: float) -> Tally:
    """Carry out an attack; returns what the server did to it."""
    plan = PLANS[name]

    async def carry_out() -> Tally:
        line = Line(target, seconds, plan.mbit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await plan.attack(line)
        return line.tally

    return asyncio.run(carry_out())

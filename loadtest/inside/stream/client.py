"""The client of `streamer bench stream`: opens streams on plain sockets and counts their events.

A separate process, so that it shares no GIL with the server: `python -m
streamer.loadtest.inside.stream.client ORDER`. It decodes nothing; of every SAMPLE-th read it
records the arrival time and the tokens, found in the counting text of the fake model. Commands
("begin", "end") come on standard input, answers go to standard output, a line of JSON each.
"""

from __future__ import annotations

import base64
import os
import re
import selectors
import socket
import sys
import time

import msgspec

READ_BYTES = 1 << 16
STUCK_BYTES = 4096  # else the kernel buffers megabytes for a client that does not read
# Between two polls, for every socket: a server that writes a socket at a time would else be read an
# event a poll, which is 4 us an event instead of 1.5, and this process busy however fast it is.
PAUSE_S = 0.5e-6
SAMPLE = 17  # coprime to the numbers of sockets, so that every socket is sampled
CONNECT_S = 60.0
TRANSPORTS = {"sse": 1, "ws": 1, "ws16": 16}  # lanes a socket
# The mark that every token's event has once, and where its stream and its oldest token are named.
EVENT = {"sse": b'"content":" ', "ws": b'"delta":" '}
ENDS = b"}\n"  # the last byte of a frame or of a body part; in no mark
SAMPLED = {
    "sse": re.compile(rb'"id":"chatcmpl-(\w+)"[^\n]*"content":" (\d+)'),
    "ws": re.compile(rb'"item_id":"msg_(\w+)"[^{]*"delta":" (\d+)'),
}
MESSAGES = [{"role": "user", "content": "count, please"}]


class Order(msgspec.Struct, frozen=True):
    """What to open: `num_streams` over a transport, of `max_tokens` each; the core to run on.

    num_stuck  sockets beside them that ask for as much and never read
    """

    port: int
    transport: str
    num_streams: int
    max_tokens: int
    core: int | None = None
    num_stuck: int = 0


class Opened(msgspec.Struct, frozen=True):
    """Every stream was accepted, and its first bytes have arrived."""

    num_sockets: int


class Began(msgspec.Struct, frozen=True):
    """The answer to "begin": what arrives from now on is counted."""


class Counted(msgspec.Struct, frozen=True):
    """Counts from "begin" to "end".

    events   events of tokens;  num_reads, num_bytes  of the reads with them
    took_s   seconds of the period;  cpu_s  CPU time of this process in it
    idle_s   seconds between polls, and of polls that found nothing to read
    samples  (request id without its prefix, output token from 0, arrival on the machine's clock)
    """

    events: int
    num_reads: int
    num_bytes: int
    took_s: float
    cpu_s: float
    idle_s: float
    samples: list[tuple[str, int, float]]


class Connection:
    """One socket, and how many events came on it."""

    __slots__ = ("_event", "_pending", "is_silent", "receive_into")

    def __init__(self, sock: socket.socket, event: bytes) -> None:
        self.receive_into = sock.recv_into
        self.is_silent = True  # nothing has come so far
        self._event = event
        self._pending = b""  # the end of the last read, where an event's mark may have begun

    def count(self, buffer: bytearray, size: int) -> int:
        """Events whose mark ends in this read of the buffer's first `size` bytes."""
        if not self._pending and buffer[size - 1] in ENDS:
            return buffer.count(self._event, 0, size)
        data = self._pending + buffer[:size]
        # Where an event ends, no mark has begun.
        self._pending = b"" if data[-1] in ENDS else data[1 - len(self._event) :]
        return data.count(self._event)


class Client:
    """All sockets of one run."""

    def __init__(self, order: Order) -> None:
        kind = "sse" if order.transport == "sse" else "ws"
        self._order = order
        self._event = EVENT[kind]
        self._sampled = SAMPLED[kind]
        self._lanes = TRANSPORTS[order.transport]
        self._selector = selectors.DefaultSelector()
        self._begin: tuple[float, float] | None = None
        self._events = self._num_reads = self._num_bytes = self._num_silent = 0
        self._idle_s = self._pause_s = 0.0
        self._buffer = bytearray(READ_BYTES)
        self._is_over = False
        self._raw: list[tuple[bytes, float]] = []

    def open(self) -> int:
        """Connect and ask for every stream; the number of sockets, once all have answered."""
        num_sockets = self._order.num_streams // self._lanes
        sockets = [self._connect() for _ in range(num_sockets)]  # before the server is busy
        self._stuck = [self._connect(STUCK_BYTES) for _ in range(self._order.num_stuck)]
        for sock in self._stuck:
            self._ask(sock, 1)
        for sock in sockets:
            self._ask(sock, self._lanes)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, Connection(sock, self._event))
        self._num_silent = num_sockets
        while self._num_silent:
            self._read()
        self._pause_s = PAUSE_S * num_sockets
        return num_sockets

    def run(self) -> None:
        """Read until standard input ends."""
        self._selector.register(0, selectors.EVENT_READ, None)
        began = time.perf_counter()
        while not self._is_over:
            if self._read():
                began = time.perf_counter()
            now = time.perf_counter()
            while now - began < self._pause_s:
                now = time.perf_counter()
            self._idle_s += now - began
            began = now

    def _ask(self, sock: socket.socket, lanes: int) -> None:
        if self._order.transport == "sse":
            sock.sendall(_chat_request(self._order.max_tokens))
        else:
            sock.sendall(b"".join(_create(i, self._order.max_tokens) for i in range(lanes)))

    def _connect(self, room: int = 0) -> socket.socket:
        """A socket; `room`: its receive buffer in bytes, 0 for the system's default."""
        sock = socket.socket()
        if room:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        sock.settimeout(CONNECT_S)
        sock.connect(("127.0.0.1", self._order.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._order.transport != "sse":
            _shake_hands(sock)
        return sock

    def _read(self) -> int:
        """Read the available data, without sleeping: waking this process would cost the server.

        Returns the number of sockets that had some.
        """
        is_counting = self._begin is not None
        ready = self._selector.select(0)
        for key, _ in ready:
            connection = key.data
            if connection is None:
                self._obey(os.read(0, READ_BYTES))
                break
            size = connection.receive_into(self._buffer)
            if not size:
                raise ConnectionError("the server closed a stream")
            if connection.is_silent:
                _require_accepted(self._buffer[:size])
                connection.is_silent = False
                self._num_silent -= 1
            if is_counting:
                if not self._num_reads % SAMPLE:
                    self._raw.append((bytes(self._buffer[:size]), time.perf_counter()))
                self._num_reads += 1
                self._num_bytes += size
                self._events += connection.count(self._buffer, size)
        return len(ready)

    def _obey(self, command: bytes) -> None:
        if command == b"begin\n":
            self._begin = time.perf_counter(), time.process_time()
            self._idle_s = 0.0
            self._tell(Began())
        elif command == b"end\n" and self._begin is not None:
            took_s, cpu_s = time.perf_counter() - self._begin[0], time.process_time()
            self._tell(self._counted(took_s, cpu_s - self._begin[1]))
            self._begin = None
        elif not command:
            self._is_over = True

    def _counted(self, took_s: float, cpu_s: float) -> Counted:
        samples = [
            (match[1].decode(), int(match[2]) - 1, at)
            for data, at in self._raw
            for match in self._sampled.finditer(data)
        ]
        counts = (self._events, self._num_reads, self._num_bytes)
        return Counted(*counts, took_s, cpu_s, self._idle_s, samples)

    @staticmethod
    def _tell(value: msgspec.Struct) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()


def _require_accepted(data: bytearray) -> None:
    if b"HTTP/1.1 200" not in data and b"response." not in data:
        raise ConnectionError(f"the server answered {data[:300]!r}")


def _chat_request(max_tokens: int) -> bytes:
    fields = {"messages": MESSAGES, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    fields["detach_s"] = 1  # a journal has chats that outlive their reader
    body = msgspec.json.encode(fields)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


def _shake_hands(sock: socket.socket) -> None:
    sock.sendall(
        b"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\n"
        b"connection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: %s\r\n\r\n"
        % base64.b64encode(os.urandom(16))
    )
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(READ_BYTES)
        data += part
        if not part or b" 101 " not in data[:16]:
            raise ConnectionError(f"the server answered {data[:300]!r}")


def _create(lane: int, max_tokens: int) -> bytes:
    """A masked text frame (RFC 6455, 5.2; the mask is zero) with a response.create."""
    event = {
        "type": "response.create",
        "stream_id": f"lane-{lane}",
        "input": MESSAGES,
        "max_output_tokens": max_tokens,
        "ignore_eos": True,
    }
    data = msgspec.json.encode(event)
    return b"\x81" + bytes([0x80 | 126]) + len(data).to_bytes(2, "big") + b"\0\0\0\0" + data


def main() -> None:
    """Open what the order says, then count."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    raise_file_limit()
    pin(order.core)
    client = Client(order)
    client._tell(Opened(client.open()))
    client.run()


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum that the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pin(core: int | None) -> None:
    """Pin this process, and threads it will start, to one core."""
    if core is not None and sys.platform == "linux":
        os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    main()

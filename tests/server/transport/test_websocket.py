"""The frames: equal to those that websockets writes, and bounds on what a hostile client sends."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.sync.client import connect

from streamer.loadtest.attacks.attackers import frame as client_frame
from streamer.server.transport import websocket as websocket_protocol
from streamer.server.transport.websocket import BINARY, TEXT, Frames, StreamingWebSocket, frame
from tests.server.responses.test_socket import ENDLESS
from tests.server.support.running import Running

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def answered(server: Running, *headers: bytes) -> tuple[socket.socket, bytes]:
    """A handshake with these headers too, and the head of its answer."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=20)
    raw.sendall(b"\r\n".join((HANDSHAKE[:-4], *headers, b"", b"")))
    got = b""
    while not got.endswith(b"\r\n\r\n"):
        got += raw.recv(1)
    return raw, got


def opened(server: Running) -> socket.socket:
    raw, got = answered(server)
    assert b" 101 " in got
    return raw


def frames_to_end(raw: socket.socket) -> list[tuple[int, bytes]]:
    """(opcode, payload) of every frame to the connection's end."""
    data, found = b"", []
    while part := raw.recv(1 << 16):
        data += part
    while data:
        size, begin = data[1], 2
        if size == 126:
            size, begin = struct.unpack("!H", data[2:4])[0], 4
        found.append((data[0] & 15, data[begin : begin + size]))
        data = data[begin + size :]
    return found


def close_code(frames: list[tuple[int, bytes]]) -> int:
    assert frames[-1][0] == Opcode.CLOSE
    return int.from_bytes(frames[-1][1][:2], "big")


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
@pytest.mark.parametrize(("kind", "opcode"), [(TEXT, Opcode.TEXT), (BINARY, Opcode.BINARY)])
def test_frames_are_those_of_websockets(kind: bytes, opcode: Opcode, length: int) -> None:
    data = bytes(length)
    assert frame(kind, data) == Frame(opcode, data).serialize(mask=False)


# ---------------------------------------------------------------- floods


@pytest.mark.parametrize(
    ("begin", "sent", "burst"),
    [
        (b"", client_frame(9), websocket_protocol.EVENT_BURST // websocket_protocol.BARE_COST),
        (b"", client_frame(10), websocket_protocol.EVENT_BURST // websocket_protocol.BARE_COST),
        (client_frame(1, is_last=False), client_frame(0, is_last=False), 1000),
        (b"", client_frame(1, b"{"), websocket_protocol.EVENT_BURST),
        (b"", client_frame(1, b" " * (1 << 20)), websocket_protocol.EVENT_BURST // 257),
    ],
    ids=["pings", "pongs", "fragments", "one-byte", "large"],
)
def test_every_frame_is_charged_where_it_is_taken_apart(
    server: Running, monkeypatch: pytest.MonkeyPatch, begin: bytes, sent: bytes, burst: int
) -> None:
    seen = []
    take = websocket_protocol.FrameBudget.take

    def counted(*args: Any, **kwargs: Any) -> bool:
        seen.append(1)
        return take(*args, **kwargs)

    monkeypatch.setattr(websocket_protocol.FrameBudget, "take", counted)
    monkeypatch.setattr(websocket_protocol, "LINGER_S", 0.2)
    monkeypatch.setattr(websocket_protocol, "EVENTS_PER_S", 0)  # however slow the machine is
    with opened(server) as raw:
        raw.sendall(begin + sent * (burst + (2 if begin else 1)))
        assert close_code(frames_to_end(raw)) == 4429
    assert burst <= len(seen) <= burst + 2


async def protocol_with(written: list[bytes]) -> StreamingWebSocket:
    config = uvicorn.Config("x:y", interface="asgi3", ws_max_size=1 << 20, log_config=None)
    config.loaded_app, config.loaded = None, True  # type: ignore[assignment]
    made = StreamingWebSocket(config=config, server_state=ServerState(), app_state={})
    made.transport = SimpleNamespace(write=written.append)  # type: ignore[assignment]
    made.conn = Frames(made.loop, state=State.OPEN, max_size=1 << 20)
    return made


async def test_a_message_is_written_at_once_only_while_the_socket_takes_it() -> None:
    written: list[bytes] = []
    protocol = await protocol_with(written)
    assert protocol.write_message(b"text", True)
    assert protocol.write_message(b"data", False)
    protocol.pause_writing()
    assert not protocol.write_message(b"later", True)
    protocol.resume_writing()
    protocol.close_sent = True
    assert not protocol.write_message(b"too late", True)
    assert written == [frame(TEXT, b"text"), frame(BINARY, b"data")]


async def test_pongs_to_a_peer_that_reads_nothing_do_not_accumulate() -> None:
    written: list[bytes] = []
    protocol = await protocol_with(written)
    protocol.pause_writing()
    for i in range(500):
        protocol._parse(client_frame(9, b"%d" % i))
    assert written == []
    protocol.resume_writing()
    assert written == [Frame(Opcode.PONG, b"499").serialize(mask=False)]


@pytest.mark.parametrize("takes", [True, False])
async def test_a_peer_that_answers_no_ping_and_reads_nothing_is_dropped(takes: bool) -> None:
    """A close handshake would wait for a peer that reads nothing."""
    done: list[str] = []
    protocol = await protocol_with([])
    protocol.transport = SimpleNamespace(  # type: ignore[assignment]
        write=lambda data: None,
        is_closing=lambda: False,
        close=lambda: done.append("close"),
        abort=lambda: done.append("abort"),
    )
    if not takes:
        protocol.pause_writing()
    protocol.keepalive_timeout()
    assert done == (["close"] if takes else ["close", "abort"])


async def test_other_work_goes_on_between_two_events_of_a_socket() -> None:
    protocol = await protocol_with([])
    for _ in range(100):
        protocol.queue.put_nowait({"type": "websocket.receive", "text": "x"})
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(work())
    for _ in range(100):
        await protocol.receive()
    beside.cancel()
    assert turns >= 100


# ---------------------------------------------------------------- ends


async def test_a_server_that_ends_while_a_peer_closes_its_connection_ends_in_order() -> None:
    written: list[bytes] = []
    protocol = await protocol_with(written)
    protocol.handshake_complete = True
    protocol.transport = SimpleNamespace(  # type: ignore[assignment]
        write=written.append, is_closing=lambda: False, close=lambda: None
    )
    protocol._parse(client_frame(8, b"\x03\xe8"))
    protocol.shutdown()
    assert written == [Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=False)]


def test_a_close_inside_a_fragmented_message_is_a_close(server: Running) -> None:
    with opened(server) as raw:
        raw.sendall(client_frame(1, b"{", is_last=False) + client_frame(8, b"\x03\xe8"))
        assert close_code(frames_to_end(raw)) == 1000


@pytest.mark.parametrize(
    ("sent", "code"),
    [(client_frame(1, b"\xff"), 1007), (client_frame(3), 1002), (client_frame(0), 1002)],
    ids=["text that is none", "an unknown opcode", "a fragment of nothing"],
)
def test_a_protocol_error_with_lanes_running_logs_nothing(
    slow: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
    code: int,
) -> None:
    monkeypatch.setattr(websocket_protocol, "LINGER_S", 0.2)
    caplog.set_level(logging.WARNING)
    create = b'{"type": "response.create", "input": "x", "stream_id": "%d", "detach_s": 0, '
    create += b'"max_output_tokens": %d, "ignore_eos": true}' % ENDLESS["max_output_tokens"]
    with opened(slow) as raw:
        raw.sendall(b"".join(client_frame(1, create % lane) for lane in range(3)))
        slow.wait_metric('streamer_requests{state="running"}', 3)
        raw.sendall(sent)
        assert close_code(frames_to_end(raw)) == code
    slow.wait_idle()
    gc.collect()
    assert not caplog.records, caplog.text


# ---------------------------------------------------------------- RFC 6455


async def test_bytes_before_a_handshake_is_answered_end_the_connection() -> None:
    done: list[str] = []
    protocol = await protocol_with([])
    protocol.conn = Frames(protocol.loop, max_size=1 << 20)
    protocol.transport = SimpleNamespace(abort=lambda: done.append("abort"))  # type: ignore[assignment]
    protocol.conn.receive_data(HANDSHAKE)
    protocol._parse(b"\xff" * 8)
    assert done == ["abort"]


def raw_frame(first: int, data: bytes = b"", *, masked: int = 0x80) -> bytes:
    """A short frame with any first byte, reserved bits and all."""
    return bytes([first, masked | len(data)]) + bytes(4 if masked else 0) + data


def close(code: int, reason: bytes = b"") -> bytes:
    return raw_frame(0x88, code.to_bytes(2, "big") + reason)


CONFORMANCE = {
    "no code": (raw_frame(0x88), None),
    "a code of the client's own": (close(3999, b"over"), 3999),
    "a reason of many bytes a letter": (close(1000, "\N{EURO SIGN}".encode() * 41), 1000),
    "a code of one byte": (raw_frame(0x88, b"\x03"), 1002),
    **{f"code {n}": (close(n), 1002) for n in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000)},
    **{f"code {n}": (close(n), n) for n in (1001, 1003, 1007, 1011, 1014, 3000, 4999)},
    "a reason that is no text": (close(1000, b"\xff"), 1007),
    "a close of 126 bytes": (client_frame(8, b"\x03\xe8" + b"x" * 124), 1002),
    "a close in fragments": (raw_frame(8, b"\x03\xe8"), 1002),
    "a second reserved bit": (raw_frame(0xA1, b"{}"), 1002),
    "a third reserved bit": (raw_frame(0x91, b"{}"), 1002),
    "a reserved bit of a ping": (raw_frame(0xC9), 1002),
    "an unknown control frame": (raw_frame(0x8B), 1002),
    "no mask": (raw_frame(0x81, b"{}", masked=0), 1002),
    "a ping in fragments": (raw_frame(9), 1002),
    "a ping of 126 bytes": (client_frame(9, b"x" * 126), 1002),
    "a message in a message": (raw_frame(1, b"{") + raw_frame(1, b"}"), 1002),
    "a letter cut off": (raw_frame(1, b"\xe2\x82") + raw_frame(0x80), 1007),
    "a letter cut by another": (raw_frame(1, b"\xe2\x82") + raw_frame(0x80, b"A"), 1007),
    "half of a surrogate pair": (raw_frame(0x81, b"\xed\xa0\x80"), 1007),
    "a letter longer than it need be": (raw_frame(0x81, b"\xc0\xaf"), 1007),
    "a letter beyond the last": (raw_frame(0x81, b"\xf4\x90\x80\x80"), 1007),
    "a compressed message": (raw_frame(0xC1, b"\xaa\xae\x05\x00"), 1002),
    "a compressed message in fragments": (raw_frame(0x41, b"\xaa") + raw_frame(0x80), 1002),
    "a fragment that says it is compressed": (raw_frame(1, b"{") + raw_frame(0xC0, b"}"), 1002),
    "a length of 63 bits": (b"\x81\xff\x7f" + b"\xff" * 7 + bytes(4), 1009),
}


@pytest.mark.parametrize(("sent", "code"), CONFORMANCE.values(), ids=CONFORMANCE)
def test_how_a_client_may_end_it(
    server: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes, code: int | None
) -> None:
    """With the code of the protocol for it, and the client's own where it is one."""
    monkeypatch.setattr(websocket_protocol, "LINGER_S", 0.2)
    with opened(server) as raw:
        raw.sendall(sent)
        frames = frames_to_end(raw)
    if code is None:
        assert frames == [(Opcode.CLOSE, b"")]
    else:
        assert close_code(frames) == code


DEFLATE = b"permessage-deflate"
OFFERS = {
    "plain": (DEFLATE,),
    "with parameters": (DEFLATE + b"; client_max_window_bits; server_max_window_bits=10",),
    "with parameters that it can't have": (DEFLATE + b"; server_max_window_bits=99; x",),
    "several": (DEFLATE + b'; server_max_window_bits="8", ' + DEFLATE + b", x-other; a=b",),
    "in two headers": (DEFLATE, b"x-webkit-deflate-frame"),
    "with empty items": (b" , " + DEFLATE + b" ,,",),
}


@pytest.mark.parametrize("offers", OFFERS.values(), ids=OFFERS)
def test_an_offer_to_compress_is_declined(
    server: Running, monkeypatch: pytest.MonkeyPatch, offers: tuple[bytes, ...]
) -> None:
    """By no word of it in the answer (RFC 7692, 5): plain messages go both ways, others are an
    error of the protocol, as the reserved bit that marks them is."""
    monkeypatch.setattr(websocket_protocol, "LINGER_S", 0.2)
    raw, head = answered(server, *(b"Sec-WebSocket-Extensions: " + each for each in offers))
    with raw:
        assert b" 101 " in head
        assert b"extensions" not in head.lower()
        raw.sendall(raw_frame(0x81, b"{}"))
        while b'"error"' not in raw.recv(1 << 16, socket.MSG_PEEK):
            pass
        raw.sendall(raw_frame(0xC1, b"\xaa\xae\x05\x00"))
        frames = frames_to_end(raw)
    assert [opcode for opcode, _ in frames] == [Opcode.TEXT, Opcode.CLOSE]
    assert json.loads(frames[0][1])["type"] == "error"
    assert close_code(frames) == 1002


@pytest.mark.parametrize(
    "offer", [b"", b"; a", DEFLATE + b"; ;", b"a=", b'a; b="', b"\xff", b"a b"]
)
def test_an_offer_that_is_none_fails_the_handshake(server: Running, offer: bytes) -> None:
    raw, head = answered(server, b"Sec-WebSocket-Extensions: " + offer)
    with raw:
        assert b" 400 " in head.partition(b"\r\n")[0]


def test_a_client_that_compresses_by_default_is_served_without(server: Running) -> None:
    with connect(server.ws_url, compression="deflate") as client:
        assert client.protocol.extensions == []
        client.send("x" * 10_000)
        assert json.loads(client.recv(timeout=20))["type"] == "error"


def test_a_message_in_fragments_with_pings_between_is_one(server: Running) -> None:
    event = '{"type": "\N{EURO SIGN}"}'.encode()
    at = event.index(b"\xe2") + 1
    sent = raw_frame(1, event[:at]) + raw_frame(0x89, b"1") + raw_frame(0, b"")
    sent += raw_frame(0x8A, b"never asked for") + raw_frame(0, event[at:]) + raw_frame(0x89, b"2")
    with opened(server) as raw:
        raw.sendall(sent + raw_frame(0x80))
        while b'"error"' not in raw.recv(1 << 16, socket.MSG_PEEK):
            pass
        raw.sendall(close(1000))
        frames = frames_to_end(raw)
    assert [opcode for opcode, _ in frames] == [*[Opcode.PONG] * 2, Opcode.TEXT, Opcode.CLOSE]
    assert [data for _, data in frames[:2]] == [b"1", b"2"]
    assert json.loads(frames[2][1])["type"] == "error"

"""Inputs for test_fuzz: good ones, changed at random. The same seed gives the same inputs."""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from typing import Any

import msgspec

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FLAT_TOOL = {"type": "function", "name": "get", "parameters": TOOL["function"]["parameters"]}  # type: ignore[index]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
USER = {"role": "user", "content": "count"}
SHORT: dict[str, Any] = {"model": "streamer-demo", "max_tokens": 4}
KNOWN = "resp_1"  # stands for the newest response, of a socket or a body
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**SHORT, "messages": [USER], "n": 2, "logprobs": True}),
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "get", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
            "stop": ["7", "x"],
            "logit_bias": {"3": 1.5},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    ("/v1/completions", {**SHORT, "prompt": "count", "echo": True, "logprobs": 2, "best_of": 2}),
    ("/v1/completions", {**SHORT, "prompt": [[1, 2], [3]], "seed": 3, "stream": True}),
    (
        "/v1/responses",
        {
            "model": "streamer-demo",
            "max_output_tokens": 4,
            "input": [{"type": "message", "role": "user", "content": "count"}],
            "tools": [FLAT_TOOL],
            "instructions": "x",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "metadata": {"a": "b"},
            "store": False,
        },
    ),
    (
        "/v1/responses",
        {"model": "streamer-demo", "max_output_tokens": 4, "input": "x", "stream": True},
    ),
    (
        "/v1/messages",
        {**SHORT, "messages": [USER], "system": "x", "tools": [{"name": "a", "input_schema": {}}]},
    ),
    ("/api/chat", {"model": "streamer-demo", "messages": [USER], "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "streamer-demo", "prompt": "x", "options": {"num_predict": 4}}),
    (
        "/v1/responses",
        {"model": "streamer-demo", "max_output_tokens": 40, "input": "x", "background": True},
    ),
    (f"/v1/responses/{KNOWN}/cancel", {}),
    ("/v1/responses/compact", {"model": "streamer-demo", "input": "x", "instructions": "x"}),
    (
        "/v1/responses/input_tokens",
        {"model": "streamer-demo", "input": "x", "tools": [FLAT_TOOL], "instructions": "x"},
    ),
    (
        "/v1/messages/count_tokens",
        {"model": "streamer-demo", "messages": [USER], "system": "x", "tools": []},
    ),
    (
        "/v1/embeddings",
        {
            "model": "streamer-demo",
            "input": ["x", "count"],
            "dimensions": 8,
            "encoding_format": "base64",
        },
    ),
    ("/api/show", {"model": "streamer-demo", "verbose": True}),
    ("/v1/tickets", {}),
    ("/tokenize", {"model": "streamer-demo", "prompt": "x"}),
    ("/detokenize", {"model": "streamer-demo", "tokens": [1, 2]}),
]
CREATE = {"type": "response.create", "stream_id": "a", "input": "x", "max_output_tokens": 4}
NEXT = {**CREATE, "previous_response_id": KNOWN}
EVENTS: list[dict[str, Any]] = [
    CREATE,
    {**CREATE, "tools": [FLAT_TOOL], "temperature": 0.5, "metadata": {"a": "b"}},
    {**CREATE, "max_output_tokens": 40, "ignore_eos": True, "stream_id": "b"},
    {**NEXT, "stream_id": "c"},
    {**NEXT, "fork": {"at": 2, "text": "x"}},
    {**CREATE, "generate": False},
    {"type": "response.cancel", "response_id": KNOWN},
    {"type": "response.resume", "stream_id": "a", "response_id": KNOWN, "starting_after": 3},
    {"type": "response.ack", "response_id": KNOWN, "sequence_number": 3},
    {"type": "response.steer", "previous_response_id": KNOWN, "input": "x"},
    {"type": "session.update", "window": 5, "detach_s": 1, "include": ["token_ids"]},
    {"type": "session.ping", "t": 1},
]
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 2**70, -0.0, 1e308, -1e308),
    *(float("nan"), float("inf"), "", " ", "\x00", "\ud800", "\U0010ffff", "x" * 300, "a\nb"),
    *([], {}, [[]], [None], {"": None}, {"type": "x"}, "data:,x", "http://127.0.0.1/x", "../x"),
)
# What would only make an answer long.
COSTLY = {"n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "beam_width"}
OPCODES = (1, 2, 0x81, 0x82, 0x88, 0x89, 0x8A, 0, 0x80, 0x41, 0xC1, 0xC2, 0xC9)
# The last but one is `{}` as permessage-deflate sends it, and as its bomb.
PAYLOADS = (b"", b"{}", b"\xff\xfe", b"\x03\xe8", b"\x03\xe8\xff", b"x" * 126)
PAYLOADS += (b"\xaa\xae\x05\x00", zlib.compress(bytes(1 << 20), wbits=-15))
DEFLATE = b"permessage-deflate; client_max_window_bits; server_max_window_bits=10"
TEMPLATE_PARTS = (
    *("{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% endif %}"),
    *("{{ m.content }}", "{{ m['role'] }}", "{% set x = 1 %}", "{{ x }}", "{% macro f(a) %}"),
    *("{% endmacro %}", "{{ f(1) }}", "{{ tools | tojson }}", "{{ ''.__class__ }}", "{{ x.y.z }}"),
    *(
        "{{ raise_exception('x') }}",
        "{{ 'a' * 9 ** 9 }}",
        "{% generation %}",
        "{% endgeneration %}",
    ),
    *(
        "{{ range(9) | list }}",
        "{{ m | length }}",
        "{{ x | center(10 ** 9) }}",
        "{#",
        "#}",
        "{{",
        "}}",
    ),
    *("{% break %}", "{% include 'x' %}", "{% import 'x' as y %}", "{{ strftime_now('%Y') }}"),
    *(
        "{{ x / 0 }}",
        "{{ lipsum() }}",
        "{{ cycler.__init__ }}",
        "{{ '%s' % messages }}",
        "text",
        "{%-",
    ),
    *("{{ messages[0].content.format(x) }}", "{{ namespace(a=1).a }}", "{{ x | batch(10**9) }}"),
)


def of_response(event: bytes, name: bytes, is_packed: bool) -> bytes:
    """The event, about the response of this name where it was about KNOWN."""
    if is_packed:
        return event.replace(msgspec.msgpack.encode(KNOWN), msgspec.msgpack.encode(name.decode()))
    return event.replace(KNOWN.encode(), name)


def masked(data: bytes, mask: bytes) -> bytes:
    """The mask, and the payload under it (RFC 6455, 5.3)."""
    return mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) of a value, into `found`."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for key, inner in pairs:
        found.append((value, key))
        _places(inner, found)
    return found


class Maker:
    """Makes inputs; `names` are fields that a body may have."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self.chance = random.Random(seed)
        self._names = names

    def changed(self, good: dict[str, Any]) -> dict[str, Any]:
        """A copy with one to four changes."""
        bad, chance = copy.deepcopy(good), self.chance
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            places = _places(bad, [])
            if not places or chance.random() < 0.3:
                name = chance.choice(self._names)
                bad[name] = 3 if name in COSTLY else copy.deepcopy(chance.choice(ODD))
                continue
            container, key = chance.choice(places)
            if chance.random() < 0.2:
                del container[key]
            elif chance.random() < 0.1:
                container[key] = [container[key]] * chance.choice((1, 2, 40))
            elif chance.random() < 0.05:
                inner: Any = 0
                for _ in range(chance.choice((10, 90))):
                    inner = [inner] if chance.random() < 0.5 else {"a": inner}
                container[key] = inner
            else:
                container[key] = copy.deepcopy(chance.choice(ODD))
        return bad

    def scratched(self, data: bytes) -> bytes:
        """A copy with bytes replaced, removed, doubled or cut."""
        bad, chance = bytearray(data), self.chance
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(bad) + 1)
            match chance.randrange(5):
                case 0 | 1:
                    bad[at : at + 1] = bytes((chance.randrange(256),))
                case 2:
                    del bad[at : at + chance.choice((1, 2, 10))]
                case 3:
                    bad[at:at] = bad[at : at + chance.choice((1, 8, 30))]
                case _:
                    del bad[at:]
        return bytes(bad)

    def body(self) -> tuple[str, bytes]:
        """A path, and a body for it."""
        path, good = self.chance.choice(BODIES)
        data = json.dumps(self.changed(good), ensure_ascii=self.chance.random() < 0.9)
        raw = data.encode("utf-8", "surrogatepass")
        return path, self.scratched(raw) if self.chance.random() < 0.2 else raw

    def event(self, is_packed: bool) -> bytes:
        bad = self.changed(self.chance.choice(EVENTS))
        try:
            data = msgspec.msgpack.encode(bad) if is_packed else json.dumps(bad).encode()
        except (OverflowError, UnicodeError):  # MessagePack has no such integers and strings
            data = msgspec.msgpack.encode(self.chance.choice(EVENTS))
        return self.scratched(data) if self.chance.random() < 0.3 else data

    def handshake(self, host: str) -> bytes:
        """A WebSocket's, some of them with an offer to compress, which may be changed."""
        chance = self.chance
        head = b"GET /v1/responses HTTP/1.1\r\nHost: %b\r\nUpgrade: websocket\r\n" % host.encode()
        head += b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        head += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        if chance.random() < 0.5:
            offer = self.scratched(DEFLATE) if chance.random() < 0.5 else DEFLATE
            head += b"Sec-WebSocket-Extensions: %b\r\n" % offer
        return head + b"\r\n"

    def frames(self) -> bytes:
        """One to six frames of a client: any opcode, bits, lengths, masks; some of them cut."""
        chance, sent = self.chance, b""
        for _ in range(chance.randrange(1, 7)):
            first = chance.choice((*OPCODES, chance.randrange(256)))
            data = chance.choice((*PAYLOADS, chance.randbytes(chance.randrange(140))))
            size = len(data) if chance.random() < 0.9 else chance.choice((0, 125, 1 << 16, 1 << 63))
            mask = 0x80 if chance.random() < 0.95 else 0
            if size < 126 and chance.random() < 0.9:
                head = bytes((first, mask | size))
            elif size < 1 << 16 and chance.random() < 0.9:
                head = struct.pack(">BBH", first, mask | 126, size)
            else:
                head = struct.pack(">BBQ", first, mask | 127, size)
            sent += head + (masked(data, chance.randbytes(4)) if mask else data)
        return sent[: chance.randrange(len(sent))] if chance.random() < 0.1 else sent

    def safetensors(self) -> bytes:
        """A file of two tensors whose header lies."""
        entry = {"dtype": "F16", "shape": [64], "data_offsets": [0, 128]}
        good = {"a": entry, "b": {**entry, "data_offsets": [128, 256]}, "__metadata__": {"a": "b"}}
        header = json.dumps(self.changed(good)).encode()
        if self.chance.random() < 0.3:
            header = self.scratched(header)
        size = len(header)
        if self.chance.random() < 0.1:
            size = self.chance.choice((0, size + 1, size // 2, 1 << 31, (1 << 64) - 1))
        data = struct.pack("<Q", size) + header + bytes(256)
        return data[: self.chance.randrange(len(data))] if self.chance.random() < 0.1 else data

    def gguf(self, good: bytes, header_bytes: int) -> bytes:
        """A GGUF file whose header was changed; its tensors are left out after a KiB."""
        bad, chance = bytearray(good[: header_bytes + 1024]), self.chance
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(header_bytes)
            if chance.random() < 0.5:
                bad[at] = chance.randrange(256)
            else:
                value = chance.choice((0, 1, 255, 1 << 31, (1 << 60) + 3, (1 << 64) - 1))
                bad[at : at + 8] = struct.pack("<Q", value)
        return bytes(bad)

    def template(self) -> str:
        return "".join(self.chance.choices(TEMPLATE_PARTS, k=self.chance.randrange(1, 9)))

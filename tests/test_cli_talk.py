"""Chat and generate: over a real socket to a small server, and their conversation by itself."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from rich.console import Console
from websockets.asyncio.server import ServerConnection, serve

from streamer.cli.arguments import UsageError
from streamer.cli.chat import AnswerTiming, converse, stream
from streamer.cli.talk import Message, OverSocket, Piece, piece_of, socket_url
from streamer.errors import StreamerError

DEADLINE_S = 10.0
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def delta(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "delta": text, "sequence_number": 4}


CREATED = {"type": "response.created", "response": {"id": "resp_1"}}
COMPLETED = {"type": "response.completed", "response": {"usage": {"output_tokens": 3}}}


class Server:
    """Plays `script` after a create; keeps what it received."""

    def __init__(self, script: list[dict[str, Any]]) -> None:
        self.script = script
        self.received: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.ended = asyncio.Event()
        self.url = ""

    async def handle(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.headers = {k.lower(): v for k, v in socket.request.headers.raw_items()}
        self.received.append(json.loads(await socket.recv()))
        for event in self.script:
            await socket.send(json.dumps(event))
        async for frame in socket:
            self.received.append(json.loads(frame))
        self.ended.set()


@asynccontextmanager
async def served(script: list[dict[str, Any]]) -> AsyncIterator[Server]:
    server = Server(script)
    protocols: Any = ["streamer.v1.json"]
    async with serve(server.handle, "127.0.0.1", 0, subprotocols=protocols) as listening:
        port = listening.sockets[0].getsockname()[1]
        server.url = socket_url(f"127.0.0.1:{port}")
        yield server


async def test_an_answer_over_a_socket() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        served([CREATED, delta("a"), delta("b"), COMPLETED]) as s,
    ):
        source = OverSocket(s.url, "secret", {"temperature": 0.5, "max_tokens": 3})
        pieces = [piece async for piece in source.answer(HELLO)]
        await s.ended.wait()
    assert pieces == [Piece("a"), Piece("b"), Piece("", 3, "stop")]
    assert s.received == [
        {
            "type": "response.create",
            "input": HELLO,
            "temperature": 0.5,
            "max_output_tokens": 3,
        }
    ]
    assert s.headers["authorization"] == "Bearer secret"
    assert "streamer.v1.json" in s.headers["sec-websocket-protocol"]


async def test_leaving_an_answer_cancels_it_on_the_server() -> None:
    async with asyncio.timeout(DEADLINE_S), served([CREATED, delta("a")]) as s:
        async with aclosing(OverSocket(s.url, None, {}).answer(HELLO)) as answer:
            assert await anext(answer) == Piece("a")
        await s.ended.wait()
    assert s.received[1:] == [{"type": "response.cancel", "response_id": "resp_1"}]


async def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    refusal = {"type": "error", "status": 400, "error": {"message": "top_k must be an integer"}}
    async with asyncio.timeout(DEADLINE_S), served([refusal]) as s:
        with pytest.raises(StreamerError, match="top_k must be an integer"):
            [piece async for piece in OverSocket(s.url, None, {}).answer(HELLO)]


async def test_an_address_without_a_server_is_an_error() -> None:
    async with served([]) as s:
        url = s.url
    with pytest.raises(StreamerError, match=r"127\.0\.0\.1"):
        [piece async for piece in OverSocket(url, None, {}).answer(HELLO)]


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        (delta("x"), Piece("x")),
        (COMPLETED, Piece("", 3, "stop")),
        ({"type": "response.in_progress"}, None),
        ({"type": "response.something_new", "response": {}}, None),
        (
            {
                "type": "response.incomplete",
                "response": {"incomplete_details": {"reason": "max_output_tokens"}},
            },
            Piece("", None, "max_output_tokens"),
        ),
    ],
)
def test_the_piece_of_each_event(event: dict[str, Any], piece: Piece | None) -> None:
    assert piece_of(event) == piece


def test_a_failed_answer_is_an_error() -> None:
    failed = {"type": "response.failed", "response": {"error": {"message": "NaN in row 3"}}}
    with pytest.raises(StreamerError, match="NaN in row 3"):
        piece_of(failed)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "ws://localhost:8000/v1/responses"),
        ("http://h:1/", "ws://h:1/v1/responses"),
        ("http://h:1/v1", "ws://h:1/v1/responses"),
        ("https://h/llm/v1/", "wss://h/llm/v1/responses"),
        ("ws://h:1/v1/responses", "ws://h:1/v1/responses"),
    ],
)
def test_addresses_as_people_type_them(given: str, url: str) -> None:
    assert socket_url(given) == url


@pytest.mark.parametrize("url", ["file:///x", "http://h:x", "http://[::1", " ", "", "h:99999"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        socket_url(url)


class Scripted:
    """A talker that answers with what it was asked last; `hang` waits for ever instead."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.is_closed = False

    async def answer(self, messages: list[Message]) -> AsyncIterator[Piece]:
        self.asked.append(messages)
        said = messages[-1]["content"]
        try:
            if said == "fail":
                raise StreamerError("no [room]")
            yield Piece("you said ", 2)
            if said == "hang":
                await asyncio.Event().wait()
            yield Piece(said, 3, "stop")
        finally:
            self.is_closed = True


def conversation(
    monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException], system: str | None = None
) -> tuple[Scripted, list[Message], str]:
    """The questions, the conversation at the end, and the screen."""
    typed = iter([*lines, EOFError])

    def read(*_: object) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    source, screen = Scripted(), io.StringIO()
    with asyncio.Runner() as runner:
        said = converse(runner, source, Console(file=screen, width=100), system)
    return source, said.messages, screen.getvalue()


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    source, messages, screen = conversation(monkeypatch, "one", "", "two", system="be brief")
    assert [m["content"] for m in messages] == [
        *("be brief", "one", "you said one", "two", "you said two"),
    ]
    assert source.asked[1] == messages[:-1]
    assert "you said one" in screen
    assert "3 tokens" in screen
    assert "first token" in screen


def test_new_forgets_all_but_the_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    _, messages, _ = conversation(monkeypatch, "one", "/new", "two", system="s")
    assert [m["content"] for m in messages] == ["s", "two", "you said two"]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_a_word_with_a_slash_is_a_command(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    lines = ["one", "/foo", "/?", "/help", "/clear", "//", "/etc/motd", word, "two"]
    source, messages, screen = conversation(monkeypatch, *lines)
    asked = [questions[-1]["content"] for questions in source.asked]
    assert asked == ["one", "//", "/etc/motd"]
    assert len(messages) == 4  # /clear forgot the first question
    assert "unknown command /foo; /help lists them" in screen
    assert screen.count("/exit, /quit, /bye") == 2
    assert "forgotten" in screen


def test_an_error_is_printed_and_its_turn_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    _, messages, screen = conversation(monkeypatch, "fail", "two")
    assert "no [room]" in screen
    assert [m["content"] for m in messages] == ["two", "you said two"]


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    _, messages, _ = conversation(monkeypatch, "one", KeyboardInterrupt, "two")
    assert [m["content"] for m in messages] == ["one", "you said one"]


def test_ctrl_c_in_an_answer_cancels_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_when_printed(monkeypatch, "you said ")
    source, messages, screen = conversation(monkeypatch, "hang", "two")
    assert source.is_closed
    assert "cancelled" in screen
    contents = [m["content"] for m in messages]
    assert contents == ["hang", "you said ", "two", "you said two"]


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and so would these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when_printed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A real SIGINT to this process, the first time `text` has been printed."""
    add = AnswerTiming.add
    pending = [text]

    def add_and_interrupt(self: AnswerTiming, piece: Piece, elapsed_s: float) -> None:
        add(self, piece, elapsed_s)
        if pending and self.text == pending[0]:
            pending.clear()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AnswerTiming, "add", add_and_interrupt)


def test_timing_without_a_token_count() -> None:
    timing = AnswerTiming()
    timing.add(Piece("a"), 0.5)
    timing.add(Piece("b", None, "length"), 1.5)
    assert timing.summary() == "first token 500 ms, ended: length"
    timing.add(Piece("", 3, "stop"), 2.5)
    assert timing.summary() == "first token 500 ms, 3 tokens, 1 tokens/s"


async def test_streaming_prints_as_it_comes() -> None:
    seen: list[str] = []
    screen = io.StringIO()

    async def pieces() -> AsyncIterator[Piece]:
        for word in ("a [b] ", "c"):
            yield Piece(word)
            seen.append(screen.getvalue())

    await stream(pieces(), AnswerTiming(), Console(file=screen))
    assert seen == ["a [b] ", "a [b] c"]

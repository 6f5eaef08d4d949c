"""docs/protocol.md is what the server does: its exchanges, its fields and its error codes.

Blocks of `http` and `websocket` are carried out against the fake model: `>` is sent, `<` expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from streamer.core.sampling import MAX_STOP_BYTES, Grammar, Parameter, SamplingParams
from streamer.server import security, tickets
from streamer.server.openai.common import IN_BODIES, SamplingFields
from streamer.server.responses import lanes, socket, socket_events
from streamer.server.responses.body import ResponseCreate
from streamer.server.transport import http, websocket
from tests.server.support.counting import sse
from tests.server.support.running import DEADLINE_S, Running

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(http|websocket) ?(\S*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HTTP = [code for kind, _, code in BLOCKS if kind == "http"]
SOCKETS = [(protocol, code) for kind, protocol, code in BLOCKS if kind == "websocket"]
IDS = re.compile(r"\b(?:resp|msg|sess|steer|chatcmpl)[-_]\d+\b")
ANYTHING, SKIP = "...", "..."


class Names:
    """The server's names for those of the page, such as resp_1."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def real(self, text: str) -> str:
        return IDS.sub(lambda m: self._found.get(m[0], m[0]), text)

    def learn(self, expected: str, real: str) -> bool:
        return self._found.setdefault(expected, real) == real


def same(expected: Any, real: Any, names: Names) -> bool:
    """Whether a value has all that the page shows; objects may have more fields."""
    if isinstance(expected, dict):
        return isinstance(real, dict) and all(
            name in real and same(value, real[name], names) for name, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(real, list)
            and len(expected) == len(real)
            and all(same(a, b, names) for a, b in zip(expected, real, strict=True))
        )
    if isinstance(expected, str) and IDS.fullmatch(expected):
        return isinstance(real, str) and names.learn(expected, real)
    return bool(expected in (ANYTHING, real))


def text_of(event: Any) -> str:
    """The text that an event streams; the server may merge such events."""
    if not isinstance(event, dict):
        return ""
    if event.get("type") == "response.output_text.delta":
        return str(event.get("delta", ""))
    return ""


def follow(expected: Iterator[str], hear: Callable[[], Any], names: Names) -> Iterator[str]:
    """Compare line by line; yields what is to be sent."""
    is_skipping, ahead = False, ""
    for line in expected:
        if line.startswith("> "):
            yield names.real(line[2:])
            continue
        assert line.startswith("< "), line
        if line[2:] == SKIP:
            is_skipping = True
            continue
        event = json.loads(line[2:])
        if ahead:  # the event before this one has brought its text as well
            assert ahead.startswith(text_of(event)), line
            ahead = ahead.removeprefix(text_of(event))
            continue
        real = hear()
        while is_skipping and not matches(event, real, names):
            real = hear()
        assert matches(event, real, names), f"{line}\n{json.dumps(real)}"
        is_skipping = False
        ahead = text_of(real).removeprefix(text_of(event)) if text_of(event) else ""


def matches(event: Any, real: Any, names: Names) -> bool:
    """As `same`; a delta may also have the text of those after it, and their number."""
    text = text_of(event)
    if text and text_of(real).startswith(text) and text_of(real) != text:
        event = {k: v for k, v in event.items() if k not in ("delta", "sequence_number")}
    return same(event, real, names)


@pytest.fixture(scope="module")
def counting() -> Iterator[Running]:
    """Slow enough that a token is an event, and that an answer can be steered."""
    running = Running(model="fake:tokens_per_s=40").start()
    yield running
    running.stop()


@pytest.mark.parametrize(("protocol", "code"), SOCKETS)
@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_exchanges_on_sockets(counting: Running, protocol: str, code: str, form: str) -> None:
    is_packed = form == "msgpack"
    names = Names()
    protocol = protocol.replace("json", form)
    with connect(counting.ws_url, subprotocols=[Subprotocol(protocol)], max_size=None) as socket:

        def hear() -> Any:
            data = socket.recv(timeout=DEADLINE_S)
            assert isinstance(data, bytes) == is_packed
            return (msgspec.msgpack if is_packed else msgspec.json).decode(data)

        for event in follow(iter(code.splitlines()), hear, names):
            body = json.loads(event)
            socket.send(msgspec.msgpack.encode(body) if is_packed else json.dumps(body))


def test_exchanges_over_http(counting: Running) -> None:
    """In the order of the page: one exchange makes an answer, another resumes it."""
    names = Names()
    with ExitStack() as answers:
        for code in HTTP:
            asked, *expected = code.splitlines()
            method, target, *body = names.real(asked.removeprefix("> ")).split(" ", 2)
            url, content = counting.url + target, body[0] if body else None
            answer = answers.enter_context(
                httpx.stream(method, url, content=content, timeout=DEADLINE_S)
            )
            if "text/event-stream" not in answer.headers["content-type"]:
                answer.read()
                heard = iter([answer.status_code, answer.json()])
                expected = expected if expected[0][2:].isdecimal() else ["< 200", *expected]
                assert not list(follow(iter(expected), heard.__next__, names))
                continue
            check_stream(expected, answer, names)


def check_stream(expected: list[str], answer: httpx.Response, names: Names) -> None:
    """Each event shown is in the stream; `...` stands for any events before the next."""
    events = sse(answer)
    groups = re.split(r"^< \.\.\.$", "\n".join(expected), flags=re.MULTILINE)
    for i, group in enumerate(groups):
        for j, shown in enumerate(shown_events(group)):
            event = next(events)
            while i and not j and not is_shown(shown, event, names):
                event = next(events)
            assert is_shown(shown, event, names), f"{shown}\n{event.id} {event.data}"
    assert not list(events)


def shown_events(group: str) -> Iterator[dict[str, str]]:
    """Fields of each event, which its data ends."""
    fields: dict[str, str] = {}
    for line in filter(None, group.splitlines()):
        name, _, value = line.removeprefix("< ").partition(": ")
        fields[name] = value
        if name == "data":
            yield fields
            fields = {}
    assert not fields or fields.keys() <= {"id", "event"}
    if fields:
        yield fields


def is_shown(shown: dict[str, str], event: Any, names: Names) -> bool:
    if shown.get("id", event.id) != event.id or event.kind != shown.get("event", ""):
        return False
    data = shown.get("data")
    if data is None or event.is_done:
        return data is None or data == event.data
    return same(json.loads(data), event.json, names)


def test_there_are_exchanges() -> None:
    assert len(HTTP) >= 7
    assert len(SOCKETS) >= 5


@pytest.mark.parametrize("body", [SamplingFields, ResponseCreate])
def test_every_field_of_ours_is_documented(body: Any) -> None:
    missing = [name for name in body.__struct_fields__ if f"`{name}`" not in PAGE]
    assert missing in ([], ["user", "safety_identifier", "prompt_cache_key"])


MIB, KIB = 1 << 20, 1 << 10
LIMITS = {  # first cell of a row -> second
    "a body; a WebSocket message": f"{security.MAX_BODY_BYTES // MIB} MiB; "
    f"{socket_events.MAX_MESSAGE_BYTES // MIB} MiB",
    "bodies on their way in, all together": f"{security.MAX_COMING_BYTES // MIB} MiB, and "
    f"{security.FREE_BYTES // KIB} KiB of each free",
    "bodies above 64 KiB of one key whose prompts are being made": (
        f"{security.MAX_USED_BYTES // MIB} MiB"
    ),
    "a request's head; its target; its headers": f"{http.MAX_HEAD_BYTES // KIB} KiB; "
    f"{http.MAX_TARGET_BYTES // KIB} KiB; {http.MAX_HEADERS}",
    "seconds for a head; for a body; between requests": f"{http.HEAD_TIMEOUT_S:g}; "
    f"{http.BODY_TIMEOUT_S:g}; 30",
    "requests sent ahead on a connection": f"{http.MAX_WAITING}",
    "events on a socket": f"{websocket.EVENTS_PER_S:,} a second, {websocket.EVENT_BURST:,} at once",
    "replies that wait to be read on a socket": f"{socket.MAX_REPLIES}, "
    f"{socket.MAX_REPLY_BYTES // MIB} MiB",
    "lanes of a socket; its responses that have not ended; those that wait for their lane": (
        f"{lanes.MAX_LANES}; {lanes.MAX_RESPONSES}; {lanes.MAX_QUEUED}"
    ),
    "bytes of creates and steers that wait on a socket": f"{lanes.MAX_QUEUED_BYTES // MIB} MiB",
}


def test_limits_are_what_the_page_says() -> None:
    rows = (line.split(" | ") for line in PAGE.split("\n## Limits\n")[1].splitlines())
    documented = {row[0].removeprefix("| "): row[1] for row in rows if len(row) == 3}
    assert {name: documented.get(name) for name in LIMITS} == LIMITS
    assert f"within {tickets.TICKET_S} s" in PAGE


def test_every_metric_is_documented(counting: Running) -> None:
    exposed = httpx.get(counting.url + "/metrics").text
    names = re.findall(r"^# TYPE (streamer_\w+?)(?:_total)? ", exposed, re.MULTILINE)
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    documented = set(
        re.findall(r"`(streamer_\w+)`", page.split("## Metrics")[1].split("Worth an")[0])
    )
    assert len(names) > 15
    with_a_journal = {"streamer_journal_up"}
    assert {n for n in names if not n.endswith("_created")} | with_a_journal == documented


def test_every_error_code_is_documented() -> None:
    """The codes that a request can meet: the server's, and the engine's that reach it."""
    ours = {"bad_config", "model_not_supported", "not_enough_memory", "invariant_violated"}
    ours |= {
        "step_hung",
        "pool_hung",
        "rank_failed",
        "engine_forked",
        "engine_closed",
        "client_left",
    }
    found = set()
    for file in (ROOT / "streamer").rglob("*.py"):
        found |= set(re.findall(r'\bcode ?= ?"(\w+)"', file.read_text(encoding="utf-8")))
    assert len(found) > 20
    assert [code for code in sorted(found - ours) if f"`{code}`" not in PAGE] == []


def written(number: float) -> str:
    """A bound as the page writes it."""
    if abs(number) < 1 << 31:
        return f"{number:,g}" if number != int(number) else f"{int(number):,}"
    bits = abs(int(number)).bit_length()
    if number > 0 and number == (1 << bits) - 1:
        return f"2^{bits} - 1"
    assert abs(number) == 1 << bits - 1
    return f"{'-' if number < 0 else ''}2^{bits - 1}"


def values_of(parameter: Parameter) -> str:
    """The column `values (default)` of a parameter, from its declaration."""
    low, high = map(written, parameter.field.bounds)
    bounds = f"above {low}, up to {high}" if parameter.field.is_above else f"{low} to {high}"
    most = f"{parameter.field.max_entries:,}"
    texts: dict[Any, str] = {
        bool: "bool",
        bool | Literal["never"]: 'bool or `"never"`',
        tuple[str, ...]: f"a text or up to {most}, each up to {MAX_STOP_BYTES:,} bytes",
        tuple[int, ...]: f"up to {most} token ids",
        Grammar: "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`, "
        "`structural_tag`",
        dict[int, float]: f"up to {most} token ids, each to {bounds}",
    }
    default = getattr(SamplingParams(), parameter.name)
    shown = "" if default in (None, (), {}) else f" ({json.dumps(default)})"
    return texts.get(parameter.kind, bounds) + shown


def test_sampling_parameters_have_the_values_of_their_declaration() -> None:
    table = PAGE.split("\nSampling, at top level", 1)[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()]
    assert rows[0][:2] == ["field", "values (default)"]
    page = {name.strip("`"): values for name, values, _ in rows[2:]}
    assert {p.name: values_of(p) for p in IN_BODIES} == {p.name: page[p.name] for p in IN_BODIES}

"""The parser over every format: what it finds, and that no way of cutting the text changes it."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, Channels, ModelFormat
from streamer.server.parsing.parser import Parser

Call = tuple[str, dict[str, Any]]
THINK = REASONING_FORMATS["qwen3"]
NAMES = ("f", "get_weather", "run_in_terminal", "ns.tool-2")
PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": ["object", "null"]},
}
TOOLS = {name: {"type": "object", "properties": PROPERTIES} for name in NAMES}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    bodies = (as_json({"name": n, "arguments": a}) for n, a in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<parameter={k}>\n{text_of(v)}\n</parameter>\n" for k, v in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(as_json({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}" for n, a in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + as_json([{"name": n, "arguments": a} for n, a in calls])


def deepseek(calls: Sequence[Call], head: str = "", sep: str = "", tail: str = "") -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{head}{n}{sep}{as_json(a)}{tail}<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    return deepseek(calls, "function<｜tool▁sep｜>", "\n```json\n", "\n```")


def deepseek_v31(calls: Sequence[Call]) -> str:
    return deepseek(calls, sep="<｜tool▁sep｜>")


def dsml(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{text_of(v)}</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    body = "".join(one(*call) for call in calls)
    return f"<｜DSML｜function_calls>\n{body}</｜DSML｜function_calls>"


def glm(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{text_of(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{as_json(a)}"
        f"<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def minimax(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<parameter name="{k}">{text_of(v)}</parameter>\n' for k, v in arguments.items()
        )
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|end|>".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json"
        f"<|message|>{as_json(a)}"
        for n, a in calls
    )


WRITERS: list[tuple[str, Callable[[Sequence[Call]], str]]] = [
    ("hermes", hermes),
    ("qwen3_coder", qwen),
    ("llama3_json", llama),
    ("mistral", mistral),
    ("mistral", mistral_list),
    ("deepseek_v3", deepseek_v3),
    ("deepseek_v31", deepseek_v31),
    ("deepseek_v32", dsml),
    ("glm45", glm),
    ("kimi_k2", kimi),
    ("minimax_m2", minimax),
    ("openai", harmony),
]


def format_of(name: str) -> ModelFormat:
    calls = TOOL_FORMATS[name]
    if isinstance(calls, Channels):
        return ModelFormat(None, calls, calls)
    assert not isinstance(THINK, Channels)
    return ModelFormat(THINK, calls)


def joined(events: Sequence[Event]) -> list[Event]:
    """Adjacent pieces of the same kind as one."""
    found: list[Any] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text | Reasoning) and type(last) is type(event):
            found[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolArguments) and isinstance(last, ToolArguments):
            assert last.index == event.index
            found[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def parse(name: str, pieces: Sequence[str], **more: Any) -> list[Event]:
    parser = Parser(format_of(name), TOOLS, **more)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.end()])


def check_order(events: Sequence[Event]) -> None:
    """A name comes once and whole, arguments inside their call, and every call ends."""
    open_call, seen = None, 0
    for event in events:
        if isinstance(event, ToolCallBegin):
            assert open_call is None
            assert event.index == seen
            assert event.name
            open_call, seen = event.index, seen + 1
        elif isinstance(event, ToolArguments):
            assert event.index == open_call
        elif isinstance(event, ToolCallEnd):
            assert event.index == open_call
            open_call = None
        else:
            assert open_call is None
    assert open_call is None


def calls_in(events: Sequence[Event]) -> list[Call]:
    names = {e.index: e.name for e in events if isinstance(e, ToolCallBegin)}
    texts = {e.index: e.text for e in events if isinstance(e, ToolArguments)}
    return [(name, json.loads(texts[index])) for index, name in names.items()]


def kept(kind: type[Text] | type[Reasoning], events: Sequence[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, kind))


LETTERS = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<[")
WORDS = st.text(LETTERS, max_size=12)
LINES = WORDS.map(str.strip)  # white space around a line is a matter of the format
LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": WORDS | st.just("two\nlines \\ \"quoted\" {'\u00e9\U0001f98a'}"),
        "n": st.integers(-(10**9), 10**9),
        "x": st.floats(-1e6, 1e6, allow_nan=False),
        "b": st.booleans(),
        "l": st.lists(VALUES, max_size=3),
        "o": st.none() | st.dictionaries(WORDS, VALUES, max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({p % (len(text) + 1) for p in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[w.__name__ for _, w in WRITERS])
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, thought=LINES, said=LINES, places=st.lists(st.integers(0, 4000), max_size=8))
def test_calls_are_found_whatever_the_cuts(
    name: str,
    write: Callable[[Sequence[Call]], str],
    calls: list[Call],
    thought: str,
    said: str,
    places: list[int],
) -> None:
    if name == "openai":
        text = f"<|channel|>analysis<|message|>{thought}<|end|>" if thought else ""
        text += f"<|start|>assistant<|channel|>commentary<|message|>{said}<|end|>" if said else ""
    else:
        said = "" if name == "llama3_json" else said
        text = f"<think>\n{thought}\n</think>\n\n{said}"
    text += write(calls)
    whole = parse(name, [text])
    check_order(whole)
    assert calls_in(whole) == calls
    assert kept(Reasoning, whole) == thought
    assert kept(Text, whole) == said
    assert parse(name, list(text)) == whole
    assert parse(name, cut(text, places)) == whole
    (one,) = {e.name for e in parse(name, [text], max_calls=1) if isinstance(e, ToolCallBegin)}
    assert one == calls[0][0]


PIECES = [
    "<think>",
    "</think>",
    "{",
    "}",
    '"name": "f"',
    '"arguments": ',
    ", ",
    "[",
    "]",
    "\n",
    " ",
]
PIECES += ['"s": "é🦊"', "true", "1e5", '"', "\\", "<", "f", "```json", "text", ";", '{"name": "f"']


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_text_gives_the_same_events_for_every_cut(name: str, data: st.DataObject) -> None:
    markers = list(format_of(name).markers)
    parts = st.sampled_from(PIECES + markers + [m[:-1] for m in markers if len(m) > 1])
    text = "".join(data.draw(st.lists(parts | st.text(string.printable, max_size=3), max_size=25)))
    is_reasoning = data.draw(st.booleans()) and name != "openai"
    whole = parse(name, [text], is_reasoning=is_reasoning)
    check_order(whole)
    assert parse(name, list(text), is_reasoning=is_reasoning) == whole
    parser, seen = Parser(format_of(name), TOOLS, is_reasoning=is_reasoning), []
    for i, char in enumerate(text):  # what was sent so far depends on the text so far alone
        seen += parser.feed(char)
        if i % 7 == 0:
            other = Parser(format_of(name), TOOLS, is_reasoning=is_reasoning)
            assert joined(seen) == joined(other.feed(text[: i + 1]))


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"openai"}))
@pytest.mark.parametrize(
    "text", ["plain", " 1 2 3", "a < b\n", "\n\nx ", "{}", '{"name": "x"}', "[1, 2]", "x\n<", ""]
)
def test_prose_stays_as_it_is(name: str, text: str) -> None:
    assert parse(name, list(text)) == ([Text(text)] if text else [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nno JSON\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {\'s\': 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("qwen3_coder", "<tool_call>\n<function=f>\nwhat?\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=two words>"),
        ("glm45", "<tool_call>a b</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
        ("mistral", "[TOOL_CALLS]f"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[]"),
        ("llama3_json", '{"name": "not one of them", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "f"}}'),
    ],
)
def test_a_broken_call_comes_as_text(name: str, text: str) -> None:
    assert parse(name, list(text)) == [Text(text)]
    good = hermes([("f", {"s": "é"})]) if name == "hermes" else ""
    if good:
        events = parse(name, [text + good])
        assert calls_in(events) == [("f", {"s": "é"})]
        assert kept(Text, events) == text


def test_a_call_that_breaks_in_its_arguments_is_no_json_and_the_rest_is_text() -> None:
    events = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"s": 1, oops}}</tool_call>'])
    assert events == [
        ToolCallBegin(0, None, "f"),
        ToolArguments(0, '{"s": 1, '),
        ToolCallEnd(0),
        Text("oops}}</tool_call>"),
    ]
    (*_, arguments, end) = parse("qwen3_coder", ["<tool_call><function=f><parameter=s>\nab"])
    assert (arguments, end) == (ToolArguments(0, '{"s": "ab'), ToolCallEnd(0))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": {}', {}),
        ('{"arguments": {"s": "a"}, "name": "f"}', {"s": "a"}),
        ('{"type": "function", "name": "f", "parameters": {"n": 1}}', {"n": 1}),
        ('{"name": "f", "arguments": "{\\"n\\": 1}"}', {"n": 1}),
        ('{"name": "f", "arguments": {"s": "a\nb\\d", "b": True, "o": None}}',
         {"s": "a\nb\\d", "b": True, "o": None}),
    ],
)  # fmt: skip
def test_what_models_often_write_is_understood(text: str, arguments: dict[str, Any]) -> None:
    for end in ("</tool_call>", "\n</tool_call>\n", ""):
        assert calls_in(parse("hermes", list(f"<tool_call>\n{text}{end}"))) == [("f", arguments)]


def test_calls_inside_reasoning() -> None:
    call = hermes([("f", {"s": "x"})])
    events = parse("hermes", [f"<think>\nso I call {call} and wait\n</think>\n\nDone."])
    assert kept(Reasoning, events) == "so I call  and wait"
    assert calls_in(events) == [("f", {"s": "x"})]
    assert kept(Text, events) == "Done."
    for other in (hermes([("unknown", {})]), "<tool_call> is the tag"):
        events = parse("hermes", [f"<think>{other}</think>ok"])
        assert events == [Reasoning(other), Text("ok")]


def test_reasoning() -> None:
    assert parse("hermes", ["<think>\n\n</think>\n\nHi"]) == [Text("Hi")]
    assert parse("hermes", ["a\n</think>\n\nHi"], is_reasoning=True) == [Reasoning("a"), Text("Hi")]
    assert parse("hermes", ["\n<think>a"]) == [Reasoning("a")]
    said = "the tag <think> is text here</think>"
    assert parse("hermes", list(said)) == [Text(said)]


def test_what_the_model_writes_as_an_id() -> None:
    (begin, *_) = parse("kimi_k2", [kimi([("ns.tool-2", {})])])
    assert begin == ToolCallBegin(0, "functions.ns.tool-2:0", "ns.tool-2")
    (begin, *_) = parse("mistral", ["[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}"])
    assert begin == ToolCallBegin(0, "abc123def", "f")


def test_arguments_come_as_they_are_written() -> None:
    for name, head in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n"),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"s": "'),
    ):
        parser = Parser(format_of(name), TOOLS)
        began = parser.feed(head)
        assert began[0] == ToolCallBegin(0, None, "f")
        assert parser.feed("some text") == [ToolArguments(0, "some text")]


def test_an_endless_beginning_is_given_up() -> None:
    for text in ("{" * 100_000, '{"arguments": "' + "x" * 200_000, "[" * 10_000, '{"' + "n" * 999):
        events = parse("hermes", ["<tool_call>" + text])
        assert events == [Text("<tool_call>" + text)]

"""Forced calls: whatever an untrained model draws, the parser finds the calls that were asked for.

The model is noise over random tokens: each is drawn among those that the grammar's mask allows.
Every format, with markers as special tokens and as text; arguments validate with jsonschema.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest

from streamer.constraints.filler import MaskFiller, Wanted
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.lark import Marks
from streamer.constraints.masks import Constraint
from streamer.core.plan import RowJoin
from streamer.core.sampling import Grammar, SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.parsing import forcing
from streamer.server.parsing.events import Reasoning, Text, ToolArguments, ToolCallBegin
from streamer.server.parsing.forcing import Rules, calls_grammar, compiled_calls
from streamer.server.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Calls,
    ModelFormat,
    find_format,
)
from streamer.server.parsing.parser import Parser
from streamer.server.parsing.schemas import inlined
from streamer.server.parsing.tools import ToolDefinition
from tests.constraints.test_masks import allowed_by

END, LONGEST = 256, 1500
THINK = REASONING_FORMATS["qwen3"]
WORDS = ['{"', '":', '", "', "</", "ab", '"name"', "1", "null", "param", ">\n", "eter>", "<tool_"]
SHORT = {"type": "string", "maxLength": 6}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": SHORT,
        "code": {"type": "string", "pattern": "^[a-c]{1,2}/[0-9]$"},
        "color": {"$ref": "#/$defs/Color"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [SHORT, {"type": "null"}]},
        "either": {"anyOf": [SHORT, {"type": "integer", "minimum": 5}, {"type": "boolean"}]},
        "where": {"type": "object", "properties": {"x": {"type": "number", "maximum": 9}},
                  "required": ["x"], "additionalProperties": False},
        "list": {"anyOf": [{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, SHORT]},
        "one": {"const": "this"},
    },
    "required": ["city", "code", "color", "days", "note", "either", "where", "one"],
    "additionalProperties": False,
    "$defs": {"Color": {"enum": ["red", "light blue", "5"], "type": "string"}},
}  # fmt: skip
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = (
    ToolDefinition("get", "", SCHEMA, is_strict=True),
    ToolDefinition("get_b", "", NOTHING, is_strict=True),
    ToolDefinition("ns:get.c", "", NOTHING),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
FORMATS = {
    **{name: ModelFormat(calls=each) for name, each in TOOL_FORMATS.items()},
    "mistral_list": find_format("[TOOL_CALLS]", None, None),
}
FORMATS["openai"] = find_format("<|channel|><|message|>", None, None)
FAMILIES = [n for n in FORMATS if n not in ("qwen3_xml", "llama4_json", "glm47")]


JSON = Grammar("json", '{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"]}')


class Model:
    """An untrained model with a vocabulary; `special` names its special tokens."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.special = {END: b"<end>"} | {END + 1 + i: n.encode() for i, n in enumerate(names)}
        self.tokens = [bytes([i]) for i in range(256)] + [b""] * len(self.special)
        self.tokens += [word.encode() for word in WORDS]
        self._vocabulary = Vocabulary(self.tokens, self.special, (END,), lambda t: [*t.encode()])
        self.grammars = Grammars(self._vocabulary)
        self.marks = Marks(self.special, (END,))

    def answer(self, grammar: Grammar, seed: int, begin: str = "") -> str | None:
        """A text drawn among what the masks allow, after `begin`; None if it did not end."""
        rng, size = random.Random(seed), len(self.tokens)
        join = RowJoin(0, "r", 0, (1,), 1, 0, (), SamplingParams(), frozenset((END,)))
        constraint = Constraint(self.grammars.compile(grammar), join, self._vocabulary, size)
        filler, text = MaskFiller(size), begin.encode()
        for part in self.marks.split(begin):
            for token in [part] if isinstance(part, int) else part.encode():
                constraint.drew(token)
        for position in range(1, LONGEST):
            filled = filler.fill([Wanted(constraint, position)])
            assert not filled.errors, (filled.errors, text)
            allowed = allowed_by(filled, size)[0].nonzero()[0].tolist()
            token = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed)
            if token == END:
                return text.decode()
            text += self.special.get(token, b"") or self.tokens[token]
            constraint.drew(token)
        return None


def specials(form: ModelFormat) -> tuple[str, ...]:
    """The markers that checkpoints have as special tokens; some are only a part of a marker."""
    inner = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "｜DSML｜")
    found = {mark for mark in form.markers if not any(part in mark for part in inner)}
    found |= {part for part in inner if any(part in mark for mark in form.markers)}
    return tuple(sorted(m for m in found if m[0] in "<[｜" and m[-1] in ">]｜"))


def read(form: ModelFormat, text: str, **settings: Any) -> tuple[list[Any], str, str]:
    """Calls, prose and reasoning."""
    parser = Parser(form, SCHEMAS, **settings)
    names: list[str] = []
    arguments: dict[int, str] = {}
    said = {Text: "", Reasoning: ""}
    for event in (*parser.feed(text), *parser.end()):
        match event:
            case ToolCallBegin(index, _, name):
                assert index == len(names)
                names.append(name)
            case ToolArguments(index, piece):
                arguments[index] = arguments.get(index, "") + piece
            case Text(piece) | Reasoning(piece):
                said[type(event)] += piece
    calls = [(name, json.loads(arguments[i])) for i, name in enumerate(names)]
    return calls, said[Text], said[Reasoning]


def check(calls: list[tuple[str, Mapping[str, Any]]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
        assert name == "get" or not arguments


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def is_special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_made(name: str, is_special: bool) -> None:
    form = FORMATS[name]
    model = Model(specials(form) if is_special else ())
    several, ends = set(), 0
    for max_calls in (None, 1):
        rules = Rules(TOOLS, True, max_calls)
        grammar = calls_grammar(form, model.marks, rules)
        for seed in range(12):
            text = model.answer(grammar, seed)
            if text is None:
                continue
            calls, prose, _ = read(form, text)
            assert calls, text
            assert not prose, text
            check(calls)
            assert max_calls is None or len(calls) == 1
            several.add(len(calls))
            ends += 1
    assert ends >= 12
    assert len(several) > 1 or form.channels is not None


def openings(form: ModelFormat) -> tuple[str, ...]:
    if not isinstance(form.calls, Calls):
        return ("<|channel|>commentary to=",)
    return form.calls.openings


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_among_free_text_follows_its_schema(name: str, is_special: bool) -> None:
    form = FORMATS[name]
    model = Model(specials(form) if is_special else ())
    grammar = calls_grammar(form, model.marks, Rules(TOOLS[:1], False))
    texts = ("", "I \u2603 look. {") if form.channels is None else ("",)
    ends = 0
    for opening in openings(form):
        for prose in texts:
            for seed in range(4):
                text = model.answer(grammar, seed, prose + opening)
                if text is None:
                    continue
                calls, said, _ = read(form, text)
                assert calls, text
                assert said.startswith(prose.strip()), text
                check(calls)
                ends += 1
    assert ends >= 4, name
    if form.channels is None:
        plain = model.answer(grammar, 1, "No call: ")
        assert plain is not None
        assert read(form, plain)[:2] == ([], plain)


def test_a_bare_call_follows_its_schema_without_a_marker() -> None:
    form = FORMATS["llama3_json"]
    model = Model(specials(form))
    grammar = calls_grammar(form, model.marks, Rules(TOOLS[:1], False))
    texts = [model.answer(grammar, seed, '{"name": "g') for seed in range(4)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 1
    assert [read(form, text)[0][0][0] for text in ended] == ["get"] * len(ended)
    assert model.answer(grammar, 1, '{"other": ') is not None


def test_harmony_reasons_before_a_forced_call(is_special: bool) -> None:
    form = FORMATS["openai"]
    model = Model(specials(form) if is_special else ())
    grammar = calls_grammar(form, model.marks, Rules(TOOLS[1:2], True, 1))
    text = model.answer(grammar, 3, "<|channel|>analysis<|message|>Hm. <|end|>")
    assert text is not None
    assert read(form, text) == ([("get_b", {})], "", "Hm. ")


def test_where_calls_are_forced_the_reasoning_has_none() -> None:
    form = ModelFormat(THINK, TOOL_FORMATS["hermes"])  # type: ignore[arg-type]
    call = '<tool_call>{"name": "get_b", "arguments": {}}</tool_call>'
    calls, prose, thought = read(form, f"<think>{call}</think>{call}", is_forced=True)
    assert (calls, prose, thought) == ([("get_b", {})], "", call)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_json_or_calls(name: str) -> None:
    form = FORMATS[name]
    model = Model(specials(form))
    grammar = calls_grammar(form, model.marks, Rules(TOOLS[1:], False, answer=JSON))
    found = set()
    for seed in range(16):
        text = model.answer(grammar, seed)
        if text is None:
            continue
        calls, prose, _ = read(form, text)
        check(calls)
        if not calls:
            assert json.loads(prose)["x"] in (1, 2)
        found.add(bool(calls))
    assert found == {True, False}


STRICT: list[tuple[str, dict[str, Any], str]] = [
    ("hermes", {"type": "string"}, "type"),
    ("hermes", {"items": [{}] * 2, "a": json.loads('{"b":' * 70 + "1" + "}" * 70)}, "deep"),
    ("hermes", {"properties": {"a": {"pattern": "(" * 9000}}}, "deep"),
    ("glm45", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ("glm45", {"required": ["a"]}, "required"),
    ("glm45", {"properties": {"a<": {}}, "required": ["a<"]}, "a<"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "not": {}}}}, "not"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
    ("qwen3_coder", {"properties": {"a": {"enum": ["</parameter>"]}}}, "enum"),
    ("hermes", {"type": 5}, "type"),
    ("qwen3_coder", {"properties": 5}, "properties"),
    ("qwen3_coder", {"properties": {}, "required": [["a"]]}, "required"),
    ("qwen3_coder", {"properties": {"a": {"type": ["string", "x"]}}}, "type"),
    *[
        ("qwen3_coder", {"properties": {"a": {"type": "string", key: 5}}}, key)
        for key in ("enum", "anyOf", "pattern")
    ],
]


@pytest.mark.parametrize(("name", "schema", "what"), STRICT, ids=[s[2] for s in STRICT])
def test_what_a_strict_tool_cannot_have_is_named(name: str, schema: Any, what: str) -> None:
    tool = ToolDefinition("f", "", {"type": "object", **schema}, True, "tools[3].parameters")
    with pytest.raises(InvalidRequest, match=what) as caught:
        calls_grammar(FORMATS[name], Marks({}, ()), Rules((tool,), True))
    assert caught.value.param == "tools[3].parameters"
    loose = Rules((tool,), True, loose=frozenset("f"))
    text = Model(()).answer(calls_grammar(FORMATS[name], Marks({}, ()), loose), 1)
    assert text is not None
    assert read(FORMATS[name], text)[0][0][0] == "f"


def test_a_schema_that_grows_without_end_is_not_written() -> None:
    """As a grammar it would be of GB: what it defines stands beside every value."""
    arrays = {f"p{i}": {"type": "array", "items": {"const": i}} for i in range(2000)}
    schema = {"properties": arrays, "$defs": {"x": {"description": "x" * 500_000}}}
    tool = ToolDefinition("f", "", schema, True)
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="more than 1048576 characters"):
        calls_grammar(FORMATS["qwen3_coder"], Marks({}, ()), Rules((tool,), True))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_alternatives_that_name_each_other_are_bounded() -> None:
    again = {"$ref": "#/$defs/a"}
    root = {"$defs": {"a": {"anyOf": [again] * 30}}}  # 810,000 within the depth
    found = inlined(again, root)
    assert len(json.dumps(found)) < 100_000
    assert inlined({"anyOf": [again]}, {"$defs": {"a": {"enum": [1]}}}) == {
        "anyOf": [{"enum": [1]}]
    }


def unfollowable(name: str, *, is_strict: bool = False) -> ToolDefinition:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    return ToolDefinition(name, "", schema, is_strict, f"tools[{name}].parameters")


def test_tools_that_cannot_be_followed_are_found_by_halving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tried = Model(()), list[str]()
    monkeypatch.setattr(model.grammars, "check", checking(model.grammars.check, tried))
    tools = [ToolDefinition(f"t{i}", "", NOTHING) for i in range(200)]
    tools[17], tools[123] = unfollowable("bad17"), unfollowable("bad123")
    args = FORMATS["hermes"], model.marks
    grammar = compiled_calls(*args, Rules(tuple(tools), True), model.grammars)
    loose = frozenset(("bad17", "bad123"))
    assert grammar == calls_grammar(*args, Rules(tuple(tools), True, loose=loose))
    assert len(tried) < 40
    tools[60] = unfollowable("strict", is_strict=True)
    with pytest.raises(InvalidRequest, match=r"\$ref: ") as refused:
        compiled_calls(*args, Rules(tuple(tools), True), model.grammars)
    assert refused.value.param == "tools[strict].parameters"
    monkeypatch.setattr(forcing, "MAX_SEARCH_S", 0.0)
    with pytest.raises(InvalidRequest, match="takes more than 0 s") as refused:
        compiled_calls(*args, Rules(tuple(tools), True), model.grammars)
    assert refused.value.param == "tools"


def checking(check: Callable[[Grammar], None], tried: list[str]) -> Callable[[Grammar], None]:
    def counted(grammar: Grammar) -> None:
        tried.append(grammar.text)
        check(grammar)

    return counted


def test_what_is_tried_is_not_remembered() -> None:
    grammars = Model(()).grammars
    rules = Rules((unfollowable("a"), *TOOLS[1:]), True)
    made = compiled_calls(FORMATS["hermes"], Marks({}, ()), rules, grammars)
    assert list(grammars._kept) == [made]

"""What may be intersected: bounded, and what is usual is followed."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from streamer.constraints.bounds import (
    MAX_BYTES,
    MAX_CROSSED,
    MAX_REFERENCES,
    lark_too_costly,
    too_costly,
)
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.lark import Lark, Marks, TooLong
from streamer.core.sampling import Grammar
from streamer.errors import InvalidRequest
from tests.constraints.test_masks import END, TOKENS


def grammars_of_bytes() -> Grammars:
    return Grammars(Vocabulary(TOKENS, {END: b"<end>"}, (END,), lambda text: [*text.encode()]))


PATTERNS = [{"pattern": f".*a.{{{i}}}.*"} for i in range(MAX_CROSSED + 7)]
DEFS = {f"d{i}": each for i, each in enumerate(PATTERNS)}
REFS = [{"$ref": f"#/$defs/{name}"} for name in DEFS]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "allOf": PATTERNS},
        {"$defs": DEFS, "allOf": REFS},
        {"$defs": DEFS, "properties": {"x": {"pattern": "a", "$ref": "#/$defs/d0"}}},
        {"$defs": DEFS, "anyOf": REFS, "oneOf": REFS},
        {"patternProperties": {each["pattern"]: True for each in PATTERNS}},
        {"properties": {f"p{i}": each for i, each in enumerate(PATTERNS)}, "allOf": [{}]},
    ],
    ids=["allOf", "references", "siblings", "branches", "names", "beside"],
)
def test_many_patterns_that_may_meet_are_refused_at_once(schema: Any) -> None:
    grammar = Grammar("json", msgspec.json.encode(schema).decode())
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="more than 8 patterns") as refused:
        grammars_of_bytes().compile(grammar)
    assert time.thread_time() - began < 1.0
    assert refused.value.param == "structured_outputs.json"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": each for i, each in enumerate(PATTERNS)}},
        {"anyOf": PATTERNS},
        {"$defs": DEFS, "$ref": "#/$defs/d0", "description": "one of many"},
        {"allOf": PATTERNS[:MAX_CROSSED]},
    ],
    ids=["apart", "alternatives", "a note", "few"],
)
def test_patterns_that_do_not_meet_may_be_many(schema: Any) -> None:
    assert too_costly(schema) is None


def test_operators_of_lark_are_counted_where_they_are_operators() -> None:
    names = [f"A{i}" for i in range(MAX_CROSSED + 2)]
    crossed = "start: X\nX: " + " & ".join(names)
    assert lark_too_costly(crossed)
    with pytest.raises(InvalidRequest, match="& and ~ in Lark"):
        grammars_of_bytes().compile(Grammar("grammar", crossed))
    assert (
        lark_too_costly('start: "' + "&" * 20 + '" /' + "~&" * 20 + "/ // & & & & & & & & &")
        is None
    )
    nested = "start: %json " + msgspec.json.encode({"allOf": PATTERNS}).decode() + "\n"
    assert lark_too_costly(nested)


# 90 references, as a SELECT of SQL has, and a list of 1,900 texts.
PLAIN_LARK = "start: (a | b)+\na: " + " | ".join(f'"x{i}" b?' for i in range(90))
PLAIN_LARK += "\nb[max_tokens=3]: B -> name\nB: " + " | ".join(f'"y{i}::"' for i in range(1900))
PAIRS = [f"n{i % 20} n{i // 20 % 20}" for i in range(MAX_REFERENCES)]
AMBIGUOUS = {
    "parameters": ('start: n::0\nn::_: "a" n::set_bit(0) %if bit_clear(0) | ""', "parameters"),
    "many ways": (
        "start: n0\n" + "\n".join(f"n{i}: {' | '.join(PAIRS)} | " for i in range(20)),
        "name rules more than",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_rules_that_may_be_followed_in_too_many_ways_are_refused(name: str) -> None:
    """The first mask of one of 1 KB took minutes, and two of them ended the engine."""
    text, says = AMBIGUOUS[name]
    with pytest.raises(InvalidRequest, match=says):
        grammars_of_bytes().compile(Grammar("grammar", text))


def test_rules_of_an_ordinary_lark_grammar_are_not() -> None:
    grammars_of_bytes().compile(Grammar("grammar", PLAIN_LARK))


MULTIPLES: list[Any] = [
    {"type": "integer", "multipleOf": 99_999_989},
    {"type": "number", "multipleOf": 0.0000300007},
    {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
    {"properties": {f"p{n}": {"type": "integer", "multipleOf": n} for n in range(9000, 9100)}},
    {"multipleOf": 10**400 + 1},
]


@pytest.mark.parametrize("schema", MULTIPLES, ids=lambda schema: str(schema)[:40])
def test_multiples_that_take_minutes_are_refused_at_once(schema: Any) -> None:
    """One of 40 bytes held a thread for minutes, two of them ended the engine."""
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="multipleOf: its numbers"):
        grammars_of_bytes().compile(Grammar("json", json.dumps(schema)))
    with pytest.raises(InvalidRequest, match="multipleOf: its numbers"):
        grammars_of_bytes().compile(Grammar("grammar", f"start: %json {json.dumps(schema)}"))
    assert time.thread_time() - began < 1.0


def test_multiples_of_many_schemas_add_up() -> None:
    lark = Lark(Marks({}, ()))
    for i in (9973, 9967):
        lark.json({"type": "integer", "multipleOf": i})
    with pytest.raises(TooLong, match="multipleOf"):
        lark.json({"type": "integer", "multipleOf": 9949})


@pytest.mark.parametrize("number", [0.01, 7, 9973, 1e-9, 250, 1_000_000])
def test_multiples_in_use_are_followed(number: float) -> None:
    schema = {"type": "number", "multipleOf": number}
    began = time.thread_time()
    grammars_of_bytes().compile(Grammar("json", json.dumps(schema)))
    assert time.thread_time() - began < 1.0


OPTIONAL = "a?b?" * 8000
LONG_ONES: dict[str, tuple[str, str]] = {
    "expression": ("regex", OPTIONAL),
    "choices of nothing": ("regex", "(a|)(b|)" * 8000),
    "class": ("regex", "[" + "".join(map(chr, range(0x10000, 0x18000, 2))) + "]"),
    "pattern": ("json", json.dumps({"properties": {"a": {"pattern": OPTIONAL}}})),
    "patterns": ("json", json.dumps([{"pattern": f"{i}{'a?b?' * 300}"} for i in range(5)])),
    "names": ("json", json.dumps({"patternProperties": {OPTIONAL: {}}})),
    "text": ("json", json.dumps({"const": "a" * 2 * MAX_BYTES})),
    "name": ("json", json.dumps({"properties": {"a" * 2 * MAX_BYTES: {}}})),
    "in Lark": ("grammar", f"start: /{OPTIONAL}/"),
    "terminal": ("grammar", "start: T\nT: " + "A " * 8000 + '\nA: "a"?'),
    "lines": ("grammar", "start: T\nT: " + "\n | ".join(['"a"? "b"?'] * 2000)),
    "doubled": (
        "grammar",
        "start: T60\nT0: /a?/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(60)),
    ),
    "circle": ("grammar", "start: A\nA: B\nB: A"),
    "tags": (
        "structural_tag",
        json.dumps({"format": {"type": "sequence", "elements": [
            {"type": "json_schema", "json_schema": {"pattern": f"{i}{'a?b?' * 300}"}}
            for i in range(5)]}}),
    ),
    "tag": ("structural_tag", json.dumps({"format": {"type": "regex", "pattern": OPTIONAL}})),
}  # fmt: skip


@pytest.mark.parametrize("case", LONG_ONES)
def test_regular_expressions_that_take_seconds_are_refused_at_once(case: str) -> None:
    kind, text = LONG_ONES[case]
    if case == "patterns":
        text = json.dumps({"anyOf": json.loads(text)})
    grammars = grammars_of_bytes()
    grammars.check(Grammar("json_object"))
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"too long to compile|parts of themselves"):
        grammars.compile(Grammar(kind, text))
    assert time.thread_time() - began < 0.5


def test_patterns_of_all_tools_count_once_each() -> None:
    lark = Lark(Marks({}, ()))
    for _ in range(10):
        lark.json({"pattern": "^(a?b?){2}$" + "c?" * 900})
    with pytest.raises(TooLong, match="too long to compile"):
        lark.json({"pattern": "c?" * 901})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "|".join(f"w{i}" for i in range(4000))),
        ("json", json.dumps({"properties": {f"k{i}": {"pattern": f"^[a-z]{{1,{i + 1}}}$"}
                                            for i in range(300)}})),
        ("json", json.dumps({"description": "?" * 4 * MAX_BYTES, "enum": ["a" * 9000]})),
        ("grammar", "start: (A | b)+\nA: B /[a-z]+/i? // and?\nB: \"(\" | \")\"\nb: A \"x\"?"),
    ],
)  # fmt: skip
def test_usual_expressions_are_not_too_long(kind: str, text: str) -> None:
    grammars_of_bytes().check(Grammar(kind, text))

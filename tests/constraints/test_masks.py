"""Answers of an untrained model follow their schemas, as jsonschema sees it: a seeded corpus.

The model here is noise over random tokens: each is drawn among those that the mask allows. What
can't be followed is refused, and the test says how many and for which keywords.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from streamer.constraints import grammars as module
from streamer.constraints.filler import Filled, MaskFiller, Wanted
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.masks import Constraint
from streamer.core.plan import RowJoin
from streamer.core.sampling import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from streamer.errors import InvalidRequest

END, SIZE, LONGEST = 256, 320, 400
DEPTH = 3
CHECKED = jsonschema.FormatChecker(["uuid", "date"])
WORDS = (
    b'true false null {" ": ", "a" "b" "name" "items" } ]} "}, 10 -1 .5 e+ \\n \\" \\u00 ab 2026-'
)
TOKENS = [bytes([i]) for i in range(256)] + [b""] + [w for w in WORDS.split(b" ") if w]
TOKENS += [b'{"', b'":', b'", "', b" "] * ((SIZE - len(TOKENS)) // 4)
SIMPLE: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["boolean", "null"]},
    {"enum": ["red", "green", 3, None, [1], {"a": True}]},
    {"const": {"x": [1, "é"]}},
]
REFUSED: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"contains": {"type": "null"}},
    {"dependentRequired": {"a": ["b"]}},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "format": "no-such-format"},
    {"$ref": "http://elsewhere.example/schema"},
    {"type": "integer", "minimum": 3, "maximum": 1},
    {"type": "string", "enum": [1]},
    {"enum": []},
    {"anyOf": [{"enum": []}]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": False}},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "string", "format": "date", "const": "x"},
]
NONE = {"type": "array", "items": {"type": "string", "const": 3}, "minItems": 1}
NAMED = {"properties": {"a": NONE}}


def schema(rng: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """One of the corpus."""
    kinds = ["simple", "object", "array", "tuple", "any", "one", "all"]
    kind = rng.choice([*kinds, "ref"] if depth == DEPTH else kinds)  # a $ref is from the root
    if depth == 0 or kind == "simple":
        return rng.choice(SIMPLE)
    inner = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == "object":
        names = rng.sample(["a", "name", 'q"', "é", "items"], len(inner))
        found: dict[str, Any] = {
            "type": "object",
            "properties": dict(zip(names, inner, strict=True)),
        }
        found["required"] = rng.sample(names, rng.randint(0, len(names)))
        found["additionalProperties"] = rng.choice([False, False, {"type": "boolean"}])
        return found
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": inner[0], "minItems": low, "maxItems": low + 2}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    if kind == "any":
        return {"anyOf": inner}
    if kind == "one":
        return {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "maximum": 9}]}
    if kind == "all":
        return {"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 40}]}
    return {"$defs": {"it": inner[0]}, "type": "array", "items": {"$ref": "#/$defs/it"},
            "maxItems": 2}  # fmt: skip


def allowed_by(filled: Filled, size: int) -> NDArray[np.uint8]:
    """[n, V] 1 where a token is allowed."""
    return np.unpackbits(filled.words.view(np.uint8), axis=1, count=size, bitorder="little")


def answer(grammars: Grammars, grammar: Grammar, rng: random.Random) -> str | None:
    """A text drawn at random among what the masks allow; None if it did not end."""
    params = SamplingParams(structured_outputs=grammar)
    join = RowJoin(0, "r", 0, (1,), 1, 0, (), params, frozenset((END,)))
    constraint = Constraint(grammars.compile(grammar), join, grammars.vocabulary, SIZE)
    filler, text = MaskFiller(SIZE), b""
    for position in range(1, LONGEST):
        filled = filler.fill([Wanted(constraint, position)])
        assert not filled.errors
        allowed = allowed_by(filled, SIZE)[0].nonzero()[0].tolist()
        assert allowed
        token = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == END:
            return text.decode()
        text += TOKENS[token]
        constraint.drew(token)
    return None


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Vocabulary(TOKENS, {END: b"<end>"}, (END,), lambda text: list(text.encode())))


def test_every_answer_follows_its_schema(grammars: Grammars) -> None:
    rng, counts, refused = random.Random(15), Counter[str](), Counter[str]()
    for _ in range(560):
        one = schema(rng)
        try:
            text = answer(grammars, Grammar("json", json.dumps(one)), rng)
        except InvalidRequest as error:
            refused[error.message] += 1
            continue
        counts["whole" if text is not None else "cut"] += 1
        if text is not None:
            checker = jsonschema.Draft202012Validator(one, format_checker=CHECKED)
            assert not list(checker.iter_errors(json.loads(text))), (one, text)
    assert counts["whole"] >= 500, (counts, refused)


@pytest.mark.parametrize("one", REFUSED, ids=json.dumps)
def test_what_cannot_be_followed_is_named(grammars: Grammars, one: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(Grammar("json", json.dumps(one)))
    assert caught.value.param == "structured_outputs.json"
    reason = caught.value.message.partition("can't be honoured: ")[2]
    words = {*one, "look-ahead"} - {"type"}
    assert any(re.search(rf"\b{word.lstrip('$')}\b", reason, re.IGNORECASE) for word in words)


def test_the_keyword_without_which_there_are_values_is_named_with_its_place(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "array", "items": {"type": "object", "required": ["a"], **NAMED}}
    given = Grammar("json", json.dumps({**schema, "minItems": 1, "$defs": {"x": False}}))
    with pytest.raises(InvalidRequest, match=r"schema, by items\.properties\.a\.items\.const: "):
        grammars.compile(given)
    with pytest.raises(InvalidRequest, match="the schema is false"):
        grammars.compile(Grammar("json", "false"))
    monkeypatch.setattr(module, "MAX_NAMING_S", 0.0)
    with pytest.raises(InvalidRequest, match="Unsatisfiable schema: "):
        grammars.compile(given)


BOMBS = [
    Grammar("json", '{"not":' * 1000 + "{}" + "}" * 1000),
    Grammar("json", '{"items":' * 14_000 + "{}" + "}" * 14_000),
    Grammar("regex", "(" * 60_000 + "a" + ")" * 60_000),
    Grammar("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda grammar: grammar.text[:20])
def test_a_bomb_is_refused_soon(grammars: Grammars, bomb: Grammar) -> None:
    assert len(bomb.text) <= 2 * MAX_GRAMMAR_BYTES
    with pytest.raises(InvalidRequest, match="can't be honoured"):
        grammars.compile(bomb)


def test_what_is_kept_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, and by the time that it took, which goes with the memory of the worst."""
    monkeypatch.setattr(module, "MAX_KEPT_S", 0.1)
    heavy = [Grammar("regex", f"(a{{{n}}}){{300}}") for n in range(300, 310)]
    took_s = [grammars.compile(grammar).took_s for grammar in heavy]
    kept_s = sum(s for s, each in zip(took_s, heavy, strict=True) if grammars.find(each))
    assert grammars.find(heavy[-1]) is not None
    assert kept_s <= max(0.1, took_s[-1])
    for n in range(module.MAX_KEPT):
        grammars.compile(Grammar("regex", f"b{n}"))
    assert not any(map(grammars.find, heavy))


def test_a_huge_choice_is_followed_or_refused(grammars: Grammars) -> None:
    texts = [f"number {i}" for i in range(8000)]
    params = SamplingParams(structured_outputs={"choice": texts})
    assert params.structured_outputs is not None
    assert answer(grammars, params.structured_outputs, random.Random(1)) in texts
    with pytest.raises(InvalidRequest, match="the limit is"):
        SamplingParams(structured_outputs={"choice": texts * 3})


def test_a_text_that_never_ends_is_an_error_where_its_matcher_gives_up(grammars: Grammars) -> None:
    """llguidance allows the end there, and the answer would be called whole."""
    compiled = grammars.compile(Grammar("grammar", 'start: "a" start'))
    join = RowJoin(0, "r", 0, (1,), 1, 0, (), SamplingParams(), frozenset((END,)))
    row = Constraint(compiled, join, grammars.vocabulary, SIZE)
    filler = MaskFiller(SIZE)
    for position in range(1, 4):
        filled = filler.fill([Wanted(row, position)])
        if filled.errors:
            break
        row.drew(ord("a"))
    says = "the answer can't follow the Lark grammar any further: parser error: Too many items"
    assert filled.errors[0].startswith(f"{says} (limit {module.LARK_LIMITS['step_max_items']}; ")
    assert not filled.words.any()


def test_what_must_come_is_not_looked_for_where_that_may_take_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for it: one grammar's took half a minute."""
    join = RowJoin(0, "r", 0, (1,), 1, 0, (), SamplingParams(), frozenset((END,)))
    for slow_s, expected in ((1.0, tuple(b"bc")), (-1.0, ())):
        compiled = grammars.compile(Grammar("regex", f"abc{'d' * (slow_s > 0)}?"))
        row = Constraint(compiled, join, grammars.vocabulary, SIZE)
        monkeypatch.setattr(module, "SLOW_S", slow_s)
        row.drew(ord("a"))
        assert row.forced[:2] == expected
        assert row.is_slow == (slow_s < 0)

"""What may be intersected: bounded, and what is usual is followed."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from streamer.constraints.bounds import MAX_CROSSED, is_lark_too_crossed, is_too_crossed
from streamer.constraints.grammars import Grammars, Vocabulary
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
    assert not is_too_crossed(schema)


def test_operators_of_lark_are_counted_where_they_are_operators() -> None:
    names = [f"A{i}" for i in range(MAX_CROSSED + 2)]
    crossed = "start: X\nX: " + " & ".join(names)
    assert is_lark_too_crossed(crossed)
    with pytest.raises(InvalidRequest, match="& and ~ in Lark"):
        grammars_of_bytes().compile(Grammar("grammar", crossed))
    assert not is_lark_too_crossed(
        'start: "' + "&" * 20 + '" /' + "~&" * 20 + "/ // & & & & & & & & &"
    )
    nested = "start: %json " + msgspec.json.encode({"allOf": PATTERNS}).decode() + "\n"
    assert is_lark_too_crossed(nested)

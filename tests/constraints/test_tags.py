"""Structural tags: what their grammars take, and what an untrained model writes under them."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.tags import Tags, _Triggers
from streamer.core.sampling import Grammar, SamplingParams
from streamer.errors import InvalidRequest
from tests.constraints.test_masks import END, answer
from tests.constraints.test_masks import TOKENS as PLAIN

CALL, CALLED = 257, 258
SPECIAL = {END: b"<end>", CALL: b"<call>", CALLED: b"</call>"}
TOKENS = [bytes([i]) for i in range(256)] + [b"", b"", b"", b'{"a":', b"<f=", b"on>", b"</f>"]
TOKENS += [b""] * (320 - len(TOKENS))
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
     "additionalProperties": False}  # fmt: skip
JSON_A = {"type": "json_schema", "json_schema": A}


def tag(begin: str, content: Any = JSON_A, end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": list(tags), **more}}


OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=on>", "schema": A, "end": "</f>"},
        {"begin": "<call>", "schema": True, "end": "</call>"},
    ],
    "triggers": ["<f=", "<call>"],
}
ANY, DIGITS = {"type": "any_text"}, {"type": "regex", "pattern": "[0-9]{2}/x"}
ONE = {"type": "const_string", "value": 'é"1'}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Vocabulary(TOKENS, SPECIAL, (END,), lambda text: list(text.encode())))


def takes(grammars: Grammars, tags: Any, text: str) -> bool:
    """Whether the text is a whole answer."""
    tokens: list[int] = []
    for piece in re.split("(</?call>)", text):
        special = {"<call>": CALL, "</call>": CALLED}.get(piece)
        tokens += list(piece.encode()) if special is None else [special]
    matcher = grammars.compile(Grammar("structural_tag", json.dumps(tags))).matcher()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("tags", "right", "wrong"),
    [
        (
            OLD,
            ["", "prose <f", 'a<f=on>{"a": 1}</f>b<f=on>{"a":2}</f>', "<call>[1]</call> x"],
            ["<f=off>", '<f=on>{"a":1}', '<f=on>{"b":1}</f>', "<call>[1", "</call>"],
        ),
        (
            triggered(tag("<f=on>"), tag("<f=two>", DIGITS, ["</f>", "."])),
            ["x<f=two>12/x.y", "x<f=two>12/x</f>", '<f=on>{"a":1}</f><f=two>12/x.'],
            ["<f=two>1</f>", "<f=two>12/x"],
        ),
        (
            triggered(tag("<f=on>", ANY), at_least_one=True, stop_after_first=True),
            ["<f=on>any <f text</f>"],
            ["", "x<f=on>a</f>", "<f=on>a</f>x", "<f=on>a"],
        ),
        (
            triggered(tag("<f=on>"), at_least_one=True),
            ['<f=on>{"a":1}</f> and', '<f=on>{"a":1}</f><f=on>{"a":1}</f>'],
            ["and", '<f=on>{"a":1}</f><f=o>'],
        ),
        (
            triggered(tag("<f=on>"), stop_after_first=True),
            ["and", 'so <f=on>{"a":1}</f>'],
            ['<f=on>{"a":1}</f>.'],
        ),
        (
            {"format": {"type": "tags_with_separator", "separator": ", ", "at_least_one": True,
                        "tags": [tag("<call>", DIGITS, "</call>")]}},
            ["<call>12/x</call>", "<call>12/x</call>, <call>34/x</call>"],
            ["", "<call>12/x</call>,", "x"],
        ),
        (
            {"format": {"type": "sequence", "elements": [ONE, {"type": "or", "elements": [
                DIGITS, tag("<call>", ANY, "</call>")]}, ANY]}},
            ['é"112/xrest', 'é"1<call>hm</call>'],
            ['é"1', "rest"],
        ),
    ],
)  # fmt: skip
def test_what_a_tag_takes(
    grammars: Grammars, tags: Any, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not takes(grammars, tags, text)] == []
    assert [text for text in wrong if takes(grammars, tags, text)] == []


@pytest.mark.parametrize("seed", range(5))
def test_a_random_answer_calls_as_it_must(seed: int) -> None:
    grammars = Grammars(Vocabulary(PLAIN, {END: b"<end>"}, (END,), lambda text: [*text.encode()]))
    tags = triggered(tag("<f=on>"), at_least_one=True, stop_after_first=True)
    params = SamplingParams(structured_outputs={"structural_tag": tags})
    assert params.structured_outputs is not None
    text = answer(grammars, params.structured_outputs, random.Random(seed))
    found = re.fullmatch(r"<f=on>(.*)</f>", text or "", re.DOTALL)
    assert found is not None
    assert list(json.loads(found[1])) == ["a"]


@pytest.mark.parametrize(
    ("tags", "word"),
    [
        ([], "an object"),
        ({}, "structures is required"),
        ({"structures": [], "triggers": ["<"]}, "tags is empty"),
        ({"structures": [{"begin": "x", "end": "", "schema": {}}], "triggers": ["y"]}, "begin"),
        ({"structures": [{"begin": "x", "end": "", "schema": 3}], "triggers": ["x"]}, "schema"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "'grammar' is not supported"),
        (triggered(tag("<f=a>"), excludes=["x"]), "excludes"),
        (triggered(tag("<f=a>", {"type": "regex", "pattern": "(?=a)"})), "look-ahead"),
        (triggered(tag("<f=a>", {"type": "json_schema", "json_schema": {"not": {}}})), "not"),
        ({"format": {"type": "sequence", "elements": [ANY, ONE]}}, "any_text"),
        (triggered(*[tag("<f=a>", ANY)] * 1100), "1024 tags"),
    ],
)
def test_what_is_refused_is_named(grammars: Grammars, tags: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        grammars.compile(Grammar("structural_tag", json.dumps(tags)))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert "rule_" not in caught.value.message  # the caller never saw the Lark text


def test_the_first_trigger_is_found_among_many_at_once() -> None:
    """Of 30,000 triggers for 1,000 tags, each with each would be 30 million comparisons."""
    triggers = ["<f", "<f=", *(f"<{i}" for i in range(30_000))]
    tags = [{"begin": f"<{i}>", "content": {"type": "any_text"}, "end": "</>"} for i in range(900)]
    began = time.thread_time()
    one = {"type": "triggered_tags", "tags": tags, "triggers": triggers}
    assert Tags({}, str).lark({"format": one})
    assert time.thread_time() - began < 1.0
    found = _Triggers([5, "", *triggers])
    assert [found.of(text) for text in ("<f=on>", "<17>", "<29999", "f", "")] == [
        "<f", "<1", "<2", None, None,
    ]  # fmt: skip

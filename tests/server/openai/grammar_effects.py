"""What the fields of structured output do, as field_effects.py has it for the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamer.core.sampling import Grammar
from tests.server.openai.field_effects import params
from tests.server.support.calls import Asker, Refused

PAIR = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}
STRUCTURES: Any = {"structures": [{"begin": "<f>", "schema": PAIR, "end": "</f>"}]}
STRUCTURES |= {"triggers": ["<f"]}
TAG = json.dumps(STRUCTURES, separators=(",", ":"))
BAD = {"type": "array", "items": {"uniqueItems": True}}


def structured_outputs(asker: Asker, kind: str) -> None:
    """Each kind of grammar reaches the engine compiled; what can't be honoured is named."""
    for given, made in [
        ({"json": PAIR}, Grammar("json", json.dumps(PAIR, separators=(",", ":")))),
        ({"json": "{}", "disable_any_whitespace": True}, Grammar("json", "{}", "")),
        ({"json_object": True, "json": None}, Grammar("json_object")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["é", '"']}, Grammar("choice", '["é","\\""]')),
        ({"grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ({"structural_tag": TAG}, Grammar("structural_tag", TAG)),
    ]:
        assert params(asker, kind, structured_outputs=given).structured_outputs == made
    for wrong, field, word in [
        ({"json": BAD}, ".json", "uniqueItems"),
        ({"regex": "(?=a)"}, ".regex", "look-ahead"),
        ({"grammar": "start: other"}, ".grammar", "other"),
        ({"grammar": 'root ::= "a" | "b"'}, ".grammar", 'Lark, such as start: "a" | "b"'),
        ({"choice": []}, ".choice", "choice"),
        ({"regex": "a", "choice": ["a"]}, "", "exactly one"),
        ({"structural_tag": "{}"}, ".structural_tag", "structures is required"),
        ({"lookup": "x"}, ".lookup", "not supported"),
    ]:
        _refuses(asker, kind, "structured_outputs" + field, word, structured_outputs=wrong)


def thinking_token_budget(asker: Asker, kind: str) -> None:
    """Of a model that reasons, tests/server/test_tool_calls.py shows it; the fake one does not."""
    assert params(asker, kind, thinking_token_budget=None).thinking_token_budget is None
    for wrong, word in [(5, "reasoning"), (-1, "from 0 to"), (True, "int")]:
        _refuses(asker, kind, "thinking_token_budget", word, thinking_token_budget=wrong)


def response_format(asker: Asker, kind: str) -> None:
    _follows_a_schema(
        asker,
        kind,
        "response_format.json_schema.schema",
        lambda schema: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": schema},
            }
        },
    )
    for form, made in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_object")),
        ({"type": "json_object", "schema": {}}, Grammar("json", "{}")),
        ({"type": "json_object", "value": {}}, Grammar("json", "{}")),  # huggingface_hub's
        ({"type": "json", "value": {}}, Grammar("json", "{}")),
        (
            {"type": "json_object", "json_schema": {"name": "n", "schema": {}}},
            Grammar("json", "{}"),
        ),
        ({"type": "json"}, Grammar("json_object")),
        ({"type": "structural_tag", **STRUCTURES}, Grammar("structural_tag", TAG)),
    ]:
        assert params(asker, kind, response_format=form).structured_outputs == made
    _refuses(
        asker, kind, "response_format.json_schema.schema", "required",
        response_format={"type": "json_schema", "json_schema": {"name": "x"}},
    )  # fmt: skip


def text_format(asker: Asker, kind: str) -> None:
    """In the object of the response, too."""
    _follows_a_schema(
        asker,
        kind,
        "text.format.schema",
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    )
    for form, made in [({"type": "text"}, None), ({"type": "json_object"}, Grammar("json_object"))]:
        answer = asker.ask(kind, text={"format": form})
        assert answer.stream.params.structured_outputs == made
        assert answer.body["text"]["format"] == form
    form = {"type": "json_schema", "name": "x", "schema": PAIR, "strict": True}
    said = asker.ask(kind, text={"format": form}).body["text"]["format"]
    assert said == {**form, "description": None}


def _follows_a_schema(asker: Asker, kind: str, field: str, fields: Any) -> None:
    made = params(asker, kind, **fields(PAIR)).structured_outputs
    assert made == Grammar("json", json.dumps(PAIR, separators=(",", ":")))
    _refuses(asker, kind, field, "uniqueItems", **fields(BAD))
    both = fields(PAIR) | {"structured_outputs": {"regex": "a"}}
    _refuses(asker, kind, "structured_outputs", "two grammars", **both)


def _refuses(asker: Asker, kind: str, field: str, word: str, **fields: Any) -> None:
    with pytest.raises(Refused, match=word) as caught:
        asker.ask(kind, **fields)
    assert (caught.value.status, caught.value.param) == (400, field)

"""Schemas as they are followed: dates and times that parsers read; keywords that say nothing."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time, timedelta
from typing import Any

import pytest

from streamer.constraints.schemas import PATTERNS, followable
from streamer.core.sampling import Grammar
from tests.constraints.test_bounds import grammars_of_bytes


@pytest.mark.parametrize("year", [1900, 2000, 2023, 2024])
def test_every_day_of_the_calendar(year: int) -> None:
    all_days = (f"{year:04}-{m:02}-{d:02}" for m in range(14) for d in range(33))
    found = [day for day in all_days if re.search(PATTERNS["date"], day)]
    first = date(year, 1, 1)
    days = (date(year + 1, 1, 1) - first).days
    assert found == [str(first + timedelta(n)) for n in range(days)]


@pytest.mark.parametrize("text", ["23:59:59Z", "00:00:00.25+01:30", "10:20:30-23:59"])
def test_times(text: str) -> None:
    assert re.search(PATTERNS["time"], text)
    assert time.fromisoformat(text)
    assert re.search(PATTERNS["date-time"], f"2024-02-29T{text}")
    assert datetime.fromisoformat(f"2024-02-29T{text}")


@pytest.mark.parametrize("text", ["24:00:00Z", "23:59:60Z", "10:20:30", "10:20Z", "1:20:30Z"])
def test_no_times(text: str) -> None:
    assert not re.search(PATTERNS["time"], text)
    assert not re.search(PATTERNS["date-time"], f"2024-02-29T{text}")


def test_only_schemas_are_changed() -> None:
    day, pattern = {"format": "date"}, {"pattern": PATTERNS["date"]}
    assert followable({"properties": {"format": day}, "items": [day], "anyOf": [day]}) == {
        "properties": {"format": pattern}, "items": [pattern], "anyOf": [pattern],
    }  # fmt: skip
    for kept in ({"const": day}, {"enum": [day]}, {"default": day}, {"format": "uuid"}, True):
        assert followable(kept) == kept
    both = followable({"format": "date", "pattern": "^2"})
    assert both == {"pattern": "^2", "allOf": [pattern]}


NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False, "items": {"uniqueItems": False}},
    {"not": False},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"propertyNames": {}, "minProperties": 0, "unevaluatedProperties": True},
    {"unevaluatedItems": True, "contains": {"type": "null"}, "minContains": 0},
    {"then": {"type": "null"}, "else": {"type": "null"}},
    {"if": {"type": "null"}},
    {"minContains": 2, "maxContains": 3},
    {"properties": {"a": {"type": "string", "uniqueItems": False}}},
    {"allOf": [{"not": False}], "$defs": {"x": {"not": False}}},
]


@pytest.mark.parametrize("schema", NOTHING, ids=json.dumps)
def test_keywords_that_say_nothing_are_left_out(schema: dict[str, Any]) -> None:
    kept = json.dumps(followable(schema))
    for word in ("uniqueItems", "not", "dep", "Names", "minProp", "ntains", "if", "then", "uneval"):
        assert f'"{word}' not in kept
        assert f'{word}"' not in kept
    grammars_of_bytes().compile(Grammar("json", json.dumps(schema)))


def test_counts_may_be_written_with_a_point() -> None:
    schema = {"type": "array", "minItems": 1.0, "maxItems": 2.0}
    assert followable(schema) == {"type": "array", "minItems": 1, "maxItems": 2}
    grammars_of_bytes().compile(Grammar("json", json.dumps(schema)))
    assert followable({"maxItems": 2.5, "const": 1.0}) == {"maxItems": 2.5, "const": 1.0}


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"not": {}},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        {"properties": {"uniqueItems": {"type": "null"}, "not": {"const": False}}},
        {"minProperties": False},
        {"if": {}, "then": False},
    ],
    ids=json.dumps,
)
def test_keywords_that_say_something_stay(schema: dict[str, Any]) -> None:
    assert followable(schema) == schema

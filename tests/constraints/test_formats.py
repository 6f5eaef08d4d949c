"""Dates and times of a schema are those that parsers read: each day of the calendar, no more."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta

import pytest

from streamer.constraints.formats import PATTERNS, exact


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
    assert exact({"properties": {"format": day}, "items": [day], "anyOf": [day]}) == {
        "properties": {"format": pattern}, "items": [pattern], "anyOf": [pattern],
    }  # fmt: skip
    for kept in ({"const": day}, {"enum": [day]}, {"default": day}, {"format": "uuid"}, True):
        assert exact(kept) == kept
    both = exact({"format": "date", "pattern": "^2"})
    assert both == {"pattern": "^2", "allOf": [pattern]}

"""The fake model's text, and the check that it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "count, please"}]}
ENDLESS: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True}


def check_counting(text: str) -> list[int]:
    """The numbers in the text; they are consecutive unless a part is missing or doubled."""
    numbers = [int(word) for word in text.split()]
    assert numbers, "no text"
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return numbers


class Event:
    """One SSE event: its id, kind and data."""

    def __init__(self, lines: list[str]) -> None:
        fields = [line.partition(": ")[::2] for line in lines if not line.startswith(":")]
        values = dict(fields)
        assert set(values) <= {"id", "data", "event"}
        assert len(values) == len(fields)
        self.id = values.get("id")
        self.kind = values.get("event", "")
        self.data = values.get("data", "")
        self.is_done = self.data == "[DONE]"

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def sse(response: httpx.Response) -> Iterator[Event]:
    """The events of a streaming response; comments are left out."""
    lines: list[str] = []
    for line in response.iter_lines():
        if line:
            lines.append(line)
            continue
        if any(not x.startswith(":") for x in lines):
            yield Event(lines)
        lines = []
    assert not lines, "the body ends inside an event"

"""TemplateParser: an answer read by its checkpoint's own `response_template`, to our events.

Taken where a chat template is of no format that formats.py knows. Text and reasoning come as they
are written, a call when it is whole, or as text where it is none. Like Parser it never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.parsing.formats import TEMPLATE_CALLS
from streamer.server.parsing.schemas import Schema
from streamer.tokenizer.response_template import Found, ResponseTemplate

REASONING: Final = frozenset(("reasoning_content", "reasoning", "thinking"))
SPACES: Final = " \t\r\n"


class TemplateParser:
    """Reads one answer.

    tools      the parameters' schema of each tool; None: calls are text
    beginning  text of the prompt that belongs to the answer
    max_calls  further ones are left out
    """

    def __init__(
        self,
        template: ResponseTemplate,
        tools: Mapping[str, Schema] | None = None,
        *,
        beginning: str = "",
        max_calls: int | None = None,
    ) -> None:
        self._has_tools, self._max_calls = tools is not None, max_calls
        self._reader = template.reader(beginning, [_tool(n, s) for n, s in (tools or {}).items()])
        self._num_calls = 0
        self._spaces = ""  # held until more text of the field comes
        self._has_begun = bool(beginning.strip(SPACES)) and self._reader.current is not None
        self._has_text = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def feed(self, text: str) -> list[Event]:
        """More of the text; the events that follow from it."""
        return self._events(self._reader.feed(text)) if text else []

    def end(self) -> list[Event]:
        """The end of the text; the last events."""
        return self._events(self._reader.end())

    def _events(self, found: Sequence[Found]) -> list[Event]:
        events: list[Event] = []
        for each in found:
            if each.kind == "begin":
                self._spaces, self._has_begun = "", False
            elif each.kind == "text":
                events += self._said(each)
            else:
                events += self._valued(each)
        return events

    def _said(self, found: Found) -> list[Event]:
        """Text without the spaces around it."""
        text = self._spaces + found.text
        kept = text.rstrip(SPACES)
        self._spaces = text[len(kept) :]
        is_reasoning = found.field in REASONING
        if not self._has_begun and (is_reasoning or not self._has_text):
            kept = kept.lstrip(SPACES)
        if not kept:
            return []
        self._has_begun = True
        if is_reasoning:
            return [Reasoning(kept)]
        self._has_text = True
        return [Text(kept)]

    def _valued(self, found: Found) -> list[Event]:
        calls = _calls(found.value) if found.field == TEMPLATE_CALLS and self._has_tools else None
        if calls is None:
            self._has_text = True
            return [Text(found.text)]
        events: list[Event] = []
        for name, arguments in calls:
            index, self._num_calls = self._num_calls, self._num_calls + 1
            if self._max_calls is None or index < self._max_calls:
                begin = ToolCallBegin(index, None, name)
                events += [begin, ToolArguments(index, arguments), ToolCallEnd(index)]
        return events


def _tool(name: str, schema: Schema) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _calls(value: object) -> list[tuple[str, str]] | None:
    """Names and arguments, JSON, of the value of a field of calls; None if it has no such form."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        name, arguments = function.get("name"), function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except (msgspec.DecodeError, RecursionError):
                return None
        if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
            return None
        found.append((name, msgspec.json.encode(arguments).decode()))
    return found

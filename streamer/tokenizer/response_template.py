"""ResponseTemplate: what a checkpoint itself says of the form of its answers.

`response_template` of tokenizer_config.json declares fields and the marks around them; transformers
has the streaming parser of it. Here that parser reads on where a field is not what was declared.
The server makes events of what it finds. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate as Spec

logger = logging.getLogger(__name__)


class Found(msgspec.Struct, frozen=True):
    """A field begins, has more text, or has its whole value.

    text   as it was written; of a value with the marks around it
    value  None: it could not be parsed
    """

    kind: Literal["begin", "text", "value"]
    field: str
    text: str = ""
    value: Any = None


class ResponseTemplate(msgspec.Struct, frozen=True, eq=False):
    """A template that was loaded: `marks` are all texts of its delimiters, for special tokens."""

    spec: Any
    marks: str

    @property
    def fields(self) -> frozenset[str]:
        """The names of the fields that an answer may have."""
        return frozenset(self.spec.fields)

    def beginning(self, prompt: str) -> str | None:
        """What of a prompt belongs to its answer; None: the answer does not begin in this text."""
        ends = [match.end() for match in self.spec.start_anchor_re.finditer(prompt)]
        return prompt[ends[-1] :] if ends else None

    def reader(self, beginning: str, tools: Sequence[Mapping[str, Any]]) -> Reader:
        """A reader of one answer.

        beginning  the text after the prompt's last anchor;  tools  by whose schemas text is cast
        """
        return Reader(self.spec, beginning, tools)


def load_template(given: Any) -> ResponseTemplate | None:
    """The template of a checkpoint's settings; None without one, or with one that can't be used."""
    if not given:
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(given)
    except Exception as e:  # whatever that code finds wrong with it, or a version without it
        logger.warning("response_template of the checkpoint is not used: %s", e)
        return None
    for field in spec.fields.values():
        field.optional = True  # an answer may be cut anywhere
    return ResponseTemplate(spec, "\n".join(map(_unescaped, _texts(given))))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _unescaped(pattern: str) -> str:
    """The literal texts of a regular expression, among others."""
    return re.sub(r"\\(\W)", r"\1", pattern)


class Reader:
    """Reads one answer as it comes; never raises."""

    def __init__(self, spec: Spec, beginning: str, tools: Sequence[Mapping[str, Any]]) -> None:
        given: list[Any] = [dict(tool) for tool in tools]
        self._parser = _parser_class()(_without_anchor(spec), beginning, tools=given)
        self._streams = _streamed(spec)

    @property
    def current(self) -> str | None:
        """The field that the beginning has opened."""
        return self._parser._current if self._parser._opened else None

    def feed(self, text: str) -> list[Found]:
        """What follows from more text."""
        return self._found(self._parser.feed(text))

    def end(self) -> list[Found]:
        """What follows from the end of the text."""
        return self._found(self._parser.finalize()[1])

    def _found(self, events: Sequence[Mapping[str, Any]]) -> list[Found]:
        found = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                found.append(Found("begin", field))
            elif kind == "region_chunk" and field in self._streams:
                found.append(Found("text", field, event["text"]))
            elif kind == "region_close" and field not in self._streams:
                found.append(Found("value", field, event["raw"], event["value"]))
        return found


def _streamed(spec: Spec) -> frozenset[str]:
    from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS

    return frozenset(f.name for f in spec.fields.values() if f.content in STREAMABLE_PARSERS)


def _without_anchor(spec: Spec) -> Spec:
    """For a beginning from which the anchor is cut off already: it matches its end alone."""
    import dataclasses

    return dataclasses.replace(spec, start_anchor_re=_NEVER)


_NEVER = re.compile(r"(?!)")


@cache  # transformers is imported where a checkpoint has a template, and nowhere else
def _parser_class() -> type[ResponseParser]:
    from transformers.utils.chat_parsing import ResponseParser

    class LenientParser(ResponseParser):
        """transformers' parser, which goes on after a field that can't be parsed.

        Its region_close has `raw`, the text with its marks, and `value` is None for such a field:
        the original raises, and what it had found in the same piece of text is lost.
        """

        _start = 0

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            self._start = m.start()
            super()._open_explicit(events, field, m)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            field = self._current
            is_implicit = field == self._implicit_name
            raw = self._body if is_implicit else self._buffer[self._start : self._pos]
            before = len(events)
            try:
                super()._close_current(events)
            except Exception:
                del events[before:]
                events.append({"type": "region_close", "field": field, "value": None})
                self._reset_to_implicit()
            for event in events[before:]:
                event["raw"] = raw

    return LenientParser

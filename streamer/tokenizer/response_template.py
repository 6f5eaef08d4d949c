"""ResponseTemplate: what a checkpoint itself says of the form of its answers.

`response_template` of tokenizer_config.json declares fields and the marks around them; transformers
has the streaming parser of it. Here that parser reads on where a field is not what was declared,
and patterns, the checkpoint's and its own, have a limit on their time: an answer that takes more is
text from there on. The server makes events of what it finds. No torch.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from streamer.tokenizer.patterns import Clock, TimedPattern, fault

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate as Spec

logger = logging.getLogger(__name__)

# CPU seconds of one answer's patterns, on the loop: at once, and with every piece of its text. All
# patterns of an ordinary piece take 5 us.
AT_ONCE_S, PIECE_S = 0.1, 0.0005
ANCHOR_S = 0.05  # of looking for the answer's beginning in a prompt
# Characters of a field's passes to put its strings back, one each: 0.2 s of an EPYC Zen 4.
MAX_PASSED: Final = 3 * 10**8
MATCHING: Final = frozenset(
    ("search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn")
)
TEXT = "content"  # the field of what can't be read


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
        anchor = TimedPattern(self.spec.start_anchor_re, Clock(ANCHOR_S, 0))
        try:
            ends = [match.end() for match in anchor.all(prompt)]
        except TimeoutError:
            logger.warning("start_anchor_pattern of the response_template takes too long")
            return ""
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

        _regex()
        for text in _patterns(given):
            if (wrong := fault(text)) is not None:
                raise ValueError(f"the pattern {text[:80]!r} {wrong}")
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


def _patterns(value: object) -> Iterator[str]:
    """The texts that are regular expressions."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str) and key.endswith("pattern"):
                yield inner
            else:
                yield from _patterns(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def _unescaped(pattern: str) -> str:
    """The literal texts of a regular expression, among others."""
    return re.sub(r"\\(\W)", r"\1", pattern)


class Reader:
    """Reads one answer as it comes; never raises."""

    def __init__(self, spec: Spec, beginning: str, tools: Sequence[Mapping[str, Any]]) -> None:
        given: list[Any] = [dict(tool) for tool in tools]
        self._clock = Clock(AT_ONCE_S, PIECE_S)
        self._is_given_up = False
        self._streams = _streamed(spec)
        timed = _timed(spec, self._clock)
        self._parser = _parser_class()(timed, "", tools=given)
        self._parser.clock, self._parser.streams = self._clock, self._streams
        if beginning:
            self.feed(beginning)

    @property
    def current(self) -> str | None:
        """The field that the beginning has opened."""
        return self._parser._current if self._parser._opened else None

    def feed(self, text: str) -> list[Found]:
        """What follows from more text."""
        return self._read(text, is_over=False)

    def end(self) -> list[Found]:
        """What follows from the end of the text."""
        return self._read("", is_over=True)

    def _read(self, text: str, *, is_over: bool) -> list[Found]:
        if self._is_given_up:
            return [Found("text", TEXT, text)] if text else []
        events: list[dict[str, Any]] = []
        self._clock.more()
        try:
            self._parser.read(events, text, is_over)
        except Exception as e:  # whatever another version of that code does with a model's text
            if isinstance(e, TimeoutError):
                logger.warning("patterns of the response_template take too long: the rest is text")
            else:
                logger.exception("the response_template can't be followed: the rest is text")
            self._is_given_up = True
            rest = [Found("begin", TEXT), Found("text", TEXT, self._parser.rest)]
            return [*self._found(events), *rest]
        return self._found(events)

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


def _timed(spec: Spec, clock: Clock) -> Spec:
    """The template whose patterns take their time from a clock."""
    import dataclasses

    def timed(pattern: Any) -> Any:
        return None if pattern is None else TimedPattern(pattern, clock)

    fields = {
        name: dataclasses.replace(f, open_re=timed(f.open_re), close_re=timed(f.close_re))
        for name, f in spec.fields.items()
    }
    return dataclasses.replace(spec, fields=fields)


class _Regex(threading.local):
    """The package `regex` as transformers' content parsers have it: what they match takes its time
    from `clock`, that of the answer which this thread reads."""

    clock: Clock | None = None

    def __init__(self, package: Any) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._package, name)
        return partial(self._match, name, found) if name in MATCHING else found

    def _match(self, name: str, find: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.clock is None:
            return find(*args, **kwargs)
        if name == "finditer":
            return self.clock.run(lambda *at, **how: list(find(*at, **how)), *args, **kwargs)
        return self.clock.run(find, *args, **kwargs)


@cache
def _regex() -> _Regex:
    """Given to transformers' content parsers with the first call: their own patterns may be
    quadratic, too."""
    import regex
    from transformers.utils.chat_parsing import content_parsers

    theirs: Any = content_parsers
    if theirs.re is not regex:
        raise ImportError("transformers matches with another package than regex")
    timed = theirs.re = _Regex(regex)
    return timed


def _check_strings(text: str, args: Mapping[str, Any]) -> None:
    """TimeoutError if a field's content has more strings than can be put back in time."""
    if sum(map(text.count, _string_marks(args))) * len(text) > MAX_PASSED:
        raise TimeoutError


def _string_marks(args: Mapping[str, Any]) -> Iterator[str]:
    """What opens strings in a field's content, or in its parts."""
    yield from (opens for opens, _ in args.get("string_delims", []))
    if (inner := args.get("value_parser")) is not None:
        yield from _string_marks(inner.get("args", {}))


@cache  # transformers is imported where a checkpoint has a template, and nowhere else
def _parser_class() -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    class LenientParser(ResponseParser):
        """transformers' parser, which goes on after a field that can't be parsed.

        Its region_close has `raw`, the text with its marks, and `value` is None for such a field:
        the original raises, and what it had found in the same piece of text is lost.

        clock    of the time that patterns take;  streams  fields whose text is passed on at once
        """

        clock: Clock
        streams: frozenset[str]
        _start = 0
        _unmoved = -1  # where a field was opened last by a mark without text

        def read(self, events: list[dict[str, Any]], text: str, is_over: bool) -> None:
            """More text, or its end: adds the events that follow from it."""
            self._buffer += text
            self._process(events, eos=is_over)

        @property
        def rest(self) -> str:
            """The text that has not been passed on."""
            field, rest = self._current, self._buffer[self._pos :]
            if field is None or field in self.streams:
                return rest
            is_implicit = field == self._implicit_name
            return self._body + rest if is_implicit else self._buffer[self._start :]

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
            self._start = m.start()
            if m.end() == m.start():
                if m.end() == self._unmoved:
                    raise TimeoutError  # and so again
                self._unmoved = m.end()
            super()._open_explicit(events, field, m)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            field = self._current
            is_implicit = field == self._implicit_name
            raw = self._body if is_implicit else self._buffer[self._start : self._pos]
            before = len(events)
            try:
                if field is not None:
                    _check_strings(self._body, self._spec.fields[field].content_args)
                _regex().clock = self.clock
                super()._close_current(events)
            except Exception:
                del events[before:]
                events.append({"type": "region_close", "field": field, "value": None})
                self._reset_to_implicit()
            finally:
                _regex().clock = None
            for event in events[before:]:
                event["raw"] = raw

    return LenientParser

"""Parser: a model's text, in any pieces, to events; one for every format.

A call comes at once: its name when it is whole, then its arguments as they are written. What is no
call comes as text: all of it where it breaks before its arguments begin; later the rest, and then
the arguments lack their last brace. It never raises. The events so far depend on the text so far
alone: generators read it by the character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from streamer.server.parsing.call_fields import NAME, CallFields
from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.parsing.formats import HARMONY, Calls, Channels, ModelFormat, Parameters
from streamer.server.parsing.schemas import Schema, as_json, inlined, is_text
from streamer.server.parsing.source import Broken, Reading, Source

MAX_NAME: Final = 256
MAX_HELD: Final = 1 << 16  # characters of a call whose name does not come
_KEY = re.compile(r"[^\x00-\x1f<>]{1,256}")
_HELD_AS_ID = re.compile(r"(?:functions\.)?([\w.:/-]+?):\d+")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")


class Parser:
    """Reads one answer.

    format        what may be in it: without `calls` there are none
    tools         the parameters' schema of each tool
    is_reasoning  the prompt has opened the reasoning
    max_calls     further ones are left out
    is_forced     the reasoning has no calls
    """

    def __init__(
        self,
        format: ModelFormat,
        tools: Mapping[str, Schema] | None = None,
        *,
        is_reasoning: bool = False,
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> None:
        self._source = Source()
        self._calls = format.calls if isinstance(format.calls, Calls) else None
        self._think = format.think
        self._tools = tools or {}
        self._max_calls = max_calls
        self._is_forced = is_forced
        self._pieces: list[tuple[Callable[[str], Event], list[str]] | Event] = []
        self._spaces = ""  # at the end of the text, which a call or the end may follow
        self._has_text = False
        self._has_more = False  # reasoning or a call came
        self._is_after_call = False
        self._num_calls = 0
        self._is_open = False  # a call has begun
        self._is_first = False  # of the calls after a marker none is complete
        if format.channels is not None:
            self._run = self._channels(isinstance(format.calls, Channels))
        else:
            self._run = self._message(is_reasoning)
        next(self._run, None)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def feed(self, text: str) -> list[Event]:
        """More of the text; the events that follow from it."""
        if not text:
            return []
        self._source.add(text)
        next(self._run, None)
        return self._taken()

    def end(self) -> list[Event]:
        """The end of the text; the last events."""
        self._source.is_over = True
        next(self._run, None)
        is_plain = self._has_text or not self._has_more
        if self._spaces and is_plain and not self._is_after_call:
            self._put(Text, self._spaces)
        return self._taken()

    # ------------------------------------------------------------ events

    def _put(self, kind: Callable[[str], Event], text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self._pieces.append((kind, [text]))

    def _taken(self) -> list[Event]:
        pieces, self._pieces = self._pieces, []
        found = [p[0]("".join(p[1])) if isinstance(p, tuple) else p for p in pieces]
        limit = self._max_calls
        if limit is None:
            return found
        return [e for e in found if isinstance(e, Text | Reasoning) or e.index < limit]

    def _say(self, text: str) -> None:
        if self._spaces and (self._has_text or not self._has_more):
            self._put(Text, self._spaces)
        self._spaces = ""
        self._has_text, self._is_after_call = True, False
        self._put(Text, text)

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._spaces, self._has_more, self._is_open = "", True, True
        self._source.mark = None
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._pieces.append(ToolCallBegin(index, call_id, name))
        self._to_arguments = lambda text: ToolArguments(index, text)

    def _argue(self, text: str) -> None:
        self._put(self._to_arguments, text)

    def _finish(self) -> None:
        """The end of a call, whole or broken: reading never returns before it."""
        self._pieces.append(ToolCallEnd(self._num_calls - 1))
        self._is_open, self._is_first, self._is_after_call = False, False, True
        self._source.mark = self._source.at

    # ------------------------------------------------------------ prose and reasoning

    def _message(self, is_reasoning: bool) -> Reading[None]:
        source, calls, think = self._source, self._calls, self._think
        openings = calls.openings if calls is not None else ()
        if is_reasoning and think is not None:
            yield from self._reason()
        is_bare = calls is not None and calls.is_bare
        while char := (yield from source.peek()):
            may_think = think is not None and not self._has_text
            if char in " \t\r\n" and (may_think or openings):
                yield from source.spaces(self._hold)
                continue
            if is_bare and char in "{[" and not self._has_text:
                yield from self._group("", self._say)
                continue
            markers = (*openings, think.open) if may_think and think is not None else openings
            found = yield from source.marker(markers)
            if found is None:
                self._say(self._prose(markers, bool(openings)))
            elif think is not None and found == think.open:
                self._spaces = ""
                yield from self._reason()
            else:
                yield from self._group(found, self._say)

    def _hold(self, spaces: str) -> None:
        self._spaces += spaces

    def _prose(self, markers: tuple[str, ...], holds_spaces: bool) -> str:
        """At least one character, and what is there already of the text up to a marker or space."""
        source, start = self._source, self._source.at
        places = [source.text.find(m[0], start + 1) for m in markers]
        end = min((p for p in places if p > 0), default=len(source.text))
        text = source.text[start:end]
        if holds_spaces:
            text = text[0] + text[1:].rstrip(" \t\r\n")
        source.at = start + len(text)
        return text

    def _reason(self) -> Reading[None]:
        """Reasoning up to its end; a call of a known tool in it is a call."""
        source, calls, think = self._source, self._calls, self._think
        self._has_more = True
        if think is None:
            return
        spaces, has_some = "", False

        def reason(text: str) -> None:
            nonlocal spaces, has_some
            if has_some:
                self._put(Reasoning, spaces)
            spaces, has_some = "", True
            self._put(Reasoning, text)

        def hold(text: str) -> None:
            nonlocal spaces
            spaces += text

        may_call = self._tools and not self._is_forced
        openings = calls.openings if calls is not None and may_call else ()
        markers = (*openings, think.close)
        while char := (yield from source.peek()):
            if char in " \t\r\n":
                yield from source.spaces(hold)
                continue
            found = yield from source.marker(markers)
            if found is None:
                reason(self._prose(markers, True))
            elif found == think.close:
                return
            else:
                yield from self._group(found, reason, is_strict=True)

    # ------------------------------------------------------------ calls

    def _group(
        self, opening: str, say: Callable[[str], None], is_strict: bool = False
    ) -> Reading[None]:
        """The calls after an opening that was just passed; broken ones are said.

        is_strict  only a known tool's name makes a call
        """
        source, calls = self._source, self._calls
        if calls is None:
            return
        source.mark = source.at - len(opening)
        self._is_first = True
        is_strict = is_strict or not opening
        try:
            section = calls.section
            if section is not None and opening == section[0]:
                yield from source.spaces()
                if (yield from source.marker((calls.open,))) is None:
                    raise Broken
            yield from self._call(calls, is_strict)
            while section is not None:
                source.mark = source.at
                yield from source.spaces()
                found = yield from source.marker((calls.open, section[1]))
                if found == section[1]:
                    source.mark = source.at
                    break
                if found is None:
                    raise Broken
                yield from self._call(calls, is_strict)
        except Broken:
            if self._is_open:
                self._finish()
            elif source.mark is not None:
                source.at = source.mark
            if self._is_first:
                say(opening or source.text[source.at])
                source.at += len(opening) or 1
        source.mark = None

    def _call(self, calls: Calls, is_strict: bool) -> Reading[None]:
        """One call after its opening, with its end where that is written."""
        source = self._source
        yield from source.spaces()
        char = yield from source.peek()
        if calls.body == "object" or (calls.body == "arguments" and char in ("{", "[")):
            yield from self._objects(is_strict)
        elif calls.body == "arguments":
            yield from self._named(calls, is_strict)
        else:
            yield from self._tagged(calls, is_strict)
            return
        for closer in filter(None, (calls.fence, calls.close)):
            source.mark = source.at
            yield from source.spaces()
            if (yield from source.marker((closer,))) is None:
                source.at = source.mark
        source.mark = source.at

    def _objects(self, is_strict: bool) -> Reading[None]:
        """A call as JSON, or a list of them, or some with semicolons between them."""
        source = self._source
        if (yield from source.peek()) == "[":
            source.at += 1
            while True:
                yield from source.spaces()
                yield from self._object(is_strict)
                yield from source.spaces()
                char = yield from source.peek()
                source.at += char != ""
                if char == "]":
                    break
                if char != ",":
                    source.at -= char != ""
                    raise Broken
            source.mark = source.at
            return
        yield from self._object(is_strict)
        while True:
            yield from source.spaces()
            if (yield from source.peek()) != ";":
                break
            source.at += 1
            yield from source.spaces()
            yield from self._object(is_strict)
        if source.mark is not None:
            source.at = source.mark

    def _object(self, is_strict: bool) -> Reading[None]:
        """{"name": ..., "arguments": {...}}; a missing last brace is forgiven."""
        source, fields = self._source, CallFields(is_strict, self._tools)
        if (yield from source.peek()) != "{":
            raise Broken
        source.at += 1
        is_done = False
        try:
            while True:
                yield from source.spaces()
                if not fields.found and (yield from source.peek()) == "}":
                    raise Broken
                key = yield from self._text(MAX_NAME)
                yield from source.spaces()
                if (yield from source.peek()) != ":":
                    raise Broken
                source.at += 1
                yield from source.spaces()
                if fields.takes_arguments(key) and (yield from source.peek()) == "{":
                    self._require_known(fields.name, is_strict)
                    yield from self._arguments(fields.name, None)
                    is_done = True
                else:
                    fields.put(key, (yield from self._captured()))
                yield from source.spaces()
                char = yield from source.peek()
                if char not in (",", "}"):
                    raise Broken
                source.at += 1
                if char == "}":
                    break
        except Broken:
            if not is_done:
                raise
        if not is_done:
            self._require_known(fields.name, is_strict)
            self._begin(fields.name)
            self._argue(fields.arguments)
        self._finish()

    def _arguments(self, name: str, call_id: str | None) -> Reading[None]:
        """An object, passed on as it comes; the call begins where it looks like one."""
        source = self._source
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            raise Broken
        spaces: list[str] = []
        source.at += 1
        yield from source.spaces(spaces.append)
        if (yield from source.peek()) not in ('"', "}"):
            raise Broken
        source.at -= 1 + sum(map(len, spaces))
        self._begin(name, call_id)
        yield from source.value(self._argue)

    def _named(self, calls: Calls, is_strict: bool) -> Reading[None]:
        """The name, then the arguments."""
        source = self._source
        name, end = yield from self._name(calls.name_ends, "{" if not calls.close else "")
        call_id = None
        if end == "[CALL_ID]":
            call_id, _ = yield from self._name(("[ARGS]",), "{")
        if calls.names_id and (match := _HELD_AS_ID.fullmatch(name)):
            name, call_id = match[1], name
        self._require_known(name, is_strict)
        yield from source.spaces()
        yield from self._arguments(name, call_id)
        self._finish()

    def _name(self, ends: tuple[str, ...], stops: str) -> Reading[tuple[str, str]]:
        """A name and the marker after it; "" where a character of `stops` ends it, which stays."""
        source, name, end = self._source, "", ""
        while char := (yield from source.peek()):
            found = yield from source.marker(ends)
            if found is not None:
                end = found
                break
            if char in stops:
                break
            if len(name) > MAX_NAME:
                raise Broken
            name += char
            source.at += 1
        else:
            raise Broken
        name = name.strip()
        if not NAME.fullmatch(name):
            raise Broken
        return name, end

    def _require_known(self, name: str, is_strict: bool) -> None:
        if not name or (is_strict and name not in self._tools):
            raise Broken

    def _text(self, limit: int) -> Reading[str]:
        """A JSON string, decoded."""
        found = yield from self._captured(limit)
        if not isinstance(found, str):
            raise Broken
        return found

    def _captured(self, limit: int = MAX_HELD) -> Reading[Any]:
        """A JSON value, decoded."""
        pieces: list[str] = []
        size = 0

        def keep(piece: str) -> None:
            nonlocal size
            size += len(piece)
            if size > limit:
                raise Broken
            pieces.append(piece)

        yield from self._source.value(keep)
        try:
            return json.loads("".join(pieces))
        except (ValueError, RecursionError):
            raise Broken from None

    # ------------------------------------------------------------ calls with tagged parameters

    def _tagged(self, calls: Calls, is_strict: bool) -> Reading[None]:
        """The name, parameters one by one, and the end."""
        source, parameters = self._source, calls.parameters
        if parameters is None:
            raise Broken
        name, _ = yield from self._name(calls.name_ends, "" if calls.name_ends else "<\n")
        self._require_known(name, is_strict)
        root = self._tools.get(name) or {}
        properties = root.get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        ends = (calls.close,) if calls.section is None else (calls.close, calls.section[1])
        before = "{"
        while True:
            yield from source.spaces()
            found = yield from source.marker((parameters.key[0], *ends))
            if found is None:
                raise Broken
            if found != parameters.key[0]:
                break
            key, is_plain = yield from self._key(parameters)
            if not self._is_open:
                self._begin(name)
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = inlined(schemas.get(key), root) if is_plain is None else {"type": "string"}
            yield from self._value(parameters, {} if is_plain is False else schema)
        if not self._is_open:
            self._begin(name)
        self._argue("{}" if before == "{" else "}")
        self._finish()
        if found != calls.close:
            source.at -= len(found)  # the section's end
            source.mark = source.at

    def _key(self, parameters: Parameters) -> Reading[tuple[str, bool | None]]:
        """A parameter's name, and whether its value is said to be text."""
        source, key = self._source, ""
        while (yield from source.marker((parameters.key[1],))) is None:
            char = yield from source.peek()
            if not char or len(key) > MAX_NAME:
                raise Broken
            key += char
            source.at += 1
        begins = parameters.value[0]
        if not _KEY.fullmatch(key.strip()):
            raise Broken
        if begins == ("",):
            return key.strip(), None
        if len(begins) == 1:
            yield from source.spaces()
        begin = yield from source.marker(begins)
        if begin is None:
            raise Broken
        return key.strip(), (begin == begins[0] if len(begins) > 1 else None)

    def _value(self, parameters: Parameters, schema: object) -> Reading[None]:
        """A value up to its end: text as it comes, another kind when it is whole."""
        source, close = self._source, parameters.value[1]
        is_streamed = is_text(schema)
        pieces: list[str] = []
        if parameters.is_on_own_line and (yield from source.peek()) == "\n":
            source.at += 1
        if is_streamed:
            self._argue('"')
        held = ""  # a line break that may be the last
        while True:
            char = yield from source.peek()
            if not char:
                raise Broken
            if (yield from source.marker((close,))) is not None:
                break
            text = held + self._prose(
                (close, "\n") if parameters.is_on_own_line else (close,), False
            )
            held = ""
            if parameters.is_on_own_line and text.endswith("\n"):
                text, held = text[:-1], "\n"
            if is_streamed:
                self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)
        self._argue('"' if is_streamed else as_json("".join(pieces), schema))

    # ------------------------------------------------------------ messages with headers

    def _channels(self, has_calls: bool) -> Reading[None]:
        """Messages, each with a header; text without one is the answer's."""
        source, marks = self._source, HARMONY
        heads = (marks.start, marks.channel)
        while (yield from source.peek()):
            opening = yield from source.marker((*heads, *marks.ends))
            if opening is None:
                self._say(self._prose(("<",), False))
            elif opening in heads:
                source.mark = source.at - len(opening)
                header = yield from self._header(marks)
                if header is None:
                    source.at = source.mark + len(opening)
                    self._say(opening)
                source.mark = None
                if header is not None:
                    yield from self._body(header, has_calls)

    def _header(self, marks: Channels) -> Reading[str | None]:
        """The header up to its end; None if there is none."""
        source, header = self._source, ""
        while (yield from source.marker((marks.message,))) is None:
            char = yield from source.peek()
            if not char or len(header) > 2 * MAX_NAME:
                return None
            header += char
            source.at += 1
        return header

    def _body(self, header: str, has_calls: bool) -> Reading[None]:
        source, ends = self._source, (*HARMONY.ends, HARMONY.start)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and has_calls:
            source.mark = source.at
            try:
                yield from self._arguments(recipient[1], None)
            except Broken:
                source.at = source.at if source.mark is None else source.mark
            if self._is_open:
                self._finish()
            source.mark = None
        words = header.replace(HARMONY.channel, " ").split()
        is_reasoning = "analysis" in words
        while (yield from source.peek()):
            found = yield from source.marker(ends)
            if found == HARMONY.start:
                source.at -= len(found)
            if found is not None:
                return
            text = self._prose(("<",), False)
            if is_reasoning:
                self._has_more = True
                self._put(Reasoning, text)
            elif recipient is None or not has_calls or text.strip():
                self._say(text)

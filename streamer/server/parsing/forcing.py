"""Forced calls: from a format and the tools of a request to the grammar of its answer.

The grammar of an answer after its reasoning, which is unknown to it; in Harmony, of all messages.
An answer that follows it is read by parser.py as the calls that were asked for, with arguments that
follow the tools' schemas. Service.shaped compiles what this makes,
in the prompt pool.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from streamer.constraints.lark import ANY, Lark, Marks, TooLong, quoted
from streamer.constraints.schemas import followable
from streamer.core.sampling import WHITESPACE, Grammar
from streamer.errors import InvalidRequest
from streamer.server.parsing.formats import HARMONY, Calls, ModelFormat
from streamer.server.parsing.schemas import Schema, malformed
from streamer.server.parsing.tagged import CannotFollow, Tagged
from streamer.server.parsing.tools import ToolDefinition

KIND: Final = "calls"  # of a Grammar that is made here
MAX_DEPTH: Final = 60  # brackets within brackets, of a schema
# CPU seconds of looking for the tools that can't be followed: 10 of 1,024 are found in 0.6 s, and
# of 300 large ones all in 1.9 s (EPYC Zen 5, busy, 2026-11-23).
MAX_SEARCH_S: Final = 2.0
GAP: Final = '"\\n"?'  # between the parts of a call: as the model's template has it or not
OBJECT: Final[Schema] = {"type": "object"}
# Keywords beside which `properties` may not be all of the names.
_MORE: Final = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties",
     "unevaluatedProperties")
)  # fmt: skip
# Before an answer in JSON whose first key is one of these a call would be read (call_fields.py).
_NO_CALL: Final = r'~/[ \t\r\n]*[\[{][\[{ \t\r\n]*"(name|type)"(?s:.*)/'


class Compiler(Protocol):
    """Compiles grammars for the model's tokens; InvalidRequest says what can't be honoured."""

    def compile(self, grammar: Grammar) -> object:
        """Compile it, to be used."""
        ...

    def check(self, grammar: Grammar) -> None:
        """Compile it, and forget it."""
        ...


class Rules(msgspec.Struct, frozen=True):
    """What an answer must be.

    tools         those that may be called
    is_required   it is calls; else also text, or `answer`
    max_calls     None: any number
    answer        JSON that may be instead of calls; None: any text
    loose         names of tools whose arguments are any object
    """

    tools: tuple[ToolDefinition, ...]
    is_required: bool
    max_calls: int | None = None
    answer: Grammar | None = None
    loose: frozenset[str] = frozenset()


def calls_grammar(form: ModelFormat, marks: Marks, rules: Rules) -> Grammar:
    """The grammar; InvalidRequest names the schema of a strict tool that can't be followed."""
    lark = Lark(marks)
    try:
        if isinstance(form.calls, Calls):
            start = _Tags(lark, form.calls, rules).start()
        else:
            start = _harmony(lark, rules)
        return Grammar(KIND, lark.text(start))
    except TooLong as error:
        raise InvalidRequest(
            f"the grammar of the calls can't be made: {error}", param="tools"
        ) from None


def compiled_calls(form: ModelFormat, marks: Marks, rules: Rules, grammars: Compiler) -> Grammar:
    """The grammar, compiled.

    Where that can't be done, the tools that can't be followed are found by halving: their arguments
    are any object. InvalidRequest names one that is strict, and tools that take too long to find.
    """

    end_s = time.thread_time() + MAX_SEARCH_S

    def refused(tools: Sequence[ToolDefinition]) -> set[str]:
        """Names of those that can't be followed."""
        if time.thread_time() > end_s:
            raise InvalidRequest(
                "tools: finding those whose arguments can't be followed takes more than "
                f"{MAX_SEARCH_S:g} s",
                param="tools",
                code="unsupported_grammar",
            )
        try:
            some = replace(rules, tools=tuple(tools), answer=None)
            grammars.check(calls_grammar(form, marks, some))
            return set()
        except InvalidRequest as reason:
            if len(tools) == 1 and tools[0].is_strict:
                _check_alone(tools[0], grammars)
                raise refused_by_compiler(tools[0], reason) from None
        if len(tools) == 1:
            return {tools[0].name}
        half = len(tools) // 2
        return refused(tools[:half]) | refused(tools[half:])

    try:
        grammar = calls_grammar(form, marks, rules)
        grammars.compile(grammar)
    except InvalidRequest:
        loose = refused(rules.tools)
        if not loose:
            raise
        grammar = calls_grammar(form, marks, replace(rules, loose=frozenset(loose)))
        grammars.compile(grammar)
    return grammar


class _Tags:
    """Calls between markers."""

    def __init__(self, lark: Lark, calls: Calls, rules: Rules) -> None:
        self._lark = lark
        self._calls = calls
        self._rules = rules
        self._any = ANY if not calls.is_bare else f"{ANY} & {_NO_CALL}"
        self._one = lark.rule(" | ".join(self._body(tool) for tool in rules.tools))

    def start(self) -> str:
        """The whole answer."""
        calls, rules, lark = self._calls, self._rules, self._lark
        if not rules.is_required and rules.answer is None:
            return self._text_or_calls()
        opening = "" if calls.is_bare else lark.written(calls.openings[0])
        found = self._group(opening)
        if rules.answer is not None and not rules.is_required:
            found = f"({found} | {_answer(lark, rules.answer)})"
        return found

    def _group(self, opening: str, *, is_call: bool = False) -> str:
        """Calls after an opening; `is_call`: it is that of the first call, in no section."""
        calls, lark, one = self._calls, self._lark, self._one
        if calls.is_list:
            more = self._more(f'", " {one}')
            return f'{opening} " "? "[" {one} {more} "]"'
        if calls.section is not None and not is_call:
            head = lark.written(calls.open)
            end = lark.written(calls.section[1])
            if calls.is_alone:
                whole = f"{GAP} {head} {one} {GAP} {end}"
                more = self._more(f"{GAP} {lark.written(calls.section[0])} {whole}")
                return f"{opening} {whole} {more}"
            more = self._more(f"{GAP} {head} {one}")
            return f"{opening} {GAP} {head} {one} {more} {GAP} {end}"
        if calls.is_bare:
            more = self._more(f'"; " {one}')
        else:
            more = self._more(f"{GAP} {lark.written(calls.open)} {one}")
        return f"{opening} {one} {more}"

    def _more(self, call: str) -> str:
        limit = self._rules.max_calls
        if limit == 1:
            return ""
        rule = self._lark.rule(call)
        return f"{rule}*" if limit is None else f"{rule}{{0,{limit - 1}}}"

    def _body(self, tool: ToolDefinition) -> str:
        """A call from its opening to its end."""
        calls, lark = self._calls, self._lark
        if calls.body == "parameters" and calls.parameters is not None:
            ends = lark.written(tool.name + "".join(calls.name_ends[:1]))
            schema = _schema_of(tool, self._rules)
            lark.spend(schema)
            tagged = Tagged(
                lark, calls.parameters, schema,
                is_strict=tool.is_strict and tool.name not in self._rules.loose,
                options=_options(is_strict=tool.is_strict),
            )  # fmt: skip
            try:
                written = tagged.written(GAP)
            except CannotFollow as error:
                raise _refused(tool, f"{error}, in this model's format of calls") from None
            return lark.rule(f"{ends} {GAP} {written} {lark.written(calls.close)}")
        arguments = _arguments(lark, tool, self._rules)
        end = "" if calls.is_list or calls.is_bare else lark.written(calls.close)
        if calls.body == "object" or calls.is_list:
            head = f'{{"name": {quoted(tool.name)}, "{calls.arguments}": '
            gap = "" if calls.is_list or calls.is_bare else GAP
            return lark.rule(f'{gap} {quoted(head)} {arguments} "}}" {end and gap} {end}')
        name, number = tool.name, ""
        if calls.names_id:
            name, number = f"functions.{name}:", "/[0-9]{1,4}/"
        after = lark.written(calls.name_ends[0])
        fence = f"{GAP} {lark.written(calls.fence)}" if calls.fence else ""
        return lark.rule(f"{quoted(name)} {number} {after} {GAP} {arguments} {fence} {GAP} {end}")

    def _text_or_calls(self) -> str:
        """Any text, in which an opening begins calls that follow the grammar."""
        lark, calls = self._lark, self._calls
        text = lark.terminal(self._any)
        pieces, triggers = [], []
        for i, opening in enumerate(calls.openings):
            parts = lark.marks.split(opening)
            first = next((n for n, part in enumerate(parts) if isinstance(part, int)), None)
            if first is None:
                head = lark.up_to(opening, self._any)
            else:
                triggers.append(parts[first])
                head = f"{text} {lark.marks.terms(parts[first:])}"
            is_call = calls.section is not None and i > 0
            pieces.append(lark.rule(self._group(head, is_call=is_call)))
        others = lark.marks.others([t for t in triggers if isinstance(t, int)])
        if others:
            pieces.append(lark.rule(f"{text} {others}"))
        found = f"({' | '.join(pieces)})* {text}"
        return f"{lark.rule(self._group(''))} | {found}" if calls.is_bare else found


def _harmony(lark: Lark, rules: Rules) -> str:
    """Messages with headers, of which the last is a call or the answer."""
    marks = HARMONY
    bans = (marks.start, *marks.ends)

    def message(channel: str) -> str:
        return lark.rule(
            f"{lark.written(marks.channel + channel + marks.message)} "
            f"{lark.until('<|end|>', bans=bans)} {lark.written(marks.start + 'assistant')}"
        )

    calls = [
        f"{lark.written(f'{marks.channel}commentary to=functions.{tool.name} ')} "
        f"{lark.written(f'<|constrain|>json{marks.message}')} "
        f"{_arguments(lark, tool, rules)} {lark.written('<|call|>')}"
        for tool in rules.tools
    ]
    last = lark.rule(" | ".join(map(lark.rule, calls)))
    if rules.is_required:
        return f"{message('analysis')}? {last}"
    final = lark.written(f"{marks.channel}final{marks.message}")
    said = lark.terminal(ANY) if rules.answer is None else _answer(lark, rules.answer)
    before = message("analysis")
    if rules.answer is None:
        before = f"({before} | {message('commentary')})"
    return f"{before}* ({last} | {final} {said})"


# ---------------------------------------------------------------- schemas of arguments


def _options(*, is_strict: bool) -> dict[str, Any]:
    """llguidance's: what a strict schema has is followed; of others, what can be."""
    return {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": not is_strict}}


def _arguments(lark: Lark, tool: ToolDefinition, rules: Rules) -> str:
    schema = _schema_of(tool, rules)
    return lark.json({**schema, **_options(is_strict=tool.is_strict)})


def _schema_of(tool: ToolDefinition, rules: Rules) -> Schema:
    """The schema of a tool's arguments, as an object of no more than what it names."""
    if tool.name in rules.loose:
        return OBJECT
    given = tool.parameters
    if (wrong := malformed(given)) is not None:
        raise _refused(tool, f"{wrong}: that is no JSON schema")
    given = followable(given)
    kinds = given.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise _refused(tool, "type: arguments are an object")
    check_depth(tool)
    schema = {**given, "type": "object"}
    if isinstance(given.get("properties"), Mapping) and not _MORE & given.keys():
        schema["additionalProperties"] = False
    return schema


def _answer(lark: Lark, answer: Grammar) -> str:
    """An answer in JSON; its schema has been compiled alone."""
    found = msgspec.json.decode(answer.text) if answer.kind == "json" else OBJECT
    if isinstance(found, bool):
        found = {} if found else {"enum": []}
    options: dict[str, Any] = {"whitespace_pattern": answer.whitespace}
    if not answer.whitespace:
        options = {"whitespace_flexible": False}
    return lark.json({**found, "x-guidance": options})


def check_depth(tool: ToolDefinition) -> None:
    """InvalidRequest for a schema that parsers which recurse should not see."""
    left: list[tuple[Any, int]] = [(tool.parameters, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, str):
            depth += max(map(value.count, "([{"))
        if depth > MAX_DEPTH:
            raise _refused(tool, f"it is nested more than {MAX_DEPTH} deep")
        inner: Collection[Any] = ()
        if isinstance(value, Mapping):
            inner = [v for k, v in value.items() if k not in ("description", "title", "default")
                     or not isinstance(v, str)]  # fmt: skip
        elif isinstance(value, list):
            inner = value
        left += [(each, depth + 1) for each in inner]


def _refused(tool: ToolDefinition, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{tool.path} can't be honoured: {reason}", param=tool.path, code="unsupported_grammar"
    )


def _check_alone(tool: ToolDefinition, grammars: Compiler) -> None:
    """Raise for a tool whose schema alone can't be followed, which names the keyword."""
    try:
        grammars.check(Grammar("json", msgspec.json.encode(tool.parameters).decode()))
    except InvalidRequest as reason:
        raise refused_by_compiler(tool, reason) from None


def refused_by_compiler(tool: ToolDefinition, error: InvalidRequest) -> InvalidRequest:
    """The error of a tool whose grammar could not be compiled."""
    return _refused(tool, error.message.partition("can't be honoured: ")[2] or error.message)

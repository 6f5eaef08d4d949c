"""Values of tagged parameters as grammars: text as it is, all else as JSON.

Of the formats that write a call's arguments one by one. What parser.py reads from a value, by the
same schema, follows that schema. Pure; forcing.py calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from streamer.constraints.lark import ANY, Lark, regex
from streamer.server.parsing.formats import Parameters
from streamer.server.parsing.schemas import Schema, as_json, inlined, is_text, malformed, types_of

NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "format", "type", "$comment", "$schema", "$id", "$defs", "definitions", "contentEncoding",
     "contentMediaType", "additionalProperties")
)  # fmt: skip
OBJECT: Final = NOTES | {"properties", "required", "patternProperties", "unevaluatedProperties"}
TEXT: Final = NOTES | {"minLength", "maxLength", "pattern"}
_NUMBER: Final = r"\s*-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*"
_NUMBERS: Final = {
    "integer": r"-?(0|[1-9][0-9]{0,15})",
    "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?",
}
_NAME: Final = re.compile(r"[^\x00-\x20<>\"]([^\x00-\x1f<>\"]{0,254}[^\x00-\x20<>\"])?")
_WORDS: Final = {"null": ("null",), "boolean": ("true", "false")}
_OPENS: Final = {"array": r"\s*\[(?s:.*)", "object": r"\s*\{(?s:.*)"}


class CannotFollow(Exception):
    """A schema that values of this form can't be made to follow; says the keyword."""


class Tagged:
    """Writes the parameters of one tool.

    root       the schema of its arguments
    is_strict  raise CannotFollow for what can't be followed; else it is left out
    options    of llguidance, for values in JSON
    """

    def __init__(
        self,
        lark: Lark,
        parameters: Parameters,
        root: Schema,
        *,
        is_strict: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._lark = lark
        self._form = parameters
        self._root = root
        self._is_strict = is_strict
        self._options = options
        self._line = "\n" if parameters.is_on_own_line else ""

    def written(self, gap: str) -> str:
        """All parameters in their order, with `gap` after each."""
        self._check(self._root, OBJECT)
        properties = self._root.get("properties") or {}
        required = self._root.get("required") or ()
        if missing := [name for name in required if name not in properties]:
            self._refuse(f"required: {missing[0]!r} is not in properties")
        parts = []
        for name, schema in properties.items():
            if not _NAME.fullmatch(name):
                self._refuse(f"properties: the name {name!r:.80}", is_always=name in required)
                continue
            rule = self._lark.rule(f"{self._parameter(name, inlined(schema, self._root))} {gap}")
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _parameter(self, name: str, schema: Any) -> str:
        begins, (first, second) = self._form.value[0], self._form.key
        key = f"{first}{name}{second}"
        if len(begins) > 1:
            text, other = (f"{key}{begin}" for begin in begins)
            texts, others = self._alternatives(schema, is_mixed=False)
            found = [f"{self._lark.written(text)} ({' | '.join(texts)})"] if texts else []
            if others:
                found.append(f"{self._lark.written(other)} ({' | '.join(others)})")
            return f"({' | '.join(found)})"
        texts, others = self._alternatives(schema, is_mixed=not is_text(schema))
        begin = self._lark.written(key + begins[0] + self._line) if begins == ("",) else (
            f"{self._lark.written(key)} \"\\n\"? {self._lark.written(begins[0])}"
        )  # fmt: skip
        return f"{begin} ({' | '.join(texts + others)})"

    def _alternatives(self, schema: Any, *, is_mixed: bool) -> tuple[list[str], list[str]]:
        """What a value may be, each with the end of the value: as text, and as JSON.

        is_mixed  text and JSON are told apart by what they look like, as schemas.as_json does
        """
        if schema is False:
            raise CannotFollow("properties: a value that is false")
        types = types_of(schema)
        found = _Parts()
        if isinstance(schema, Mapping) and types and "string" not in types:
            found.jsons.append(schema)
        else:
            self._collect(schema, found)
        close, lark = self._form.value[1], self._lark
        not_json = self._bans(types, found) if is_mixed else ""
        texts = [lark.until(close, f"({body}){not_json}", self._line) for body in found.texts]
        for text in found.fixed:
            if close in text or (is_mixed and as_json(text, schema) != _dumped(text)):
                self._refuse("enum")
                continue
            texts.append(lark.fixed(text, close, self._line))
        others = [lark.fixed(json.dumps(v), close, self._line) for v in found.values]
        for name in found.scalars:
            words = _WORDS.get(name)
            if words is not None:
                others += [lark.fixed(word, close, self._line) for word in words]
            else:
                others.append(lark.until(close, regex(_NUMBERS[name]), self._line))
        defs = {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}
        for each in found.jsons:
            value = lark.json({**self._options, **defs, **each})
            others.append(f"{value} {lark.fixed('', close, self._line)}")
        if not texts and not others:
            raise CannotFollow("enum")
        return texts, others

    def _collect(self, schema: Any, found: _Parts) -> None:
        if not isinstance(schema, Mapping):
            found.texts.append(ANY)
            return
        if (wrong := malformed(schema)) is not None:
            raise CannotFollow(f"{wrong}: that is no JSON schema")
        types, limits = _declared(schema), schema.keys() - NOTES
        if "const" in schema or "enum" in schema:
            self._check(schema, NOTES | {"const", "enum"})
            for value in [schema["const"]] if "const" in schema else schema["enum"]:
                (found.fixed if isinstance(value, str) else found.values).append(value)
            return
        for name in ("anyOf", "oneOf"):
            if name in schema:
                self._check(schema, NOTES | {name})
                for each in schema[name]:
                    self._collect(each, found)
                return
        if not types and not limits:
            found.texts.append(ANY)
        elif not types:
            found.jsons.append(schema)
        for name in types:
            if name == "string":
                found.texts.append(self._text(schema))
            elif name in _OPENS:
                found.jsons.append({**schema, "type": name})
            elif name in _NUMBERS and limits:
                found.limited.append({**schema, "type": name})
            else:
                found.scalars.append(name)

    def _bans(self, types: tuple[str, ...], found: _Parts) -> str:
        """What text must not look like: it would be read as another type, and against its limits.

        Limited numbers beside free text are left out: as text they would be read as numbers, too.
        """
        if not found.texts:
            found.jsons += found.limited
        if not types and found.texts == [ANY] and not (found.jsons or found.values):
            return ""  # anything at all
        bans = [_NUMBER] if found.limited or not types else []
        bans += [_OPENS[name] for name in _OPENS if name in types or not types]
        if not types:
            bans += [r"\s*(true|false|null|True|False|None)\s*", r"\s*\"(?s:.*)"]
        return "".join(f" & ~{regex(ban)}" for ban in bans)

    def _text(self, schema: Schema) -> str:
        self._check(schema, TEXT)
        low, high = schema.get("minLength"), schema.get("maxLength")
        parts = [ANY]
        if low is not None or high is not None:
            parts = [regex(f"(?s:.{{{low or 0},{'' if high is None else high}}})")]
        if "pattern" in schema:
            try:
                parts.append(regex(_searched(schema["pattern"])))
            except CannotFollow as error:
                self._refuse(str(error))
        return " & ".join(parts)

    def _check(self, schema: Schema, known: frozenset[str]) -> None:
        if unknown := schema.keys() - known:
            self._refuse(min(unknown))

    def _refuse(self, what: str, *, is_always: bool = False) -> None:
        if self._is_strict or is_always:
            raise CannotFollow(what)


class _Parts:
    """Ways to write a value: texts by expression, fixed ones, and what is no text."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.fixed: list[str] = []
        self.values: list[Any] = []
        self.scalars: list[str] = []
        self.limited: list[Schema] = []  # numbers
        self.jsons: list[Schema] = []


def _declared(schema: Schema) -> list[str]:
    given = schema.get("type")
    return [given] if isinstance(given, str) else [t for t in given or () if isinstance(t, str)]


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _searched(pattern: str) -> str:
    """A pattern that may stand anywhere in the text, as one of the whole text."""
    begins, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    body = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in re.sub(r"\\.|\[[^\]]*\]|\((?:[^()\\]|\\.)*\)", "", body):
        raise CannotFollow("pattern: an anchor of one alternative")
    before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{before}(?:{body}){after}"

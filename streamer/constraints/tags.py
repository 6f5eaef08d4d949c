"""Structural tags: text that is free up to a trigger, and what must follow it, as a Lark grammar.

Both forms of vLLM's and SGLang's `structural_tag`: `structures` with `triggers`, and `format` as
XGrammar describes it. Where a text is the name of a special token, that token is meant. Pure;
called by grammars.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from streamer.constraints.lark import ANY, Lark, Marks

MAX_TAGS: Final = 1024


class BadTag(ValueError):
    """What is wrong, with its place."""


class Tags:
    """One structural tag, on its way to Lark.

    special    special token id -> its text
    schema_of  a JSON schema as text that Lark's %json takes
    """

    def __init__(self, special: Mapping[int, bytes], schema_of: Callable[[Any], str]) -> None:
        self._special = special
        self._schema_of = schema_of
        self._lark = Lark(Marks(special, ()))
        self._text = self._lark.terminal(ANY)
        self._num_tags = 0

    def lark(self, given: Any) -> str:
        """The whole grammar; BadTag for what is malformed or not supported."""
        if not isinstance(given, dict):
            raise BadTag("a structural tag is an object")
        if "format" in given:
            start = self._format(given["format"], "format", is_last=True)
        else:
            start = self._triggered(_of_structures(given), "structures", is_last=True)
        return self._lark.text(start)

    def _format(self, given: Any, path: str, *, is_last: bool = False) -> str:
        """The expression of a format; `is_last`: the answer ends after it."""
        kind = _field(given, "type", str, path)
        if kind == "const_string":
            return self._literal(_field(given, "value", str, path))
        if kind == "json_schema":
            schema = _field(given, "json_schema", (dict, bool), path)
            if isinstance(schema, dict):
                self._lark.spend(schema)
            return self._lark.rule(f"%json {self._schema_of(schema)}")
        if kind == "regex":
            return self._lark.expression(_field(given, "pattern", str, path))
        if kind == "any_text" and is_last:
            return self._text
        if kind == "any_text":
            raise BadTag(f"{path}: any_text is possible at the end, or as the content of a tag")
        if kind in ("sequence", "or"):
            elements = _field(given, "elements", list, path)
            ends = [is_last and (kind == "or" or e is elements[-1]) for e in elements]
            parts = [
                self._format(each, f"{path}.elements[{i}]", is_last=ends[i])
                for i, each in enumerate(elements)
            ]
            if not parts:
                raise BadTag(f"{path}.elements is empty")
            return self._lark.rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._lark.rule(self._tag(given, path))
        if kind == "triggered_tags":
            return self._triggered(given, path, is_last=is_last)
        if kind == "tags_with_separator":
            return self._separated(given, path)
        raise BadTag(f"{path}.type: {kind!r:.40} is not supported")

    def _tag(self, given: Any, path: str, trigger: str = "") -> str:
        """A tag after its trigger."""
        self._num_tags += 1
        if self._num_tags > MAX_TAGS:
            raise BadTag(f"there are more than {MAX_TAGS} tags")
        begin, ends = _field(given, "begin", str, path), _ends(given, path)
        content = _field(given, "content", dict, path)
        first = self._literal(begin[len(trigger) :])
        if content.get("type") == "any_text":
            return f"{first} {self._lark.rule(' | '.join(map(self._lark.up_to, ends)))}"
        inner = self._format(content, f"{path}.content")
        return f"{first} {inner} {self._lark.rule(' | '.join(map(self._literal, ends)))}"

    def _triggered(self, given: Any, path: str, *, is_last: bool) -> str:
        if not is_last:
            raise BadTag(f"{path}: triggered_tags are possible at the end only")
        if given.get("excludes"):
            raise BadTag(f"{path}.excludes is not supported")
        tags = _field(given, "tags", list, path)
        trigger_of = _Triggers(_field(given, "triggers", list, path)).of
        grouped: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            place = f"{path}.tags[{i}]"
            found = trigger_of(_field(tag, "begin", str, place))
            if found is None:
                raise BadTag(f"{place}.begin does not begin with one of the triggers")
            trigger = self._short(found)
            grouped.setdefault(trigger, []).append(self._tag(tag, place, trigger))
        if not grouped:
            raise BadTag(f"{path}.tags is empty")
        lark = self._lark
        rests = {trigger: lark.rule(" | ".join(each)) for trigger, each in grouped.items()}
        later = lark.rule(" | ".join(f"{lark.up_to(t)} {rest}" for t, rest in rests.items()))
        is_single = given.get("stop_after_first") is True
        if given.get("at_least_one") is not True:
            return f"({later} | {self._text})" if is_single else f"{later}* {self._text}"
        first = lark.rule(" | ".join(f"{self._literal(t)} {rest}" for t, rest in rests.items()))
        return first if is_single else f"{first} {later}* {self._text}"

    def _separated(self, given: Any, path: str) -> str:
        tags = _field(given, "tags", list, path)
        separator = self._literal(_field(given, "separator", str, path))
        parts = [self._tag(tag, f"{path}.tags[{i}]") for i, tag in enumerate(tags)]
        if not parts:
            raise BadTag(f"{path}.tags is empty")
        tag = self._lark.rule(" | ".join(parts))
        found = tag if given.get("stop_after_first") is True else f"{tag} ({separator} {tag})*"
        return self._lark.rule(found if given.get("at_least_one") is True else f"({found})?")

    def _short(self, trigger: str) -> str:
        """A trigger as free text can end with it: a special token alone is one."""
        first = next(iter(self._lark.marks.split(trigger)), "")
        return trigger if isinstance(first, str) else self._special[first].decode(errors="replace")

    def _literal(self, text: str) -> str:
        return self._lark.written(text) or '""'


class _Triggers:
    """Finds the first trigger that a text begins with: by the lengths that triggers have."""

    def __init__(self, given: Sequence[Any]) -> None:
        texts = [text for text in given if isinstance(text, str) and text]
        self._places = {text: place for place, text in reversed([*enumerate(texts)])}
        self._lengths = sorted({len(text) for text in texts})

    def of(self, begin: str) -> str | None:
        lengths = (length for length in self._lengths if length <= len(begin))
        found = (begin[:length] for length in lengths if begin[:length] in self._places)
        return min(found, key=self._places.__getitem__, default=None)


def _of_structures(given: Mapping[str, Any]) -> dict[str, Any]:
    """The older form in terms of the newer one."""
    structures = _field(given, "structures", list, "")
    tags = [
        {
            "begin": _field(each, "begin", str, f"structures[{i}]"),
            "content": {
                "type": "json_schema",
                "json_schema": _field(each, "schema", (dict, bool), f"structures[{i}]"),
            },
            "end": _field(each, "end", str, f"structures[{i}]"),
        }
        for i, each in enumerate(structures)
    ]
    return {"triggers": _field(given, "triggers", list, ""), "tags": tags}


def _ends(given: Mapping[str, Any], path: str) -> Sequence[str]:
    end = _field(given, "end", (str, list), path)
    ends = [end] if isinstance(end, str) else end
    if not ends or not all(isinstance(each, str) for each in ends):
        raise BadTag(f"{path}.end is a text, or a list of texts")
    return ends


def _field(given: Any, name: str, kind: type | tuple[type, ...], path: str) -> Any:
    if not isinstance(given, dict):
        raise BadTag(f"{path} is an object")
    found, where = given.get(name), f"{path}.{name}".lstrip(".")
    if not isinstance(found, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        what = " or ".join(_KINDS[each] for each in kinds)
        raise BadTag(f"{where} is {what}" if name in given else f"{where} is required")
    return found


_KINDS: Final = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}

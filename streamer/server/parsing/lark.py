"""Lark: the text of a grammar of llguidance, written rule by rule.

Markers of a format become special tokens where the model's tokenizer has them as such, else text.
Pure; forcing.py and tagged.py write with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

ANY: Final = "/(?s:.*)/"
GAP: Final = '"\\n"?'  # between the parts of a call: as the model's template has it or not

encode = msgspec.json.Encoder().encode


def quoted(text: str) -> str:
    """A literal."""
    return encode(text).decode()


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    escaped = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", "\\n").replace("\r", "\\r")


def without(markers: Sequence[str]) -> str:
    """What to add to a terminal in whose text none of these may be."""
    return "".join(f" & ~({ANY} {quoted(marker)} {ANY})" for marker in markers)


class Marks:
    """The special tokens by which a tokenizer writes a format's markers.

    special  id -> bytes of each;  ends  of them, those that end an answer: they are never written
    """

    def __init__(self, special: Mapping[int, bytes], ends: Collection[int]) -> None:
        self._ids = {text.decode(errors="replace"): i for i, text in special.items() if text}
        self._ends = frozenset(ends)

    def split(self, text: str) -> list[str | int]:
        """Text and ids of special tokens."""
        names = sorted((name for name in self._ids if name in text), key=len, reverse=True)
        if not names:
            return [text] if text else []
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
        return [self._ids.get(part, part) for part in parts if part]

    def others(self, ids: Collection[int]) -> str:
        """All special tokens but these and the ends, as one term; empty: there are none."""
        left = sorted(set(self._ids.values()) - self._ends - set(ids))
        return f"<[{','.join(map(str, left))}]>" if left else ""

    def terms(self, parts: Sequence[str | int]) -> str:
        """The parts as terms of a rule."""
        return " ".join(
            quoted(part) if isinstance(part, str) else f"<[{part}]>"
            for part in parts
            if part not in self._ends
        )


class Lark:
    """Rules and terminals of one grammar; equal ones are written once."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(f": {body}", f"r{len(self._names)}")

    def lazy(self, body: str) -> str:
        """The name of a rule that ends as soon as it can."""
        return self._names.setdefault(f"[lazy]: {body}", f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""
        return self._names.setdefault(f": ({body})", f"T{len(self._names)}")

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON of this schema."""
        return self.rule(f"%json {encode(schema).decode()}")

    def written(self, text: str) -> str:
        """A text of the format, special tokens among it."""
        return self.marks.terms(self.marks.split(text))

    def until(
        self, marker: str, body: str = ANY, before: str = "", bans: Sequence[str] = ()
    ) -> str:
        """A text of `body` up to a marker, and the marker; neither it nor `bans` are in the text.

        before  stands before the marker
        """
        head, rest = self._head(marker)
        end = f" {quoted(before + head)}" if before + head else ""
        return f"{self.terminal(f'({body}{without((marker, *bans))}){end}')} {rest}"

    def fixed(self, text: str, marker: str, before: str = "") -> str:
        """This text, in which no special token is meant, and a marker."""
        head, rest = self._head(marker)
        return f"{quoted(text + before + head)} {rest}"

    def _head(self, marker: str) -> tuple[str, str]:
        """A marker as the text that it begins with, and the terms after that."""
        parts = self.marks.split(marker)
        head = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        return str(head), self.marks.terms(parts)

    def text(self, start: str) -> str:
        """The grammar."""
        lines = (name + body for body, name in self._names.items())
        return "\n".join((f"start: {start}", *lines, ""))

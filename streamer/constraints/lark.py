"""Lark: the text of a grammar of llguidance, written rule by rule.

Texts that the model's tokenizer has as special tokens become these, all else text. Pure; tags.py
writes with it, and so does the server, which makes grammars of tool calls (parsing/forcing.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from streamer.constraints.bounds import (
    MAX_REMAINDERS,
    TOO_DIVIDED,
    TOO_LONG,
    expressions,
    remainders,
    share,
    too_costly,
)
from streamer.constraints.schemas import followable

ANY: Final = "/(?s:.*)/"
MAX_BYTES: Final = 1 << 20  # of a grammar

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
    """The special tokens of a tokenizer, by which it writes a format's markers.

    special  id -> bytes of each;  ends  of them, those that end an answer: they are never written
    """

    def __init__(self, special: Mapping[int, bytes], ends: Collection[int]) -> None:
        self._ids = {text.decode(errors="replace"): i for i, text in special.items() if text}
        self._ends = frozenset(ends)
        names = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")

    def split(self, text: str) -> list[str | int]:
        """Text and ids of special tokens."""
        return [self._ids.get(part, part) for part in self._names.split(text) if part]

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


class TooLong(Exception):
    """A grammar can't be compiled; raised while it is written: its text could be of GB."""


class Lark:
    """Rules and terminals of one grammar; equal ones are written once."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._names: dict[str, str] = {}
        self._num_bytes = 0
        self._remainders = 0
        self._expressions = set[str]()
        self._share = 0.0  # of what regular expressions may take

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._named(f": {body}", "r")

    def lazy(self, body: str) -> str:
        """The name of a rule that ends as soon as it can."""
        return self._named(f"[lazy]: {body}", "r")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""
        return self._named(f": ({body})", "T")

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON of this schema; TooLong if that costs too much."""
        self.spend(schema)
        return self.rule(f"%json {encode(followable(schema)).decode()}")

    def expression(self, pattern: str) -> str:
        """The name of a terminal for a caller's regular expression; TooLong as in `json`."""
        self._count({pattern})
        return self.terminal(regex(pattern))

    def spend(self, schema: Mapping[str, Any]) -> None:
        """Count what a schema takes to compile; TooLong if it is too much with the others'."""
        if (why := too_costly(schema)) is not None:
            raise TooLong(why)
        self._remainders += remainders(schema)
        if self._remainders > MAX_REMAINDERS:
            raise TooLong(TOO_DIVIDED)
        self._count(expressions(schema))

    def _count(self, found: set[str]) -> None:
        """Count regular expressions, equal ones once."""
        self._share += share(found - self._expressions)
        self._expressions |= found
        if self._share > 1:
            raise TooLong(TOO_LONG)

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

    def up_to(self, marker: str, body: str = ANY) -> str:
        """A text of `body` that ends with the first place of a marker, with the marker."""
        head, rest = self._head(marker)
        text = self.terminal(f"{body} {quoted(head)}" if head else body)
        return f"{self.lazy(text) if head else text} {rest}"

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
        text = "\n".join((f"start: {start}", *lines, ""))
        if len(text) > MAX_BYTES:
            raise TooLong(f"it has more than {MAX_BYTES} characters")
        return text

    def _named(self, body: str, prefix: str) -> str:
        if body not in self._names:
            self._num_bytes += len(body)
            if self._num_bytes > MAX_BYTES:
                raise TooLong(f"it has more than {MAX_BYTES} characters")
            self._names[body] = f"{prefix}{len(self._names)}"
        return self._names[body]

"""Source: a text that arrives in pieces, read character by character by generators.

A reader that needs a character which is not there yet yields; so it cannot see where the text was
cut. Owned by one Parser. Also reads JSON, as models write it, while it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], Any]

MAX_DEPTH: Final = 128
MAX_LITERAL: Final = 400  # characters of a number
SPACES = re.compile(r"[ \t\r\n]+")
CLOSES: Final = {"{": "}", "[": "]"}
PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_IN_LITERAL = re.compile(r"[A-Za-z0-9+.-]")
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class Broken(Exception):
    """The text is not what the format says; never leaves the room."""


class Source:
    """The text from the mark on, or from the place of reading.

    at       place of the next character
    mark     place to which reading may return; None: nowhere
    is_over  nothing more comes
    """

    __slots__ = ("at", "is_over", "mark", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        self.is_over = False

    def add(self, text: str) -> None:
        """More of the text; what can't be read again is dropped."""
        kept = self.at if self.mark is None else self.mark
        self.text = self.text[kept:] + text
        self.at -= kept
        if self.mark is not None:
            self.mark = 0

    def peek(self) -> Reading[str]:
        """The next character, which stays; "" at the end."""
        while self.at == len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.at]

    def marker(self, markers: Sequence[str]) -> Reading[str | None]:
        """Pass over the marker that comes next and return it; None if there is none.

        No marker is the beginning of another.
        """
        left, length = markers, 0
        while True:
            while self.at + length == len(self.text):
                if self.is_over:
                    return None
                yield
            char = self.text[self.at + length]
            left = [m for m in left if m[length] == char]
            length += 1
            if not left:
                return None
            for found in left:
                if len(found) == length:
                    self.at += length
                    return found

    def run(self, pattern: re.Pattern[str]) -> str:
        """Pass over what is there already of a run of the pattern."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def spaces(self, emit: Emit | None = None) -> Reading[None]:
        """Pass over white space."""
        while (char := (yield from self.peek())) and char in " \t\r\n":
            found = self.run(SPACES)
            if emit is not None:
                emit(found)

    # ------------------------------------------------------------ JSON

    def value(self, emit: Emit) -> Reading[None]:
        """Pass over a JSON value, emitting it as it comes.

        What models often write wrong is mended: control characters and unknown escapes in strings,
        Python's names of literals. Raises Broken where it is no JSON.
        """
        stack: list[str] = []
        while True:
            yield from self.spaces(emit)
            char = yield from self.peek()
            if char in CLOSES:
                if len(stack) == MAX_DEPTH:
                    raise Broken
                stack.append(char)
                self._pass(char, emit)
                yield from self.spaces(emit)
                if (yield from self.peek()) != CLOSES[char]:
                    if char == "{":
                        yield from self._key(emit)
                    continue
            elif char == '"':
                yield from self.string(emit)
            else:
                yield from self._literal(emit)
            while stack:
                yield from self.spaces(emit)
                char = yield from self.peek()
                if char == CLOSES[stack[-1]]:
                    self._pass(char, emit)
                    stack.pop()
                elif char == ",":
                    self._pass(char, emit)
                    if stack[-1] == "{":
                        yield from self.spaces(emit)
                        yield from self._key(emit)
                    break
                else:
                    raise Broken
            else:
                return

    def string(self, emit: Emit) -> Reading[None]:
        """Pass over a JSON string with its quotes."""
        if (yield from self.peek()) != '"':
            raise Broken
        self._pass('"', emit)
        while True:
            char = yield from self.peek()
            if char == '"':
                self._pass(char, emit)
                return
            if not char:
                raise Broken
            if char == "\\":
                yield from self._escape(emit)
            elif char < " ":
                self.at += 1
                emit(json.dumps(char)[1:-1])
            else:
                emit(self.run(_IN_STRING))

    def _escape(self, emit: Emit) -> Reading[None]:
        self.at += 1
        char = yield from self.peek()
        if not char:
            raise Broken
        if char == "u":
            self.at += 1
            digits = ""
            while len(digits) < 4 and (yield from self.peek()) in _HEX:
                digits += self.text[self.at]
                self.at += 1
            emit(f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}")
        elif char in '"\\/bfnrt':
            self._pass(char, lambda c: emit("\\" + c))
        else:
            emit("\\\\")

    def _key(self, emit: Emit) -> Reading[None]:
        yield from self.string(emit)
        yield from self.spaces(emit)
        if (yield from self.peek()) != ":":
            raise Broken
        self._pass(":", emit)

    def _literal(self, emit: Emit) -> Reading[None]:
        found = ""
        while _IN_LITERAL.match((yield from self.peek())):
            found += self.text[self.at]
            self.at += 1
            if len(found) > MAX_LITERAL:
                raise Broken
        found = PYTHON.get(found, found)
        if not _LITERAL.fullmatch(found):
            raise Broken
        emit(found)

    def _pass(self, char: str, emit: Emit) -> None:
        self.at += 1
        emit(char)

"""Reasoning: where an answer stands between the beginning of its reasoning and its own text.

Owns Place, which follows an answer token by token; its text alone decides. Called by masks.py for
rows whose grammar begins after the reasoning or that may not reason for longer than a budget, and
by the engine's streams, which count the tokens of reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Final, Literal

from streamer.core.plan import Reasoning

Stage = Literal["opening", "reasoning", "spaces", "answer"]
TextOf = Callable[[int], bytes]

MAX_SPACES: Final = 4  # bytes of white space that a grammar does not have, before its text
_STAGES: Final[dict[str, Stage]] = {"before": "opening", "inside": "reasoning", "after": "answer"}


class Place:
    """Where an answer is after the tokens that it followed.

    stage       opening: it may begin its reasoning next; spaces: the reasoning has just ended
    num_tokens  tokens of reasoning, without those of the texts around it
    """

    __slots__ = (
        "_budget", "_closing", "_ends", "_held", "_num_forced", "_opens", "_sizes", "_tail",
        "_text_of", "num_tokens", "spaces_left", "stage",
    )  # fmt: skip

    def __init__(self, marks: Reasoning, text_of: TextOf, budget: int | None = None) -> None:
        """`text_of` has the bytes of every token, special ones too."""
        self.stage: Stage = _STAGES[marks.stage]
        self.num_tokens = 0
        self.spaces_left = MAX_SPACES  # bytes of white space that may stand before the answer
        self._text_of = text_of
        self._opens = marks.opens.encode()
        self._ends = tuple(end.encode() for end in marks.ends)
        self._closing = marks.closing
        self._budget = budget
        self._num_forced = 0  # of `closing`
        self._held: list[int] = []  # tokens of the opening, or of the answer if it is none
        self._tail = b""  # text that may be the beginning of a mark
        self._sizes: list[int] = []  # bytes of the newest tokens of reasoning

    def copy(self) -> Place:
        """Another one at the same place."""
        other = copy(self)
        other._held, other._sizes = self._held[:], self._sizes[:]
        return other

    @property
    def held(self) -> list[int]:
        """Tokens that are the answer's if the reasoning does not begin with them."""
        return self._held

    @property
    def opening(self) -> bytes:
        """What is missing of the text that begins the reasoning; empty: none may begin."""
        return self._opens[len(self._tail) :] if self.stage == "opening" else b""

    @property
    def forced(self) -> int | None:
        """The token that must come next, where the budget is used up."""
        if self.stage != "reasoning" or self._budget is None or self.num_tokens < self._budget:
            return None
        return self._closing[self._num_forced]

    @property
    def closing(self) -> tuple[int, ...]:
        """All tokens that must come next."""
        return () if self.forced is None else self._closing[self._num_forced :]

    def crossing(self, tokens: Iterable[int]) -> list[int]:
        """Those of the tokens that would end the reasoning and begin the answer."""
        texts = [(token, self._tail + self._text_of(token)) for token in tokens]
        return [t for t, text in texts if (mark := self._mark(text)) and text[mark[1] :].strip()]

    def follow(self, token: int, is_answer: Callable[[int], object] | None = None) -> list[int]:
        """Take the answer's next token; returns the tokens of its own text that are new.

        is_answer  whether a token of white space after the reasoning is of the answer's text
        """
        if self.stage == "answer":
            return [token]
        text = self._text_of(token)
        if self.stage == "opening":
            return self._open(token, text)
        if self.stage == "reasoning":
            self._reason(text)
            return []
        is_space = not text.strip() and len(text) <= self.spaces_left
        if is_space and not (is_answer is not None and is_answer(token)):
            self.spaces_left -= len(text)
            return []
        self.stage = "answer"
        return [token]

    def pass_over(self, tokens: Iterable[int]) -> None:
        """Follow these as far as the reasoning goes."""
        for token in tokens:
            if self.stage in ("spaces", "answer"):
                break
            self.follow(token)

    def _open(self, token: int, text: bytes) -> list[int]:
        held, self._held = [*self._held, token], []
        found = (self._tail + text).lstrip()
        if found.startswith(self._opens):
            self.stage, self._tail = "reasoning", b""
            self._read(found[len(self._opens) :])
        elif self._opens.startswith(found):
            self._tail, self._held = found, held
        else:
            self.stage = "answer"
            return held
        return []

    def _reason(self, text: bytes) -> None:
        if self.forced is not None:
            self._num_forced += 1
            self._read(text)
            if self._num_forced == len(self._closing):
                self.stage = "spaces"
            return
        self.num_tokens += 1
        self._sizes = [*self._sizes, len(text)][-self._longest :]
        mark_size = self._read(text)
        while mark_size > 0 and self._sizes:  # the mark is no reasoning
            mark_size -= self._sizes.pop()
            self.num_tokens -= 1

    def _read(self, text: bytes) -> int:
        """More of the reasoning's text; returns the bytes from its end mark on, 0 if none came."""
        text = self._tail + text
        mark = self._mark(text)
        if mark is None:
            self._tail = text[1 - self._longest :] if self._longest > 1 else b""
            return 0
        self.stage = "spaces"
        return len(text) - mark[0]

    def _mark(self, text: bytes) -> tuple[int, int] | None:
        """Begin and end of the first mark in the text."""
        places = ((text.find(end), len(end)) for end in self._ends)
        found = [(begin + size, begin) for begin, size in places if begin >= 0]
        return min(found)[::-1] if found else None

    @property
    def _longest(self) -> int:
        return max(map(len, self._ends))

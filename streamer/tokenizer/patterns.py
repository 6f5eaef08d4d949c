"""Patterns: regular expressions of a checkpoint's files, bounded in size and in time.

They may be hostile, and honest ones may take hours for a text of a model's choice. Pure; called
where such a file is read, and for each answer that is read by them.
"""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

MAX_PATTERN: Final = 1000  # characters
MAX_REPEATS: Final = 1000  # of all its counts, multiplied: compiled, they are written out


def fault(text: str) -> str | None:
    """Why this is no pattern to be used; None: it may be."""
    if len(text) > MAX_PATTERN:
        return f"has more than {MAX_PATTERN} characters"
    counts = re.findall(r"\d+", " ".join(re.findall(r"\{([\d, ]*)\}", text)))
    if math.prod(max(1, int(count[:9])) for count in counts) > MAX_REPEATS:
        return f"repeats more than {MAX_REPEATS} times"
    return None


class Clock:
    """The CPU seconds that matching may still take in one answer: more with every piece of it."""

    def __init__(self, at_once_s: float, piece_s: float) -> None:
        self._left_s = self._at_once_s = at_once_s
        self._piece_s = piece_s

    def more(self) -> None:
        """Another piece has come."""
        self._left_s = min(self._at_once_s, self._left_s + self._piece_s)

    def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do this with what is left as its `timeout`, and take its time from it; TimeoutError: the
        time is used up.

        The package `regex`, whose argument that is, counts the CPU time of all threads of the
        process: beside busy ones it ends a match earlier. A collection of all garbage, 0.1 s a
        million objects (EPYC Zen 4, 2026-11-26), is no pattern's: time with one does not count,
        and what ended with one is done once more.
        """
        for is_again in (False, True):
            if self._left_s <= 0:
                raise TimeoutError
            before, began_s = _num_collections(), time.thread_time()
            try:
                return work(*args, timeout=max(self._left_s, 0.001), **kwargs)
            except TimeoutError:
                if is_again or _num_collections() == before:
                    raise
            finally:
                if is_again or _num_collections() == before:
                    self._left_s -= time.thread_time() - began_s
        raise AssertionError("the second time returns or raises")


def _num_collections() -> int:
    """Of all garbage, by now."""
    return int(gc.get_stats()[-1]["collections"])


class TimedPattern:
    """A compiled pattern of the package `regex` whose matches take their time from a clock.

    They raise TimeoutError where that is used up.
    """

    def __init__(self, pattern: Any, clock: Clock) -> None:
        self._pattern = pattern
        self._clock = clock

    def search(self, text: str, start: int = 0, partial: bool = False) -> Any:
        """The first match from a place on, or None."""
        return self._clock.run(self._pattern.search, text, start, partial=partial)

    def match(self, text: str, start: int = 0) -> Any:
        """The match that begins at a place, or None."""
        return self._clock.run(self._pattern.match, text, start)

    def all(self, text: str) -> list[Any]:
        """All matches."""
        return self._clock.run(lambda *at, **how: list(self._pattern.finditer(*at, **how)), text)

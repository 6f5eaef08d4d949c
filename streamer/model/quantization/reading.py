"""Typed reads from quantization_config, with errors that name the field.

Pure functions on parsed JSON, beside Fields; called by schemes.py and compressed.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import regex

from streamer.errors import ModelNotSupported
from streamer.model.fields import MAX_SIZE, Fields
from streamer.model.quantization.interface import held_group
from streamer.model.quantization.scaled import Grid
from streamer.tokenizer.patterns import Clock, TimedPattern, fault

# Of a checkpoint; honest ones have some hundred. 300, compiled and matched with the names of 128
# layers, take 1 s of an EPYC Zen 4 (2026-11-26).
MAX_PATTERNS = 4096
MAX_MATCHING_S = 10.0  # of CPU time, for all of them and all names
PLAIN = re.compile(r"[\w.-]*")
MAX_NAMES = 1 << 18  # characters of a list


def refused(field: str, value: Any, expected: str) -> ModelNotSupported:
    """The error for a field's value."""
    return ModelNotSupported(
        f"quantization_config: {field} must be {expected}, the checkpoint says {str(value)[:100]}",
        param=field,
    )


def fields(given: dict[str, Any]) -> Fields:
    """Typed reads of the object."""
    return Fields(given, "quantization_config")


def names(value: Any, field: str) -> list[str]:
    """A list of strings, however nested; null is empty."""
    found: list[str] = []
    left: list[Any] = [] if value is None else [value if isinstance(value, list) else None]
    num_characters = 0
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += reversed(item)
        elif isinstance(item, str):
            found.append(item)
            num_characters += len(item) + 1
        else:
            raise refused(field, value, "a list of strings")
    if num_characters > MAX_NAMES:
        raise refused(field, f"{num_characters} characters", f"at most {MAX_NAMES}")
    return found


def _compiled(text: str, timeout: float) -> Any:
    del timeout  # compiling has none
    re.compile(text)  # what that of the package knows beyond is no pattern of transformers
    return regex.compile(text)


class Pattern:
    """One of Patterns, on whose clock it is compiled and matched."""

    def __init__(self, text: str, field: str, clock: Clock) -> None:
        self._text = text
        self._field = field
        if (wrong := fault(text)) is not None:
            raise self._wrong(wrong)
        try:
            self._compiled = TimedPattern(clock.run(_compiled, text), clock)
        except TimeoutError as e:
            raise self._late() from e
        except (re.error, regex.error, RecursionError, OverflowError) as e:
            raise self._wrong(f"is no pattern: {e}") from e

    def matches(self, name: str) -> bool:
        """Whether a name begins so."""
        try:
            return self._compiled.match(name) is not None
        except TimeoutError as e:
            raise self._late() from e

    def _late(self) -> ModelNotSupported:
        return self._wrong(f"takes more than {MAX_MATCHING_S:g} s, with those before it")

    def _wrong(self, why: str) -> ModelNotSupported:
        text = f"quantization_config: {self._field} {self._text[:100]!r} {why}"
        return ModelNotSupported(text, param=self._field)


class Patterns:
    """The regular expressions of a config.json. One may take hours for one name, and thousands take
    long together: there are at most MAX_PATTERNS, and all that is asked of them takes at most
    MAX_MATCHING_S, or ModelNotSupported says so."""

    def __init__(self) -> None:
        self._num_patterns = 0
        self._clock = Clock(MAX_MATCHING_S, 0.0)

    def compiled(self, texts: list[str], field: str) -> list[Pattern]:
        """Those of a field, beside the ones before."""
        self._num_patterns += len(texts)
        if self._num_patterns > MAX_PATTERNS:
            raise refused(field, f"{self._num_patterns} patterns", f"at most {MAX_PATTERNS}")
        return [Pattern(text, field, self._clock) for text in texts]


def is_plain(text: str) -> bool:
    """Whether a pattern can be looked up as a name: its dots, which stand for any character, are
    taken for the dots that they are meant as. Thousands of names are no slower than one."""
    return PLAIN.fullmatch(text) is not None


def begins(module: str) -> Iterator[str]:
    """What a module's name begins with up to each dot, with and without that; and itself."""
    for at, character in enumerate(f"{module}."):
        if character == ".":
            yield module[:at]
            yield module[: at + 1]


def ends(module: str, by: str = "") -> Iterator[str]:
    """What a module's name ends with; with `by`, after each of those."""
    for at in range(len(module) + 1):
        if module.endswith(by, 0, at):
            yield module[at:]


def group_size(value: Any, field: str = "group_size") -> int:
    """Columns of a scale: -1 (all), or a multiple of 16."""
    if isinstance(value, bool) or not isinstance(value, int) or value > MAX_SIZE:
        raise refused(field, value, f"an integer, at most {MAX_SIZE}")
    if value != -1:
        held_group(value, 1 << 30, field)
    return value


def block(value: Any, field: str) -> Grid:
    """Rows and columns of a scale, [128, 128]."""
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or any(isinstance(s, bool) or not isinstance(s, int) for s in sizes):
        raise refused(field, value, "a list of two integers")
    if not 1 <= sizes[0] <= MAX_SIZE:
        raise refused(field, value, f"positive, at most {MAX_SIZE}")
    return Grid(sizes[0], group_size(sizes[1], field))

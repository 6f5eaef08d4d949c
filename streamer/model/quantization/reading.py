"""Typed reads from quantization_config, with errors that name the field.

Pure functions on parsed JSON, beside Fields; called by schemes.py and compressed.py.
"""

from __future__ import annotations

import re
import time
from typing import Any

import regex

from streamer.errors import ModelNotSupported
from streamer.model.fields import Fields
from streamer.model.quantization.interface import held_group
from streamer.model.quantization.scaled import Grid
from streamer.tokenizer.patterns import fault

MAX_MATCHING_S = 0.5  # of a pattern and all names
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


class Pattern:
    """A regular expression of config.json. Some take hours for one name: all that is asked of it
    takes at most MAX_MATCHING_S, or ModelNotSupported says so."""

    def __init__(self, text: str, field: str) -> None:
        self._text = text
        self._field = field
        self._left_s = MAX_MATCHING_S
        if (wrong := fault(text)) is not None:
            raise self._wrong(wrong)
        try:
            re.compile(text)  # what that of the package knows beyond is no pattern of transformers
            self._compiled = regex.compile(text)
        except (re.error, regex.error, RecursionError, OverflowError) as e:
            raise self._wrong(f"is no pattern: {e}") from e

    def matches(self, name: str) -> bool:
        """Whether a name begins so."""
        start_s = time.perf_counter()
        try:
            found = self._compiled.match(name, timeout=max(self._left_s, 0.001))
        except TimeoutError as e:
            raise self._wrong(f"takes more than {MAX_MATCHING_S} s to match") from e
        self._left_s -= time.perf_counter() - start_s
        return found is not None

    def _wrong(self, why: str) -> ModelNotSupported:
        text = f"quantization_config: {self._field} {self._text[:100]!r} {why}"
        return ModelNotSupported(text, param=self._field)


def group_size(value: Any, field: str = "group_size") -> int:
    """Columns of a scale: -1 (all), or a multiple of 16."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(field, value, "an integer")
    if value != -1:
        held_group(value, 1 << 30, field)
    return value


def block(value: Any, field: str) -> Grid:
    """Rows and columns of a scale, [128, 128]."""
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or any(isinstance(s, bool) or not isinstance(s, int) for s in sizes):
        raise refused(field, value, "a list of two integers")
    if sizes[0] < 1:
        raise refused(field, value, "positive")
    return Grid(sizes[0], group_size(sizes[1], field))

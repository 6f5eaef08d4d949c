"""Typed reads from quantization_config, with errors that name the field.

Pure functions on parsed JSON, beside Fields; called by schemes.py and compressed.py.
"""

from __future__ import annotations

import re
from typing import Any

from streamer.errors import ModelNotSupported
from streamer.model.fields import Fields
from streamer.model.quantization.interface import held_group
from streamer.model.quantization.scaled import Grid

MAX_PATTERN = 1000  # characters of a pattern in config.json
MAX_NAMES = 100_000


def refused(field: str, value: Any, expected: str) -> ModelNotSupported:
    """The error for a field's value."""
    return ModelNotSupported(
        f"quantization_config: {field} must be {expected}, config.json says {str(value)[:100]}",
        param=field,
    )


def fields(given: dict[str, Any]) -> Fields:
    """Typed reads of the object."""
    return Fields(given, "quantization_config")


def names(value: Any, field: str) -> list[str]:
    """A list of strings, however nested; null is empty."""
    if value is None:
        return []
    found: list[str] = []
    for item in value if isinstance(value, list) else [None]:
        if isinstance(item, list):
            found += names(item, field)
        elif isinstance(item, str):
            found.append(item)
        else:
            raise refused(field, value, "a list of strings")
    if len(found) > MAX_NAMES:
        raise refused(field, f"{len(found)} names", f"at most {MAX_NAMES}")
    return found


def pattern(text: str, field: str) -> re.Pattern[str]:
    """A regular expression of config.json, compiled."""
    if len(text) > MAX_PATTERN:
        raise refused(field, text, f"patterns of at most {MAX_PATTERN} characters")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise ModelNotSupported(
            f"quantization_config: {field} {text[:100]!r} is no pattern: {e}", param=field
        ) from e


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

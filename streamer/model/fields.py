"""Fields: typed reads from a parsed config.json.

A wrong type or a missing field is refused by name with ModelNotSupported. Owns nothing; called by
families.py and rope.py.
"""

from __future__ import annotations

import math
from typing import Any

from streamer.errors import ModelNotSupported

# Above what any model has: refused before anything of that size is made.
MAX_SIZE = (1 << 31) - 1
MAX_COUNT = 4096  # of what is made one by one: layers, experts
MAX_NUMBER = 1e30  # float32 holds it


class Fields:
    """Typed views of one JSON object; `where` names it in messages. null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def size(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """An integer of at least 1 and at most `maximum`."""
        value = self.count(name, default, maximum)
        if value < 1:
            raise self._wrong(name, value, "at least 1")
        return value

    def has(self, name: str) -> bool:
        """Whether the field is written at all, null included."""
        return name in self._values

    def size_or_none(self, name: str) -> int | None:
        """An integer of at least 1, or None where absent."""
        return None if self._values.get(name) is None else self.size(name)

    def count(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """An integer of at least 0 and at most `maximum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        if value > maximum:
            raise self._wrong(name, value, f"at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None, maximum: float = MAX_NUMBER) -> float:
        """A finite number above 0 and at most `maximum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if value <= 0 or (isinstance(value, float) and not math.isfinite(value)):
            raise self._wrong(name, value, "a finite number above 0")
        if value > maximum:
            raise self._wrong(name, value, f"at most {maximum:g}")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A finite number above 0, or None where absent."""
        return None if self._values.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many finite numbers above 0."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self._wrong(name, values, f"a list of {count} numbers")
        each = (Fields({name: value}, self._where).number(name) for value in values)
        return tuple(each)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts_or_none(self, name: str) -> list[str] | None:
        """A list of strings, or None where absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(name, value, "a list of strings")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelNotSupported(f"{self._where}: config.json lacks {name}", param=name)
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> ModelNotSupported:
        return ModelNotSupported(
            f"{self._where}: {name} must be {expected}, config.json says {str(value)[:100]}",
            param=name,
        )

"""Checks of values that come from outside: type and range, in an error that names the field.

Each returns the value as Python's own type, so that what is behind it sees no other: numpy's and
other libraries' numbers are taken where they are whole (or real) numbers, True and False are not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

from streamer.errors import InvalidRequest

SHOWN_BITS = 128  # a message spells out integers up to this length
SHOWN_CHARS = 60
MAX_ID = 1 << 62  # the vocabulary's own size is checked where it is known


def integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number from `low` to `high`; 2.0 is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(name, "an integer", value)
    try:
        whole = operator.index(value)
    except TypeError:  # an array of several
        raise _wrong(name, "an integer", value) from None
    _within(name, whole, low, high)
    return whole


def number(name: str, value: Any, low: float, high: float) -> float:
    """A real number from `low` to `high`, which NaN never is."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise _wrong(name, "a number", value)
    _within(name, value, low, high)
    return value if type(value) in (int, float) else float(value)


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as such."""
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def text(name: str, value: object) -> str:
    """A string that can be written as UTF-8: no lone surrogates."""
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidRequest(
            f"{name} is no valid Unicode: a lone surrogate at {at}", param=name
        ) from None
    return value


def entries(name: str, value: object) -> Sequence[object]:
    """A list or a tuple."""
    if not isinstance(value, list | tuple):
        raise _wrong(name, "a list", value)
    return value


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Whole numbers; one pass in C where they are Python's own."""
    ids = entries(name, value)
    if set(map(type, ids)) <= {int}:
        return tuple(ids)  # type: ignore[arg-type]  # as the line above has it
    return tuple(integer(f"{name}[{i}]", each, -MAX_ID, MAX_ID) for i, each in enumerate(ids))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not; an integer of any length compares exactly
        if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
            got = f"an integer of {value.bit_length()} bits"
        else:
            got = str(value)
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {got}", param=name)


def _wrong(name: str, wanted: str, value: object) -> InvalidRequest:
    is_short = isinstance(value, int) and value.bit_length() <= SHOWN_BITS
    is_shown = is_short or isinstance(value, float | str | bytes)
    shown = f" {repr(value)[:SHOWN_CHARS]}" if is_shown else ""
    return InvalidRequest(f"{name} must be {wanted}, got {type(value).__name__}{shown}", param=name)

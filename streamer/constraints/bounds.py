"""What a grammar may ask for whose cost llguidance's own limits do not bound.

Looking whether any text fits all of several patterns takes it exponential time.

Of `.*a.{0}.*`, `.*a.{1}.*` and so on in one allOf, 8 take 0.01 s, 12 1.3 s, 14 18 s and 700 MB (one
core of an EPYC Zen 5, 2026-11-22). A `multipleOf` takes 10 us for each remainder there is, and two
that meet those of their product: 99,991 takes 1.1 s, 99,999,989 minutes (2026-11-23). Pure.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any, Final

MAX_CROSSED: Final = 8
TOO_MANY: Final = (
    f"it has more than {MAX_CROSSED} patterns and formats, and some may have to match together "
    "(allOf, patternProperties, what stands beside $ref, anyOf or oneOf; & and ~ in Lark)"
)
MAX_REMAINDERS: Final = 20_000
TOO_DIVIDED: Final = (
    "multipleOf: its numbers, without the zeros around them, add up to more than "
    f"{MAX_REMAINDERS} (multiplied, where some may have to hold together)"
)
# Keywords that say nothing of a value: beside a reference they intersect nothing.
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$id", "$schema", "$comment", "$anchor", "$defs", "definitions"}
_BRANCHES = {"$ref", "$dynamicRef", "anyOf", "oneOf"}
# Of Lark: what is no operator, and those that intersect.
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_CROSSING = re.compile(r"[&~]")
_SCHEMA = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()


def too_costly(schema: Any) -> str | None:
    """Why a JSON schema, or a list of them, would take too long to compile; None: it would not.

    Where patterns and numbers meet is not followed through references: all of them count.
    """
    patterns, meets, _ = _counted(schema)
    if meets and patterns > MAX_CROSSED:
        return TOO_MANY
    return TOO_DIVIDED if remainders(schema) > MAX_REMAINDERS else None


def remainders(schema: Any) -> int:
    """How many remainders the numbers of `multipleOf` have; see TOO_DIVIDED."""
    _, meets, divisors = _counted(schema)
    return math.prod(divisors) if meets else sum(divisors)


def _counted(schema: Any) -> tuple[int, bool, set[int]]:
    """Patterns and formats, whether some may have to hold together, and divisors."""
    patterns, meets, left = 0, False, [schema]
    divisors = set[int]()
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            named = value.get("patternProperties")
            patterns += len(named) if isinstance(named, dict) else 0
            patterns += isinstance(value.get("pattern"), str) + isinstance(value.get("format"), str)
            if "multipleOf" in value:
                divisors.add(_digits(value["multipleOf"]))
            branches = _BRANCHES & value.keys()
            others = value.keys() - _NOTES - branches
            is_meeting = len(branches) > 1 or (bool(branches) and bool(others))
            meets = meets or is_meeting or "allOf" in value or "patternProperties" in value
            left.extend(value.values())
    return patterns, meets, divisors


def _digits(number: Any) -> int:
    """A number's digits without the zeros around them; 1 for what is none."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1
    if isinstance(number, int) and abs(number) >= 1 << 64:
        return MAX_REMAINDERS + 1
    if not math.isfinite(number):
        return 1
    digits = Decimal(str(number)).normalize().as_tuple().digits
    return max(1, int("".join(map(str, digits))))


def lark_too_costly(text: str) -> str | None:
    """Why a Lark grammar would be: more `&` and `~` than may be, or its schemas."""
    schemas = []
    for match in _SCHEMA.finditer(text):
        try:
            schemas.append(_DECODER.raw_decode(text, match.end())[0])
        except (ValueError, RecursionError):  # what it is wrong with, llguidance says
            continue
    found = _CROSSING.findall(_TEXTS.sub("", text))
    return TOO_MANY if len(found) > MAX_CROSSED else too_costly(schemas)

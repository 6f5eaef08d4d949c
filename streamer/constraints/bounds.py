"""What a grammar may ask for whose cost llguidance's own limits do not bound.

Looking whether any text fits all of several patterns takes it exponential time.

Of `.*a.{0}.*`, `.*a.{1}.*` and so on in one allOf, 8 take 0.01 s, 12 1.3 s, 14 18 s and 700 MB (one
core of an EPYC Zen 5, 2026-11-22). A `multipleOf` takes 10 us for each remainder there is, and two
that meet those of their product: 99,991 takes 1.1 s, 99,999,989 minutes (2026-11-23).

Parts of a regular expression that may be left out take the square of their number: `a?b?` 8,000
times 1.4 s, 30,000 times 26 s, which nothing can stop; so do characters of a class, 30,000 0.5 s.
While a text of 100 KB is forced, each mask takes 18 ms, of 32 KB 6 (2026-11-23).

Rules of a Lark grammar that name others may be ambiguous, and each mask takes the second to third
power of their number: 20 rules that name two of them in 300 ways took minutes, before any limit of
llguidance's was seen. With MAX_REFERENCES and grammars.LARK_LIMITS the worst of 30 kinds took 0.4 s
(2026-11-26). With parameters (`rule::`) a text of 1 KB has 2^32 rules. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
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
MAX_OPTIONAL: Final = 1000
MAX_BYTES: Final = 1 << 15
TOO_LONG: Final = (
    "its regular expressions are too long to compile: one may have "
    f"{MAX_OPTIONAL} groups and repetitions, or {MAX_BYTES} bytes, several less each"
)
MAX_REFERENCES: Final = 600  # SQL's SELECT has 90
TOO_AMBIGUOUS: Final = f"its rules name rules more than {MAX_REFERENCES} times"
GBNF: Final = (
    "it has ::=, as GBNF and EBNF write rules, which are not taken: a grammar is in the form of "
    'Lark, such as start: "a" | "b"'
)
# Keywords that say nothing of a value: beside a reference they intersect nothing.
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$id", "$schema", "$comment", "$anchor", "$defs", "definitions"}
_DEFS = {"$defs", "definitions"}
_BRANCHES = {"$ref", "$dynamicRef", "anyOf", "oneOf"}
# Of Lark: what is no operator, and those that intersect.
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_CROSSING = re.compile(r"[&~]")
_OPTIONAL = re.compile(r"[?*+{(]")
_DEFINITION = re.compile(r"^[ \t]*[?!_]*(\w+)[^:\n\"/]*:", re.MULTILINE)
_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<regex>/(?:\\.|[^/\\\n])+/)|(?P<name>\w+)|[?*+{(]')
_SCHEMA = re.compile(r"%json\s*")
_REFERENCE = re.compile(r"(?<![%\w.])_?[a-z]\w*")
_DECODER = json.JSONDecoder()


def too_costly(schema: Any) -> str | None:
    """Why a JSON schema, or a list of them, would take too long to compile; None: it would not.

    Where patterns and numbers meet is not followed through references: all of them count.
    """
    patterns, meets, _ = _counted(schema)
    if meets and patterns > MAX_CROSSED:
        return TOO_MANY
    if share(expressions(schema)) > 1:
        return TOO_LONG
    return TOO_DIVIDED if remainders(schema) > MAX_REMAINDERS else None


def remainders(schema: Any) -> int:
    """How many remainders the numbers of `multipleOf` have; see TOO_DIVIDED."""
    _, meets, divisors = _counted(schema)
    return math.prod(divisors) if meets else sum(divisors)


def expressions(schema: Any) -> set[str]:
    """Regular expressions of a schema, and long texts, which are compiled as such."""
    found, left = set[str](), [schema]
    while left:
        value = left.pop()
        if isinstance(value, str):
            found.update((value,) if len(value) > MAX_BYTES // 4 else ())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            named, pattern = value.get("patternProperties"), value.get("pattern")
            found.update(named if isinstance(named, dict) else ())
            found.update((pattern,) if isinstance(pattern, str) else ())
            left.extend(each for key, each in value.items() if key not in _NOTES or key in _DEFS)
            left.extend(value)
    return found


def share(patterns: Iterable[str]) -> float:
    """The part that these regular expressions take of what a request's may; see TOO_LONG."""
    return sum(_part(len(_OPTIONAL.findall(each)), len(each.encode())) for each in patterns)


def _part(num_optional: int, num_bytes: int) -> float:
    return (num_optional / MAX_OPTIONAL) ** 2 + (num_bytes / MAX_BYTES) ** 2


def _lark_share(text: str) -> float:
    """The same of a Lark grammar's terminals, with those that are parts of others."""
    begins = [*_DEFINITION.finditer(text)]
    ends = [each.start() for each in begins[1:]] + [len(text)]
    own: dict[str, tuple[int, int]] = {}
    parts: dict[str, list[str]] = {}
    taken = 0.0
    for begin, end in zip(begins, ends, strict=True):
        optional, size, names = 0, 0, list[str]()
        for part in _PARTS.finditer(text, begin.end(), end):
            if part["name"]:
                names.append(part["name"])
            elif part[0][0] in '"/':
                inner = len(_OPTIONAL.findall(part[0])) if part["regex"] else 0
                optional, size = optional + inner, size + len(part[0].encode())
                if not begin[1].isupper():  # a terminal of its own
                    taken += _part(inner, len(part[0].encode()))
            else:
                optional += 1
        if begin[1].isupper():
            own[begin[1]] = optional, size
            parts[begin[1]] = names
    for name in TopologicalSorter(parts).static_order():
        sizes = [own[each] for each in (name, *parts.get(name, ())) if each in own]
        optional, size = sum(each[0] for each in sizes), sum(each[1] for each in sizes)
        own[name] = min(optional, 10 * MAX_OPTIONAL), min(size, 10 * MAX_BYTES)
        taken += _part(*own[name])
    return taken


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
    operators = _TEXTS.sub("", text)
    if len(_CROSSING.findall(operators)) > MAX_CROSSED:
        return TOO_MANY
    if "::=" in operators:
        return GBNF
    if "::" in operators:
        return "it has rules with parameters (::)"
    own = sum(each[1].islower() for each in _DEFINITION.finditer(operators))
    if len(_REFERENCE.findall(operators)) - own > MAX_REFERENCES:
        return TOO_AMBIGUOUS
    try:
        is_long = _lark_share(text) > 1
    except CycleError as error:
        return f"terminals are parts of themselves: {', '.join(error.args[1])}"[:200]
    return TOO_LONG if is_long else too_costly(schemas)

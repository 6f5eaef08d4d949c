"""How many patterns a grammar may intersect: looking whether any text fits all takes llguidance
exponential time, which its own limits do not bound.

Of `.*a.{0}.*`, `.*a.{1}.*` and so on in one allOf, 8 take 0.01 s, 12 1.3 s, 14 18 s and 700 MB (one
core of an EPYC Zen 5, 2026-11-22). Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_CROSSED: Final = 8
TOO_MANY: Final = (
    f"it has more than {MAX_CROSSED} patterns and formats, and some may have to match together "
    "(allOf, patternProperties, what stands beside $ref, anyOf or oneOf; & and ~ in Lark)"
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


def is_too_crossed(schema: Any) -> bool:
    """Whether a JSON schema has more patterns than may be, and any that could be intersected.

    Where they meet is not followed through references: all patterns count.
    """
    patterns, meets, left = 0, False, [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            named = value.get("patternProperties")
            patterns += len(named) if isinstance(named, dict) else 0
            patterns += isinstance(value.get("pattern"), str) + isinstance(value.get("format"), str)
            branches = _BRANCHES & value.keys()
            others = value.keys() - _NOTES - branches
            is_meeting = len(branches) > 1 or (bool(branches) and bool(others))
            meets = meets or is_meeting or "allOf" in value or "patternProperties" in value
            left.extend(value.values())
    return meets and patterns > MAX_CROSSED


def is_lark_too_crossed(text: str) -> bool:
    """Whether a Lark grammar has more `&` and `~` than that, or schemas that are too crossed."""
    schemas = []
    for match in _SCHEMA.finditer(text):
        try:
            schemas.append(_DECODER.raw_decode(text, match.end())[0])
        except (ValueError, RecursionError):  # what it is wrong with, llguidance says
            continue
    found = _CROSSING.findall(_TEXTS.sub("", text))
    return len(found) > MAX_CROSSED or is_too_crossed(schemas)

"""Formats: dates and times in JSON schemas as patterns, which are exact where llguidance's are not.

Its dates have 29 days in every February and its times a 61st second in every minute: parsers refuse
what a model then writes. No second is a 61st here.
"""

from __future__ import annotations

from typing import Any

_DAY_OF = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = _HOUR + r":[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]" + _HOUR + ")"
PATTERNS = {
    "date": f"^{_DAY_OF}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY_OF}[Tt]{_TIME}$",
}
# Keywords with schemas as values: of names, or one or a list of them. In others, as `const`, what
# looks like a schema is none.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "additionalItems", "additionalProperties"}
_SCHEMAS |= {"allOf", "anyOf", "oneOf"}


def exact(schema: Any) -> Any:
    """The schema with these formats as patterns."""
    if isinstance(schema, list):
        return [exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: exact(each) for name, each in value.items()}
        else:
            found[key] = exact(value) if key in _SCHEMAS else value
    name = found.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return found
    del found["format"]
    if "pattern" not in found:
        return {**found, "pattern": pattern}
    also = found.get("allOf", [])
    return {**found, "allOf": [*also, {"pattern": pattern}]} if isinstance(also, list) else found

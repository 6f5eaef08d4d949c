"""JSON schemas as llguidance can follow them: with exact dates, without keywords that say nothing.

Its dates have 29 days in every February and its times a 61st second in every minute: parsers refuse
what a model then writes. No second is a 61st here. It refuses keywords that it does not know, also
where their value is that which says nothing, as `uniqueItems: false`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
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
MAX_PLACES = 1000  # of keywords, in which one at fault is looked for
# Keywords with schemas as values: of names, or one or a list of them. In others, as `const`, what
# looks like a schema is none.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "additionalItems", "additionalProperties"}
_SCHEMAS |= {"allOf", "anyOf", "oneOf"}


# Values with which a keyword says nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "minProperties": (0,),
}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
# Keywords that say nothing without one of others.
_BESIDE = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}


def followable(schema: Any) -> Any:
    """The schema in this form; what can't be followed stays, for llguidance to name."""
    if isinstance(schema, list):
        return [followable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if _says_nothing(key, value, schema):
            continue
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: followable(each) for name, each in value.items()}
        else:
            found[key] = followable(value) if key in _SCHEMAS else value
    name = found.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return found
    del found["format"]
    if "pattern" not in found:
        return {**found, "pattern": pattern}
    also = found.get("allOf", [])
    return {**found, "allOf": [*also, {"pattern": pattern}]} if isinstance(also, list) else found


def _says_nothing(key: str, value: Any, schema: dict[str, Any]) -> bool:
    beside = _BESIDE.get(key)
    if beside is not None and not any(other in schema for other in beside):
        return True
    is_any_number = schema.get("minContains") == 0 and "maxContains" not in schema
    if key in ("contains", "minContains") and is_any_number:
        return True
    return any(type(value) is type(each) and value == each for each in _NOTHING.get(key, ()))


def without_one(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each keyword's place, and the schema without it; the inner ones first, types last."""
    places: list[tuple[Any, ...]] = []
    left: list[tuple[tuple[Any, ...], Any]] = [((), schema)]
    while left and len(places) < MAX_PLACES:
        path, inner = left.pop(0)
        if isinstance(inner, list):
            left += [((*path, i), each) for i, each in enumerate(inner)]
        for key, value in inner.items() if isinstance(inner, dict) else ():
            places.append((*path, key))
            if key in _BY_NAME and isinstance(value, dict):
                left += [((*path, key, name), each) for name, each in value.items()]
            elif key in _SCHEMAS:
                left.append(((*path, key), value))
    places.reverse()
    for place in sorted(places, key=lambda place: place[-1] == "type"):
        yield ".".join(map(str, place)), _without(schema, place)


def _without(schema: Any, place: tuple[Any, ...]) -> Any:
    found = schema.copy()
    if len(place) == 1:
        del found[place[0]]
    else:
        found[place[0]] = _without(schema[place[0]], place[1:])
    return found

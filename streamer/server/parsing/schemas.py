"""Schemas of a tool's parameters, as far as a value that was written as text needs one.

Pure: parser.py makes JSON of such a value with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any, Final, NoReturn

Schema = Mapping[str, Any]

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
WORDS: Final = {"True": "true", "False": "false", "None": "null"}
KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "type": (str, list),
    "properties": (dict,),
    "required": (list,),
    "enum": (list,),
    "anyOf": (list,),
    "oneOf": (list,),
    "pattern": (str,),
    "minLength": (int,),
    "maxLength": (int,),
}
MAX_DEPTH: Final = 8
MAX_PARTS: Final = 1000  # of a schema with its references: alternatives that name each other double


def types_of(schema: object, depth: int = 0) -> tuple[str, ...]:
    """The types that a schema names, those of its alternatives too."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ()
    declared = schema.get("type")
    found = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        found += [t for t in declared if isinstance(t, str)]
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            found += types_of(choice, depth + 1)
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(v, str) for v in values):
        found.append("string")
    return tuple(found)


def malformed(schema: Schema) -> str | None:
    """The keyword of a schema that has not the form of a JSON schema's; of its own level."""
    for name, kinds in KINDS.items():
        if name in schema and not isinstance(schema[name], kinds):
            return name
    types, required = schema.get("type", []), schema.get("required", [])
    if not all(isinstance(t, str) and (t in TYPES or t == "string") for t in _listed(types)):
        return "type"
    return None if all(isinstance(name, str) for name in required) else "required"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def inlined(schema: Any, root: Schema) -> Any:
    """The schema with what its references name in the root, its alternatives' as well.

    Beyond MAX_DEPTH and MAX_PARTS the references stay.
    """
    return _inlined(schema, root, 0, count())


def _inlined(schema: Any, root: Schema, depth: int, parts: count[int]) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH or next(parts) > MAX_PARTS:
        return schema
    target = schema.get("$ref")
    if isinstance(target, str) and depth == MAX_DEPTH:
        return schema
    if isinstance(target, str):
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        found = _found(target, root)
        return {**_inlined(found, root, depth + 1, parts), **rest} if found is not None else schema
    choices = {
        name: [_inlined(each, root, depth + 1, parts) for each in schema[name]]
        for name in ("anyOf", "oneOf", "allOf")
        if isinstance(schema.get(name), list)
    }
    return {**schema, **choices} if choices else schema


def _found(target: str, root: Any) -> Schema | None:
    """What a reference within the root names."""
    if not target.startswith("#"):
        return None
    for step in target[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root if isinstance(root, Mapping) else None


def is_text(schema: object) -> bool:
    """Whether a value is text whatever it says: so for a parameter without a schema."""
    return schema is None or set(types_of(schema)) == {"string"}


def as_json(text: str, schema: object) -> str:
    """A value that was written as text, as JSON of a type that its schema names; else a string."""
    types = types_of(schema)
    written = WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(written, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if not types:
        return written
    for name in types:
        is_number = not isinstance(value, bool) or name == "boolean"
        if isinstance(value, TYPES.get(name, ())) and is_number:
            return written
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)

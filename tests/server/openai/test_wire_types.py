"""The page's wire types against the server's: every interface has the fields that the Struct has.

web/src/client/wire/*.ts are written by hand. Here each is compared with the Struct of the same
meaning, field by field: the name, whether it may be left out, and the type.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from streamer.core import plan, view
from streamer.core.plan import NoticeKind
from streamer.engine import stats, stream
from streamer.server import openapi, tickets, watching
from streamer.server.openai import common, models, tokenizing
from streamer.server.parsing import tools
from streamer.server.responses import body as responses
from streamer.server.responses import socket_events, steering
from streamer.server.responses import types as response_types
from streamer.server.responses.events import STATUSES

CLIENT = Path(__file__).parents[3] / "web" / "src" / "client" / "wire"
TEXT = "".join((CLIENT / name).read_text() for name in ("responses.ts", "engine.ts"))
INTERFACES = dict(re.findall(r"^export interface (\w+) \{\n(.*?)^\}", TEXT, re.M | re.S))
OTHER_NAMES: dict[str, type] = {  # or names that several Structs have
    "InputItem": responses.InputItem,
    "Reasoning": response_types.Reasoning,
    "Cancel": socket_events.Cancel,
    "Resume": socket_events.Resume,
    "Usage": response_types.ResponseUsage,
    "Steer": steering.SteerEvent,
    "SessionUpdate": socket_events.Update,
    "SteerNamed": steering._Named,
    "SteerError": steering._Error,
}
MODULES = (
    *(
        common,
        models,
        tools,
        response_types,
        responses,
        tokenizing,
        socket_events,
        steering,
        tickets,
    ),
    *(watching, openapi, view, stats, plan, stream),
)
TS_NAME: dict[type, str] = {struct: name for name, struct in OTHER_NAMES.items()}


def struct_of(name: str) -> Any:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    found = {getattr(m, name) for m in MODULES if hasattr(m, name)}
    found = {s for s in found if isinstance(s, type) and issubclass(s, msgspec.Struct)}
    assert len(found) == 1, f"{name}: {found}"
    return found.pop()


def typescript(kind: inspect.Type) -> str:
    """A msgspec type in TypeScript, the members of a union in order."""
    match kind:
        case inspect.StrType() | inspect.BytesType():
            return "string"
        case inspect.IntType() | inspect.FloatType():
            return "number"
        case inspect.BoolType():
            return "boolean"
        case inspect.NoneType():
            return "null"
        case inspect.AnyType() | inspect.RawType():
            return "unknown"
        case inspect.LiteralType(values):
            return union(f'"{value}"' for value in values)
        case inspect.Metadata(inner):
            return typescript(inner)
        case inspect.ListType(item) | inspect.VarTupleType(item):
            inner = typescript(item)
            return f"({inner})[]" if " | " in inner else f"{inner}[]"
        case inspect.CollectionType(item):
            return f"{typescript(item)}[]"
        case inspect.TupleType(items):
            return "never[]" if not items else f"[{', '.join(map(typescript, items))}]"
        case inspect.DictType(key, value):
            return f"Record<{typescript(key)}, {typescript(value)}>"
        case inspect.StructType(cls):
            return TS_NAME.get(cls, cls.__name__)
        case inspect.UnionType(types):
            return union(typescript(t) for t in types)
    raise AssertionError(f"no TypeScript for {kind}")


def union(members: Any) -> str:
    return " | ".join(sorted(set(members)))


def expected(struct: Any) -> dict[str, tuple[bool, str]]:
    """name -> (may be left out, type). The server writes defaults; a client leaves them out."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    is_ours = struct.__struct_config__.frozen
    fields = {}
    if info.tag_field is not None and struct not in socket_events.ALL:  # ClientEvent adds theirs
        fields[info.tag_field] = (False, f'"{info.tag}"')
    defaults = {f.name: f.default for f in msgspec.structs.fields(struct)}
    for field in info.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        is_unset = defaults[field.name] is msgspec.UNSET
        named = union(typescript(kind) for kind in kinds)
        may_miss = is_unset if is_ours else not field.required
        fields[field.encode_name] = (may_miss, named)
    return fields


def written(body: str) -> dict[str, tuple[bool, str]]:
    body = re.sub(r"/\*\*.*?\*/", "", body, flags=re.S)
    fields = re.findall(r"(\w+)(\??):\s*([^;]+);", body)
    return {name: (mark == "?", normal(kind)) for name, mark, kind in fields}


def normal(kind: str) -> str:
    kind = re.sub(r"\s+", " ", kind).strip().removeprefix("| ")
    inner = re.fullmatch(r"\((.+)\)\[\]", kind)
    if inner:
        return f"({normal(inner[1])})[]"
    return union(split(kind))


def split(kind: str) -> list[str]:
    """The members of a union; those in brackets stay whole."""
    parts, depth = [""], 0
    for sign in kind:
        depth += (sign in "([<") - (sign in ")]>")
        if sign == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    parts = [part.strip() for part in parts]
    return [normal(p) if p.startswith("(") else p for p in parts]


def values(kind: str) -> list[str]:
    return re.findall(r'"([^"]+)"', kind)


def agree(ours: str, theirs: str) -> bool:
    """The same type, or in TypeScript the values of what is a string in the server."""
    only_values = all(re.fullmatch(r'"[^"]+"', part) for part in ours.split(" | "))
    return ours == theirs or (theirs == "string" and only_values)


@pytest.mark.parametrize("name", INTERFACES)
def test_an_interface_has_the_fields_of_its_struct(name: str) -> None:
    ours, theirs = written(INTERFACES[name]), expected(struct_of(name))
    theirs.pop("owner_of", None)  # never on the wire
    assert set(ours) == set(theirs)
    for field, (may_miss, kind) in theirs.items():
        assert ours[field][0] == may_miss, field
        assert agree(ours[field][1], kind), f"{field}: {ours[field][1]}, the server has {kind}"


def test_the_values_listed_are_those_that_come() -> None:
    kinds = values(written(INTERFACES["StateEvent"])["type"][1])
    assert set(kinds) == {f"response.{kind.value}" for kind in NoticeKind}
    statuses = values(written(INTERFACES["Response"])["status"][1])
    assert set(statuses) == {*STATUSES.values(), "queued", "in_progress"}


def test_the_client_sends_every_event_under_its_type() -> None:
    sent = dict(re.findall(r'\{ type: "([\w.]+)" \} & (\w+)', TEXT))
    read = {str(kind.__struct_config__.tag): kind for kind in socket_events.ALL}
    assert sent.keys() == read.keys()
    assert all(issubclass(read[name], struct_of(kind)) for name, kind in sent.items())


def test_nothing_is_compared_with_itself() -> None:
    assert len(INTERFACES) > 40
    assert not agree("number", "string")
    assert not agree('"a" | number', "string")
    assert written("  a?: string | null;\n") == {"a": (True, "null | string")}
    assert expected(socket_events.Ack) == {
        "response_id": (False, "string"),
        "sequence_number": (False, "number"),
        "stream_id": (True, "null | string"),
    }

"""Known fields: which ones a body honours, which it refuses, and how a body is decoded.

What a body's Struct has is honoured. Of the other fields that OpenAI's types and vLLM's extras
know, every body has one table: a field is a hint (accepted: it asks for nothing this server could
do otherwise), or refused with a 400 that names it, unless its value is one that changes nothing.
Unknown fields are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_type_hints

import msgspec
from msgspec import inspect

from streamer.core.sampling import PARAMETERS
from streamer.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)


class Rule(msgspec.Struct, frozen=True):
    """What happens to a known field that is not honoured.

    harmless     values (besides null) that ask for nothing; None: every value of `kind` is harmless
    kind         the type of a hint
    instead      what to do instead of a refused field
    """

    harmless: tuple[Any, ...] | None = ()
    kind: Any = None
    instead: str = ""


Table = dict[str, Rule]


def hint(kind: Any) -> Rule:
    """A field that is accepted, and asks for nothing this server could do otherwise."""
    return Rule(harmless=None, kind=kind)


def refused(*harmless: Any, instead: str = "") -> Rule:
    """A field that is refused unless null or one of these values; `instead` says what to do."""
    return Rule(harmless=harmless, instead=instead)


STOP: Final = "stop takes strings, stop_token_ids tokens"
GRAMMAR: Final = "structured_outputs has json, regex, choice, grammar, structural_tag"
SESSION: Final = "previous_response_id of /v1/responses continues a conversation"

# Fields of the prompt and of sampling, beside those of SamplingFields.
SAMPLING: Final[Table] = {
    # vLLM's
    "include_stop_str_in_output": refused(False),
    "spaces_between_special_tokens": refused(True),
    "allowed_token_ids": refused([]),
    "bad_words": refused([]),
    "logits_processors": refused([]),
    "guided_json": refused(instead=GRAMMAR),
    "guided_regex": refused(instead=GRAMMAR),
    "guided_choice": refused(instead=GRAMMAR),
    "guided_grammar": refused(instead=GRAMMAR),
    "guided_decoding_backend": refused(),
    "guided_whitespace_pattern": refused(instead=GRAMMAR),
    "structural_tag": refused(instead=GRAMMAR),
    "max_repetition_pattern_size": refused(0),
    "min_repetition_pattern_size": refused(0),
    "repetition_min_count": refused(0),
    # SGLang's and llama.cpp's names of the same and of more
    "regex": refused(instead=GRAMMAR),
    "ebnf": refused(),
    "grammar": refused(""),
    "json_schema": refused(instead=GRAMMAR),
    "stop_regex": refused([], instead=STOP),
    "no_stop_trim": refused(False),
    "lora_path": refused(),
    "session_id": refused(instead=SESSION),
    "session_params": refused({}, instead=SESSION),
    "custom_logit_processor": refused(),
    "custom_params": refused({}),
    "return_hidden_states": refused(False),
    "input_ids": refused(instead="prompt of /v1/completions takes token ids"),
    "rid": refused(),
    "kv_transfer_params": refused(),
    "vllm_xargs": refused(),
    "repetition_detection": refused(),
    "request_id": refused(),
}

# Labels of the user and of the prompt cache: accepted, without effect.
LABELS: Final[Table] = {
    "user": hint(str),
    "safety_identifier": hint(str),
    "prompt_cache_key": hint(str),
}

MAX_EXPLAINED_BYTES: Final = 64 << 10  # of a body that is decoded again to find its fault
MAX_SHOWN_DEPTH: Final = 500  # of a body that is nested too deeply
MAX_HARMLESS_BYTES: Final = 1024  # a million `[],` take 0.4 s to build, to be refused then
# Keys that JSON must write as text; in MessagePack clients send text or numbers.
_NUMBERED: Final[Mapping[str, Any]] = {
    p.name: p.kind for p in PARAMETERS.values() if p.kind == dict[int, float]
}
_NO_RAW: Final = msgspec.Raw()

MAX_WHOLE: Final = 1 << 53  # of floats that are exact
LARGE: Final = object()  # equal to nothing, and true

_ANY = msgspec.json.Decoder()
_ANY_PACKED = msgspec.msgpack.Decoder()
_PATH = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_STEP = re.compile(r"\[[^\]]*\]|([^.\[\]]+)")


class Reader(Generic[T]):
    """Decodes bodies and checks their known fields, in one pass over the data.

    tables  the Struct of each kind of body and its table of known fields; several kinds are tagged
    """

    def __init__(self, tables: Mapping[type[T], Table], *, is_packed: bool = False) -> None:
        self._form = "MessagePack" if is_packed else "JSON"
        self._is_packed = is_packed
        self._kind: Any = Union[tuple(tables)]  # noqa: UP007  (of a tuple)
        whole = {_with_known(kind, table, is_packed): kind for kind, table in tables.items()}
        self._plain: Mapping[Any, type[T]] = {w: kind for w, kind in whole.items() if w is not kind}
        self._tables = tables
        union: Any = Union[tuple(whole)]  # noqa: UP007
        codec = msgspec.msgpack if is_packed else msgspec.json
        self._decode = codec.Decoder(union).decode

    def decode(self, data: bytes | str) -> T:
        """The typed body; InvalidRequest whose `param` is the path of the first field at fault."""
        try:
            found = self._found(data)
            kind = self._plain.get(type(found))
            found = found if kind is None else self._checked(found, kind)
            if self._is_packed:
                _check_json(found)
            return found
        except msgspec.ValidationError as e:
            raise located(str(e), self._kind, b"" if self._is_packed else data) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            path = None if self._is_packed else _not_finite(data)
            if path is None:
                text = f"the body is not valid {self._form}: {e}"
            else:
                text = f"{path}: NaN and Infinity are no numbers of JSON"
            raise InvalidRequest(text, param=path, code="invalid_json") from None
        except RecursionError:
            path = None if self._is_packed else _deepest(data)
            raise InvalidRequest(
                f"{path or 'the body'} is nested too deeply", param=path, code="invalid_json"
            ) from None

    def _found(self, data: bytes | str) -> T:
        """The Struct as it came. JSON has one type of numbers: 5.0 is taken where 5 is."""
        try:
            found: T = self._decode(data)
        except msgspec.ValidationError as e:
            if self._is_packed or "got `float`" not in str(e):
                raise
            found = self._decode(msgspec.json.encode(_with_whole(_ANY.decode(data))))
        return found

    def _checked(self, found: T, kind: type[T]) -> T:
        """The body alone: a value as it came would keep all of the data alive."""
        table = self._tables[kind]
        given = {name: raw for name in table if (raw := getattr(found, name))}
        if given:
            _check_known(given, table, is_packed=self._is_packed)
        body = {name: getattr(found, name) for name in kind.__struct_fields__}
        if self._is_packed:
            for name in _NUMBERED.keys() & body.keys():
                body[name] = _numbered(name, body[name])
        return kind(**body)


def _with_whole(value: Any) -> Any:
    """A decoded value in which whole floats are integers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= MAX_WHOLE else value
    if isinstance(value, list):
        return [_with_whole(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_whole(each) for key, each in value.items()}
    return value


def _with_known(kind: type[T], table: Table, is_packed: bool) -> type[T]:
    """The Struct with the fields of its table as well, their values as they came."""
    fields: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, _NO_RAW) for name in table]
    if is_packed:
        numbered = _NUMBERED.keys() & {*kind.__struct_fields__}
        fields += [(name, dict[int | str, float] | None, None) for name in numbered]
    if not fields:
        return kind
    config = kind.__struct_config__
    return msgspec.defstruct(  # type: ignore[return-value]  # a subclass of `kind`
        kind.__name__,
        fields,
        bases=(kind,),
        kw_only=True,
        tag_field=config.tag_field,
        tag=config.tag,
    )


def _check_known(given: Mapping[str, msgspec.Raw], table: Table, *, is_packed: bool) -> None:
    """Refuse fields that ask for what this server does not do, and hints of a wrong type."""
    decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
    faults: dict[str, Rule] = {}
    for name, raw in given.items():
        rule = table[name]
        if rule.harmless is None:
            try:
                decode(raw, type=rule.kind | None)
            except msgspec.ValidationError as e:
                raise InvalidRequest(f"{name}: {e}", param=name, code="invalid_type") from None
        elif not _is_harmless(small(raw, is_packed=is_packed), rule.harmless):
            faults[name] = rule
    _refuse(faults)


def _check_json(body: Any) -> None:
    """Refuse what MessagePack has and JSON has not, such as keys that are no texts, in a schema,
    say, which is written as JSON later."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if not isinstance(value, str | int | float | None):
            try:
                msgspec.json.encode(value)
            except TypeError as e:
                raise InvalidRequest(f"{name}: {e}", param=name, code="invalid_type") from None


def _numbered(name: str, value: dict[int | str, float] | None) -> dict[int, float] | None:
    """The mapping with numbers as keys."""
    if value is None or set(map(type, value)) <= {int}:
        return value  # type: ignore[return-value]  # as the line above has it
    try:
        found: dict[int, float] = msgspec.convert(value, _NUMBERED[name], strict=False)
    except msgspec.ValidationError as e:
        what = str(e).partition(" - at ")[0]
        raise InvalidRequest(f"{name}: {what}", param=name, code="invalid_type") from None
    return found


def small(raw: msgspec.Raw, *, is_packed: bool = False) -> Any:
    """A value, to be compared with harmless ones; a large one is LARGE, which equals none, and so
    is one that can't be decoded: with the body it was only skipped."""
    if len(raw) > MAX_HARMLESS_BYTES:
        return LARGE
    try:
        return (_ANY_PACKED if is_packed else _ANY).decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LARGE


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    value = _without_nulls(value)
    return value is None or any(
        value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless
    )


def _without_nulls(value: Any) -> Any:
    """A null in an object asks for nothing: answers have them, and clients send answers back."""
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


def _refuse(faults: Mapping[str, Rule]) -> None:
    """InvalidRequest that names every field at fault, `param` the first, if there are any."""
    if not faults:
        return
    first, *others = faults
    if others:
        text = f"{', '.join(faults)} are not supported by this server; leave them out or send null"
    else:
        rule = faults[first]
        allowed = [msgspec.json.encode(h).decode() for h in rule.harmless or ()]
        hint = f"leave it out, or send null or {', '.join(allowed)}"
        text = f"{first} is not supported by this server; "
        text += hint if allowed else "leave it out or send null"
        text += f": {rule.instead}" if rule.instead else ""
    raise InvalidRequest(text, param=first, code="unsupported_parameter")


# ---------------------------------------------------------------- what is at fault, and where


def located(
    text: str, kind: Any = None, data: bytes | str = b"", *, code: str = "invalid_type"
) -> InvalidRequest:
    """msgspec's message as an error whose `param` is the path of the field.

    kind, data  the type and the JSON that does not match it: the error then says which values
                are accepted, where they are few, and which key of an object is at fault
    """
    match = _PATH.match(text)
    path, what = (match["path"], match["what"]) if match is not None else ("", text)
    if (missing := missing_field(what)) is not None:
        path = f"{path}.{missing}" if path else missing
        code = "missing_field" if code == "invalid_type" else code
        return InvalidRequest(f"{path} is required", param=path, code=code)
    if match is None:
        return InvalidRequest(text, code=code)
    if kind is not None:
        accepted = sorted(_accepted(kind, path))
        what += f"; accepted: {', '.join(map(repr, accepted))}" if accepted else ""
        if match["key"] or path.endswith("[...]"):
            path = path.removesuffix("[...]")
            if 0 < len(data) <= MAX_EXPLAINED_BYTES:
                path = _with_key(kind, path, data)
    return InvalidRequest(f"{path or 'the body'}: {what}", param=path or None, code=code)


def missing_field(text: str) -> str | None:
    """The name in msgspec's "Object missing required field `name`"."""
    match = re.match(r"Object missing required field `([^`]*)`", text)
    return match[1] if match else None


@cache
def _type_info(kind: Any) -> inspect.Type:
    """msgspec's, which takes milliseconds of the loop for a body's type; there are few."""
    return inspect.type_info(kind)


def _accepted(kind: Any, path: str) -> set[Any]:
    """The values that a field takes, where its type lists them: of literals and of tags."""
    found: list[inspect.Type] = [_type_info(kind)]
    for step in _STEP.finditer(path):
        found = [inner for each in found for inner in _inside(each, step[1])]
    values: set[Any] = set()
    for each in _alternatives(found):
        if isinstance(each, inspect.LiteralType):
            values.update(v for v in each.values if v is not None)
    return values


def _inside(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """The types of a field of this name, or of an item where there is no name."""
    for each in _alternatives([kind]):
        if isinstance(each, inspect.StructType):
            if name == each.tag_field:
                yield inspect.LiteralType((each.tag,))
            yield from (f.type for f in each.fields if f.encode_name == name)
        elif isinstance(each, inspect.ListType | inspect.VarTupleType) and name is None:
            yield each.item_type


def _alternatives(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _with_key(kind: Any, name: str, data: bytes | str) -> str:
    """`name.key` for the first key of an object, a field of the body, that its type refuses."""
    hints = (get_type_hints(each).get(name) for each in get_args(kind) or (kind,))
    hint = next(filter(None, hints), None)
    try:
        found = _ANY.decode(data)[name] if hint is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # further on
        return name
    # of a repeated name this is the last value, which may be no object
    for key, value in found.items() if isinstance(found, dict) else ():
        try:
            msgspec.convert({key: value}, hint, str_keys=True)
        except msgspec.ValidationError:
            return f"{name}.{key}"
    return name


def _deepest(data: bytes | str) -> str | None:
    """The field of a body that is nested more than MAX_SHOWN_DEPTH deep, where it comes soon."""
    text = data[:MAX_EXPLAINED_BYTES]
    if not isinstance(text, str):
        text = text.decode(errors="replace")
    depth, name = 0, None
    for match in _TOKEN.finditer(text):
        found = match[0]
        if found[0] == '"':
            name = found[1:-1][:80] if depth == 1 else name
        else:
            depth += 1 if found in "[{" else -1
        if depth > MAX_SHOWN_DEPTH:
            return name
    return None


def _not_finite(data: bytes | str) -> str | None:
    """The path of a NaN or Infinity, which some clients write; None if that is not the fault."""
    if len(data) > MAX_EXPLAINED_BYTES:
        return None
    try:
        body = json.loads(data)  # accepts NaN and Infinity
    except (ValueError, RecursionError):
        return None
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}" if path else key, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            return path
    return None

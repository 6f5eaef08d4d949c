"""A GGUF file, or the files of a split one, as a checkpoint's facts, with safetensors' names.

Reads headers, and of the tensors only Llama 3's rotary factors. Called by model/checkpoint.py.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from streamer.errors import ModelNotSupported
from streamer.model.gguf.config import ROPE_FACTORS, config_of, generation_of, tensor_name
from streamer.model.gguf.header import Header, Room, TensorPlace, read_header
from streamer.model.gguf.names import split_files

TOKENS = "tokenizer.ggml.tokens"
END_KEYS = (TOKENS, "tokenizer.ggml.token_type")
MAX_FACTORS = 4096


class GgufFacts(msgspec.Struct, frozen=True):
    """What config.json, generation_config.json and headers of safetensors would have contained.

    places  of the tensors, by their usual names: the file's name, and where in it
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    places: dict[str, tuple[str, TensorPlace]]


def open_gguf(path: Path) -> GgufFacts:
    """The facts of a file, or of a split one's first; ModelNotSupported names the field."""
    room = Room()
    first = read_header(path, END_KEYS, room)
    headers = {path.name: first} | _others(path, first, room)
    places: dict[str, tuple[str, TensorPlace]] = {}
    factors: list[float] = []
    for file, header in headers.items():
        for place in header.tensors:
            if place.name == ROPE_FACTORS:
                factors = _read_factors(path.parent / file, place)
                continue
            name = tensor_name(place.name)
            if name in places:
                raise ModelNotSupported(
                    f"{file}: tensor {place.name}: it is stated twice", param=place.name
                )
            places[name] = (file, place)
    if not places:
        raise ModelNotSupported(f"{path} holds no tensors", param="tensor_count")
    shapes = {name: place.shape for name, (_, place) in places.items()}
    config, generation = config_of(first.metadata, shapes, factors), generation_of(first.metadata)
    rows, num_tokens = config["vocab_size"], len(first.metadata[TOKENS])
    if num_tokens > rows:
        raise ModelNotSupported(
            f"{path.name}: {TOKENS}: {num_tokens} tokens, token_embd.weight has {rows} rows",
            param=TOKENS,
        )
    return GgufFacts(config, generation, places)


def _others(path: Path, first: Header, room: Room) -> dict[str, Header]:
    """Headers of the other files of a split model, by name; none where there is one file."""
    count = _number(path.name, first, "split.count", 1)
    files = split_files(path.name)
    if count <= 1 and len(files) == 1:
        return {}
    if count != len(files):
        raise ModelNotSupported(
            f"{path.name}: split.count: {count} files, the name says {len(files)}",
            param="split.count",
        )
    if path.name != files[0]:
        raise ModelNotSupported(
            f"{path.name} is one of {count} files of a model; name the first, {files[0]}",
            param="model",
        )
    if missing := [name for name in files if not (path.parent / name).is_file()]:
        raise ModelNotSupported(
            f"{path.parent} lacks {len(missing)} of {count} files: {', '.join(missing[:8])}",
            param="model",
        )
    _check_part(path.name, first, 0, count)
    found: dict[str, Header] = {}
    for number, name in enumerate(files[1:], 1):
        found[name] = read_header(path.parent / name, room=room)
        _check_part(name, found[name], number, count)
    stated = _number(path.name, first, "split.tensors.count")
    held = len(first.tensors) + sum(len(header.tensors) for header in found.values())
    if stated != held:
        raise ModelNotSupported(
            f"{path.name}: split.tensors.count: {stated}, the files hold {held}",
            param="split.tensors.count",
        )
    return found


def _check_part(file: str, header: Header, number: int, count: int) -> None:
    """That a file of a split model is the one its name says."""
    for key, expected in (("split.no", number), ("split.count", count)):
        if (stated := _number(file, header, key)) != expected:
            raise ModelNotSupported(f"{file}: {key}: {stated}, not {expected}", param=key)


def _number(file: str, header: Header, key: str, default: int | None = None) -> int:
    value: Any = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelNotSupported(f"{file}: {key}: {str(value)[:100]} is no whole number", param=key)
    return value


def _read_factors(file: Path, place: TensorPlace) -> list[float]:
    if place.format.name != "F32" or len(place.shape) != 1 or place.shape[0] > MAX_FACTORS:
        raise ModelNotSupported(
            f"{file.name}: tensor {place.name}: {place.format.name} {list(place.shape)} "
            "instead of one float32 for each rotary frequency",
            param=place.name,
        )
    with file.open("rb") as f:
        f.seek(place.start)
        raw = f.read(place.num_bytes)
    if len(raw) != place.num_bytes:
        raise ModelNotSupported(f"{file.name} was cut while it was read", param=place.name)
    return list(struct.unpack(f"<{place.shape[0]}f", raw))

"""A checkpoint as facts: config.json, generation_config.json and the tensors' headers.

A folder with safetensors, or a GGUF file, of which model/gguf makes the same facts. Reads no
weights, imports no torch, runs no code from the folder (`auto_map` means nothing here). Refuses
what can't be served with ModelNotSupported; called by inspect.py and loader.py.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from streamer.errors import ModelNotSupported
from streamer.model.gguf.checkpoint import open_gguf
from streamer.model.gguf.header import is_gguf

# All headers of a checkpoint together: 91,000 tensors take 13 MB, each byte some 40 of memory.
MAX_HEADER_BYTES = 32 << 20
MAX_JSON_BYTES = 32 << 20  # the index of those 91,000 tensors has 9 MB
MAX_NAME = 1000  # characters of a tensor's name
MAX_DIMS = 8  # of a tensor; convolutions of video have 5
MAX_SIZE = 1 << 48  # what a dimension and an offset are below
FLOATS = ("F32", "BF16", "F16")  # of dense tensors
# Bits of a number, by safetensors' names.
BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
SINGLE_FILE = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/"  # begins what git keeps in a large file's place
# Where writers state the quantization that config.json has none of, and whose files these are.
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint, in bytes `start` to `end` of its file.

    dtype  as safetensors names it (F32, BF16, F16, ...), or GGUF (Q4_K, ...)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class _HeaderEntry(msgspec.Struct):
    """A tensor's entry in a header; __metadata__ has other fields and decodes to the defaults."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class Checkpoint(msgspec.Struct, frozen=True):
    """A folder or GGUF file that can be read: its two configs and every tensor's header, by name.

    path          the folder or the file; files of tensors lie in it or beside it
    quantization  Config's: what its matrices are to be
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: dict[str, TensorEntry]
    is_gguf: bool = False
    quantization: str | None = None

    @property
    def folder(self) -> Path:
        """Where the tensors' files are."""
        return self.path.parent if self.is_gguf else self.path

    @property
    def stored_dtype(self) -> str:
        """The dtype of most numbers: in safetensors of those that are floats if there are any, in
        GGUF of those that are codes."""
        totals: dict[str, int] = {}
        chosen = [e for e in self.tensors.values() if (e.dtype in FLOATS) != self.is_gguf]
        for entry in chosen or self.tensors.values():
            totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.num_elements
        return max(totals, key=lambda name: totals[name])

    @property
    def stored_as(self) -> str:
        """The dtypes of its tensors, that of most bytes first: "I32, F16"."""
        sizes: dict[str, int] = {}
        for entry in self.tensors.values():
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.start
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    @property
    def stored_bytes(self) -> int:
        """Of all tensors, in the files."""
        return sum(entry.end - entry.start for entry in self.tensors.values())


def open_checkpoint(path: Path, quantization: str | None = None) -> Checkpoint:
    """Read config and headers, or raise ModelNotSupported naming the missing or broken file."""
    if path.is_file() and is_gguf(path):
        return msgspec.structs.replace(_of_gguf(path), quantization=quantization)
    if path.is_file():
        _refuse_pointer(path)
    if path.exists() and not path.is_dir():
        raise ModelNotSupported(
            f"{path} is a file, and no GGUF; a model is a folder with config.json, "
            "model.safetensors and tokenizer.json, or a GGUF file",
            param="model",
        )
    if not path.is_dir():
        raise ModelNotSupported(f"{path} does not exist", param="model")
    config = read_config(path)
    generation: dict[str, Any] = {}
    if (path / "generation_config.json").is_file():
        generation = _read_json(path / "generation_config.json")
    tensors: dict[str, TensorEntry] = {}
    room = MAX_HEADER_BYTES
    for file, expected in _weight_files(path).items():
        found, length = _read_header(path / file, room)
        room -= length
        if expected is not None and (missing := sorted(expected - found.keys())):
            raise ModelNotSupported(
                f"{file} lacks {len(missing)} tensors of its index: {_some(missing)}", param="model"
            )
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelNotSupported(
                f"tensors stored twice, again in {file}: {_some(twice)}", param="model"
            )
        tensors.update(found)
    if not tensors:
        raise ModelNotSupported(f"{path} holds safetensors files without tensors", param="model")
    return Checkpoint(path, config, generation, tensors, quantization=quantization)


def _of_gguf(path: Path) -> Checkpoint:
    facts = open_gguf(path)
    entries = {
        name: TensorEntry(
            name, p.format.name, p.shape, file, start=p.start, end=p.start + p.num_bytes
        )
        for name, (file, p) in facts.places.items()
    }
    return Checkpoint(path, facts.config, facts.generation, entries, is_gguf=True)


def read_config(path: Path) -> dict[str, Any]:
    """The folder's config.json, or ModelNotSupported.

    Where it has no quantization_config, with that of the first of QUANTIZATION_FILES that is there.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelNotSupported(f"{path} has no config.json{_served_as(path)}", param="model")
    config = _read_json(file)
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in QUANTIZATION_FILES.items():
        if (path / name).is_file():
            stated = _read_json(path / name)
            inner = stated.get("quantization")  # ModelOpt's, beside the name of its producer
            stated = inner if isinstance(inner, dict) else stated
            return {**config, "quantization_config": {"quant_method": method, **stated}}
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes, at most {MAX_JSON_BYTES} are")
        value = json.loads(file.read_bytes())
        _refuse_half_characters(value)
    except (OSError, ValueError, RecursionError) as e:
        raise ModelNotSupported(f"{file} can't be read as JSON: {e}", param="model") from e
    if not isinstance(value, dict):
        raise ModelNotSupported(f"{file} holds no JSON object", param="model")
    return value


def _refuse_half_characters(value: Any) -> None:
    """ValueError for a string with half of a pair of UTF-16, which JSON may have and no output."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        near = ascii(e.object[max(0, e.start - 40) : e.start + 1])
        raise ValueError(f"the last of {near} is half of a character") from e


def _weight_files(path: Path) -> dict[str, set[str] | None]:
    """Weight files by name; with an index, the tensors it expects in each."""
    if (path / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    files = _indexed_files(path)
    if files:
        if missing := [f for f in files if not (path / f).is_file()]:
            raise ModelNotSupported(
                f"{path} lacks {len(missing)} of {len(files)} weight files: {_some(missing)}",
                param="model",
            )
        return dict(files)
    others = sorted(f.name for pattern in OTHER_WEIGHTS for f in path.glob(pattern))
    if others and not any(path.glob("*.gguf")):
        raise ModelNotSupported(
            f"{path} has no model.safetensors, only {_some(others)}; weights are read from "
            "safetensors and GGUF alone, convert them first",
            param="model",
        )
    raise ModelNotSupported(
        f"{path} has neither model.safetensors nor model.safetensors.index.json{_served_as(path)}",
        param="model",
    )


def _served_as(path: Path) -> str:
    """How GGUF files are served: those of the folder, or of a repository that it was fetched of."""
    if files := sorted(f.name for f in path.glob("*.gguf")):
        return f"; a GGUF file is served by its own name: {_some(files)}"
    return "; a GGUF file is served by its own name, or as FOLDER:Q4_K_M or OWNER/NAME:Q4_K_M"


def _refuse_pointer(file: Path) -> None:
    """ModelNotSupported for a file whose contents were not fetched with the repository."""
    with suppress(OSError), file.open("rb") as f:
        if f.read(len(POINTER)) == POINTER:
            raise ModelNotSupported(
                f"{file} is a pointer of Git LFS, not the file: `git lfs pull` fetches it",
                param="model",
            )


def weight_files(path: Path) -> tuple[str, ...]:
    """Names of the weight files that `open_checkpoint` will read, before they are fetched."""
    return tuple(_indexed_files(path)) or (SINGLE_FILE,)


def _indexed_files(path: Path) -> dict[str, set[str]]:
    """Weight files by name, with the tensors that the index expects in each; empty: no index."""
    index_file = path / "model.safetensors.index.json"
    if not index_file.is_file():
        return {}
    weight_map = _read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelNotSupported(f"{index_file} has no weight_map", param="model")
    files: dict[str, set[str]] = {}
    for tensor, file in sorted(weight_map.items()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelNotSupported(f"{index_file} names the file {file!r}", param="model")
        files.setdefault(file, set()).add(tensor)
    return files


def _read_header(file: Path, room: int) -> tuple[dict[str, TensorEntry], int]:
    """The safetensors header, and its bytes: 8 of little-endian length, then JSON of at most
    `room`; every tensor has the bytes of its shape, side by side with the next."""
    _refuse_pointer(file)
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= size - 8:
            raise ModelNotSupported(
                f"{file} is no safetensors file: {size} bytes, header of {length}", param="model"
            )
        if length > room:
            raise ModelNotSupported(
                f"{file} has a header of {length} bytes; all of a checkpoint may have "
                f"{MAX_HEADER_BYTES} together",
                param="model",
            )
        raw = f.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, _HeaderEntry])
    except (ValueError, RecursionError) as e:
        raise ModelNotSupported(f"{file} has a broken header: {e!r}", param="model") from e
    begin = 8 + length
    header.pop("__metadata__", None)
    entries = {name: _entry(file, begin, name, given) for name, given in header.items()}
    end = max((e.end for e in entries.values()), default=begin)
    if end != size:
        raise ModelNotSupported(
            f"{file} has {size} bytes, its header says {end}: an incomplete download?",
            param="model",
        )
    at = begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        num_bytes = entry.num_elements * BITS[entry.dtype] // 8
        if entry.start != at or entry.end - at != num_bytes:
            raise ModelNotSupported(
                f"{file} has a broken header: {entry.name}, {entry.dtype} {list(entry.shape)}, "
                f"is in bytes {entry.start} to {entry.end}, not in {num_bytes} from {at} on",
                param="model",
            )
        at = entry.end
    return entries, length


def _entry(file: Path, begin: int, name: str, given: _HeaderEntry) -> TensorEntry:
    """A tensor of a file whose tensors begin at `begin`, or ModelNotSupported with the field that
    is out of bounds: only what is within them may be multiplied and written in a message."""
    why = ""
    if len(name) > MAX_NAME:
        why = f"its name has {len(name)} characters, at most {MAX_NAME} can be"
    elif given.dtype not in BITS:
        why = f"dtype {given.dtype[:100]!r} is none of {', '.join(BITS)}"
    elif len(given.shape) > MAX_DIMS:
        why = f"shape has {len(given.shape)} dimensions, at most {MAX_DIMS} can be"
    elif not all(0 <= size < MAX_SIZE for size in given.shape):
        why = "shape has a dimension that is not from 0 to 2**48 - 1"
    elif not all(0 <= at < MAX_SIZE for at in given.data_offsets):
        why = "data_offsets are not from 0 to 2**48 - 1"
    if why:
        raise ModelNotSupported(f"{file} has a broken header: {name[:100]}: {why}", param="model")
    start, end = given.data_offsets
    return TensorEntry(name, given.dtype, given.shape, file.name, begin + start, begin + end)


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:MAX_NAME] for name in names[:limit]) + rest

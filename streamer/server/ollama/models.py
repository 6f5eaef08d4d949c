"""What Ollama's routes say of the served model: its names, its sizes, and what it can do.

Pure: routes.py gives it the engine's ModelInfo and sends what it builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from streamer.server.ollama.answer import written
from streamer.server.ollama.types import (
    Details,
    Loaded,
    LoadedModels,
    Model,
    Models,
    Shown,
)
from streamer.server.openai.common import encode

if TYPE_CHECKING:
    from streamer.core.sizes import ModelInfo

# Clients compare it: it is the version of Ollama that first had all that these routes have.
VERSION: Final = "0.12.11"
ARCHITECTURE: Final = "streamer"
NEVER: Final = "9999-12-31T23:59:59Z"
_TYPES: Final = {"float32": "F32", "bfloat16": "BF16"}
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def models_body(names: Sequence[str], info: ModelInfo, started: float) -> bytes:
    """The body of GET /api/tags."""
    return encode(Models([Model(**_fields(name, info, started)) for name in names]))


def loaded_body(names: Sequence[str], info: ModelInfo, started: float) -> bytes:
    """The body of GET /api/ps."""
    found = []
    for name in names:
        size = info.weight_bytes
        fields = {**_fields(name, info, started), "size": size}
        found.append(
            Loaded(
                **fields,
                expires_at=NEVER,
                size_vram=size if info.device != "cpu" else 0,
                context_length=info.max_model_len,
            )
        )
    return encode(LoadedModels(found))


def shown_body(info: ModelInfo, started: float, capabilities: Sequence[str]) -> bytes:
    """The body of POST /api/show."""
    values: dict[str, str | int] = {
        "general.architecture": ARCHITECTURE,
        "general.basename": info.name,  # Copilot shows the model under it
        "general.parameter_count": info.num_parameters,
        f"{ARCHITECTURE}.context_length": info.max_model_len,
    }
    return encode(Shown(_details(info), values, list(capabilities), written(started)))


def _fields(name: str, info: ModelInfo, started: float) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": written(started),
        "size": info.stored_bytes,
        "digest": sha256(f"{info.name}:{info.dtype}:{info.quantization}".encode()).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> Details:
    most = info.quantization.partition(";")[0]
    level = most.removeprefix("GGUF ") or _TYPES.get(info.dtype, info.dtype.upper())
    is_gguf = most.startswith("GGUF ")
    size, form = _size(info.num_parameters), "gguf" if is_gguf else "safetensors"
    return Details(ARCHITECTURE, [ARCHITECTURE], size, level, form)


def _size(num_parameters: int) -> str:
    for unit, letter in _UNITS:
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{letter}"
    return str(num_parameters)

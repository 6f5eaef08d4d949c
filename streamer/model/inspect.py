"""A checkpoint's facts without its weights: what `streamer info MODEL` shows, and how to load it.

Reads headers and config.json, decides decoder or fallback, counts parameters and KV bytes. Called
by the cli (inspect_checkpoint), runner/load.py (recognize) and build.py (check_config).
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from streamer.config import Config
from streamer.core.sampling import PARAMETERS, SamplingParams
from streamer.core.sizes import ModelInfo
from streamer.errors import ConfigError, InvalidRequest, ModelNotSupported, StreamerError
from streamer.kernels import ops, quantized
from streamer.model import memory
from streamer.model.checkpoint import Checkpoint, open_checkpoint
from streamer.model.families import (
    FAMILIES,
    DecoderConfig,
    architecture_of,
    expected_tensors,
    parse_config,
)
from streamer.model.fields import MAX_SIZE
from streamer.model.gguf.config import SAMPLING
from streamer.model.loader import DTYPES, check_tensors, choose_dtype, described
from streamer.model.quantization.interface import DENSE, Matrix
from streamer.model.quantization.schemes import parse_quantization
from streamer.model.runner.device import CPU, choose_device

if TYPE_CHECKING:
    from streamer.model.fallback import Shape

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is and what would fit here. `refused` says why it can't be served, or "".

    served_by           "decoder" (our own) or "transformers" (the fallback); "" where refused
    stored_as           dtypes of the tensors in the files, that of most bytes first
    stored_bytes        of all tensors, in the files
    scheme              how the quantized matrices are stored
    bits_per_weight     of the memory that the weights take here
    weight_bytes        in the computing dtype, or packed as they are quantized
    kv_bytes_per_token  K and V of all layers, a block's scales shared among its tokens
    fitting_tokens      tokens of KV cache that the pool would hold with the memory free now
    limited_by          why a sequence can't have the model's whole context here
    """

    path: str
    architecture: str
    served_by: str = ""
    refused: str = ""
    num_parameters: int = 0
    stored_as: str = ""
    stored_bytes: int = 0
    dtype: str = ""
    scheme: str = ""
    bits_per_weight: float = 0.0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    model_limit: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    device: str = ""
    free_bytes: int = 0
    num_blocks: int = 0
    fitting_tokens: int = 0
    limited_by: str = ""


class Recognized(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that can be served: exactly one of decoder and fallback is set.

    scheme        how matrices are quantized; "" if none is
    weight_bytes  memory of the weights
    """

    checkpoint: Checkpoint
    decoder: DecoderConfig | None
    fallback: Shape | None
    dtype: str
    scheme: str = ""
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    model_limit: int

    @property
    def digest(self) -> bytes:
        """Of all that describes it, its numbers excepted: equal on hosts that have the same one."""
        found = hashlib.blake2b(json.dumps(self.checkpoint.config, sort_keys=True).encode())
        for name, entry in sorted(self.checkpoint.tensors.items()):
            found.update(f"{name} {entry.dtype} {entry.shape} {entry.end - entry.start}\n".encode())
        return found.digest()

    def kv_dtype(self, setting: str) -> torch.dtype:
        """The pools' dtype for a kv_cache_dtype; ConfigError if heads have no room for scales."""
        if setting == "auto":
            return DTYPES[self.dtype]
        if self.head_dim % quantized.SCALE_BYTES:
            why = f"heads of {self.head_dim} elements have no room for scales"
            raise ConfigError(f"kv_cache_dtype {setting}: {why}", param="kv_cache_dtype")
        return KV_DTYPES[setting]

    def block_bytes(self, config: Config) -> int:
        """Bytes of one KV block, all layers; ConfigError as kv_dtype."""
        dtype = self.kv_dtype(config.kv_cache_dtype)
        return ops.block_bytes(
            self.num_layers, config.block_size, self.num_kv_heads, self.head_dim, dtype
        )


def check_config(config: dict[str, Any]) -> None:
    """ModelNotSupported if nothing here serves this config.json, whatever its weights are."""
    if architecture_of(config) in FAMILIES:
        parse_config(config)
        parse_quantization(config)
        return
    from streamer.model.fallback import model_class_of

    model_class_of(config)


def recognize(checkpoint: Checkpoint, dtype_setting: str, device: torch.device = CPU) -> Recognized:
    """How this checkpoint is served, or ModelNotSupported saying what is missing."""
    generation_defaults(checkpoint)  # refuses before minutes of loading
    method = parse_quantization(checkpoint.config).method
    is_quantized = bool(method or checkpoint.quantization)
    stored = checkpoint.stored_dtype
    is_ours = architecture_of(checkpoint.config) in FAMILIES
    is_native = is_ours and device.type == "cpu" and not ops.why_not_native()
    dtype = choose_dtype(
        dtype_setting, stored, device, is_quantized=is_quantized, is_native=is_native
    )
    if is_ours:
        decoder = parse_config(checkpoint.config)
        _check_heads(device, decoder.head_dim, decoder.num_heads, decoder.num_kv_heads)
        matrices = check_tensors(checkpoint, decoder)
        shapes = [shape for _, shape in expected_tensors(decoder)]
        return Recognized(
            checkpoint=checkpoint,
            decoder=decoder,
            fallback=None,
            dtype=str(dtype).removeprefix("torch."),
            scheme=described(matrices),
            num_parameters=sum(math.prod(shape) for shape in shapes),
            weight_bytes=_weight_bytes(decoder, matrices, dtype, device),
            vocab_size=decoder.vocab_size,
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            model_limit=decoder.rope.limit,
        )
    from streamer.model.fallback import examine  # transformers' modelling code, only where needed

    shape = examine(checkpoint)
    _check_heads(device, shape.head_dim)
    if checkpoint.quantization is not None:
        raise ConfigError(
            f"quantization {checkpoint.quantization}: {shape.architecture} runs on transformers' "
            "code, which takes dense weights",
            param="quantization",
        )
    return Recognized(
        checkpoint=checkpoint,
        decoder=None,
        fallback=shape,
        dtype=str(dtype).removeprefix("torch."),
        scheme=shape.scheme,
        num_parameters=shape.num_parameters,
        weight_bytes=shape.num_parameters * dtype.itemsize,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        model_limit=shape.model_limit,
    )


def _check_heads(device: torch.device, head_dim: int, heads: int = 1, kv_heads: int = 1) -> None:
    """ModelNotSupported for what the native kernels have no room for, where it is they that serve.
    How many query heads a fallback has is not known."""
    from streamer.kernels.cpu import MAX_HEAD, MAX_SHARE

    fits = head_dim <= MAX_HEAD and heads <= MAX_SHARE * kv_heads
    if fits or device.type != "cpu" or ops.why_not_native():  # which may compile them
        return
    otherwise = "with the native kernels; STREAMER_KERNELS=torch has no such limit"
    if head_dim > MAX_HEAD:
        raise ModelNotSupported(
            f"head_dim {head_dim}: it can be at most {MAX_HEAD} {otherwise}", param="head_dim"
        )
    raise ModelNotSupported(
        f"num_attention_heads {heads}, num_key_value_heads {kv_heads}: at most {MAX_SHARE} "
        f"attention heads can share a key-value head {otherwise}",
        param="num_attention_heads",
    )


def _weight_bytes(
    decoder: DecoderConfig, matrices: dict[str, Matrix], dtype: torch.dtype, device: torch.device
) -> int:
    """Memory of the weights. Torch's operators on a CPU hold matrices dense, and tied embeddings
    twice, as rows and packed."""
    is_packed = device.type != "cpu" or not ops.why_not_native()
    on_cpu = device.type == "cpu"
    vectors = (shape[0] for _, shape in expected_tensors(decoder) if len(shape) == 1)
    total = sum(vectors) * dtype.itemsize
    for module, matrix in matrices.items():
        form = matrix.form if is_packed else DENSE.form(matrix.n, matrix.k)
        held = form.held_bytes(matrix.n, matrix.k, dtype.itemsize, on_cpu=on_cpu)
        is_twice = decoder.tied and module == "model.embed_tokens" and not is_packed
        total += held * (2 if is_twice else 1)
    return total


def inspect_checkpoint(path: str | Path, config: Config | None = None) -> CheckpointFacts:
    """Facts of the folder under this config; a refusal is reported in `refused`, not raised."""
    config = config or Config()
    facts = CheckpointFacts(path=str(path), architecture="")
    replace = msgspec.structs.replace
    try:
        device = choose_device(config.device)
        host_free = memory.free_bytes()
        free = memory.device_free_bytes(device)
        facts = replace(facts, device=device.type, free_bytes=free)
        checkpoint = open_checkpoint(Path(path), config.quantization)
        facts = replace(
            facts,
            architecture=architecture_of(checkpoint.config),
            stored_as=checkpoint.stored_as,
            stored_bytes=checkpoint.stored_bytes,
            num_parameters=_num_parameters(checkpoint),
            eos_token_ids=eos_token_ids(checkpoint),
        )
        known = recognize(checkpoint, config.dtype, device)
        facts = replace(
            facts,
            served_by="decoder" if known.decoder else "transformers",
            dtype=known.dtype,
            scheme=known.scheme,
            bits_per_weight=8 * known.weight_bytes / known.num_parameters,
            num_parameters=known.num_parameters,
            weight_bytes=known.weight_bytes,
            kv_bytes_per_token=known.block_bytes(config) // config.block_size,
            model_limit=known.model_limit,
            vocab_size=known.vocab_size,
        )
        memory.check_weights_fit(facts.weight_bytes, free)
        pools = memory.plan_pools(
            config,
            block_bytes=known.block_bytes(config),
            model_limit=known.model_limit,
            free=free - facts.weight_bytes,
            host_free=host_free if device.type == "cuda" else None,
        )
    except StreamerError as e:
        return replace(facts, refused=e.message)
    return replace(
        facts,
        max_model_len=pools.max_model_len,
        num_blocks=pools.num_blocks,
        fitting_tokens=pools.num_blocks * config.block_size,
        limited_by=pools.limited_by,
    )


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Before the checkpoint is recognized: of the config where matrices are packed, whose tensors
    have fewer elements, else as stored; 0 where it can't be known."""
    config = checkpoint.config
    try:
        if not parse_quantization(config).method:
            return sum(tensor.num_elements for tensor in checkpoint.tensors.values())
        if architecture_of(config) not in FAMILIES:
            return 0
        return sum(math.prod(shape) for _, shape in expected_tensors(parse_config(config)))
    except StreamerError:
        return 0


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """End tokens: generation_config.json's, else config.json's; one id or a list."""
    for source in (checkpoint.generation, checkpoint.config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        known = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
        if ids and len(known) == len(ids):
            return tuple(i for i in known if 0 <= i <= MAX_SIZE)  # -1 says that there is none
    return ()


def generation_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Sampling settings of generation_config.json, or of a GGUF file, that requests start from.

    ModelNotSupported names a setting that no request could have.
    """
    found: dict[str, float] = {}
    checked: Any = SamplingParams
    for name, parameter in PARAMETERS.items():
        value: Any = checkpoint.generation.get(name) if parameter.field.is_of_model else None
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer() and parameter.kind is int:
            value = int(value)
        try:
            checked(**{name: value})
        except InvalidRequest as e:
            where = f"generation_config.json: {name}"
            if checkpoint.is_gguf:
                where = next(f"general.sampling.{k}" for k, v in SAMPLING.items() if v == name)
            raise ModelNotSupported(
                f"{where} is {str(value)[:100]}: {e.message}", param=name
            ) from e
        found[name] = value
    return found


def model_info(
    known: Recognized,
    config: Config,
    pools: memory.PoolSizes,
    block_bytes: int,
    device: torch.device,
) -> ModelInfo:
    """The ModelInfo of a loaded model, for the other rooms."""
    return ModelInfo(
        name=config.served_model_name or known.checkpoint.path.name,
        dtype=known.dtype,
        vocab_size=known.vocab_size,
        max_model_len=pools.max_model_len,
        eos_token_ids=eos_token_ids(known.checkpoint),
        num_blocks=pools.num_blocks,
        num_host_blocks=pools.num_host_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        num_parameters=known.num_parameters,
        stored_bytes=known.checkpoint.stored_bytes,
        weight_bytes=known.weight_bytes,
        quantization=known.scheme,
        generation_defaults=generation_defaults(known.checkpoint),
        device=device.type,
    )

"""Any other causal LM: transformers' modelling code, with its attention replaced by the block pool.

The only module that imports transformers' modelling code. `examine` runs the model without memory
(meta device) before any weight is read, and refuses by name what would be silently wrong;
`load_fallback` compares the loaded model with its own eager attention before it may serve. Called
by runner/load.py and inspect.py.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
import torch
import transformers
from rich.console import Console
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.quantization_config import Mxfp4Config

from streamer.errors import ModelNotSupported
from streamer.kernels import ops
from streamer.model.checkpoint import Checkpoint, TensorEntry
from streamer.model.families import architecture_of
from streamer.model.fields import MAX_COUNT, MAX_SIZE
from streamer.model.loader import check_stored_dtypes
from streamer.model.quantization.interface import check_numbers
from streamer.model.quantization.schemes import parse_quantization, refuse_quantized
from streamer.model.runner.device import CPU

logger = logging.getLogger(__name__)

ATTENTION = "streamer_paged"
RECORDING = "streamer_recording"  # the same in a trial run, where masks say what a layer sees
FULL, ODD = 0, -1  # in place of a window: a layer sees all before; its mask is no window
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Kinds whose frequencies change with the longest sequence of the batch, once beyond a limit.
UNSTEADY_ROPE = {
    "dynamic": "max_position_embeddings",
    "longrope": "original_max_position_embeddings",
}
COUNTED = re.compile(r"(num|n)_\w*(layer|expert|block|stage)")  # fields: counts of parts
MXFP4_ENDS = ("_blocks", "_scales")  # of the names of an expert matrix's codes and scales
PROBE_TOKENS = 48
# Mean difference of logits, in their standard deviations. Not the largest: over the 12 million
# logits of a probe with a large vocabulary, bfloat16 rounding alone has outliers.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner must know of a fallback model before its weights are read.

    scheme  how matrices are stored that become dense, "" where none does
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    model_limit: int
    num_parameters: int
    windows: tuple[int | None, ...]  # tokens that each layer sees; None: all before
    scheme: str = ""


class PagedContext:
    """One step's kernels, batch and pool, handed through transformers to the attention hook."""

    def __init__(
        self,
        kernels: ops.Backend,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        windows: tuple[int | None, ...],
    ) -> None:
        self.kernels = kernels
        self.batch = batch
        self.pool = pool
        self.windows = windows


class Recording:
    """Replaces a PagedContext in a trial run: records what each layer asks of attention.

    seen     layer -> (KV heads, key size, value size)
    windows  layer -> tokens that its mask lets it see, None: all before

    Windows are read from the mask, which eager attention applies: Qwen2-MoE, PhiMoE and others have
    a windowed mask and don't pass `sliding_window`.
    """

    def __init__(self, name: str, model_limit: int) -> None:
        self.name = name
        self.model_limit = model_limit
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self._masks: dict[int, tuple[torch.Tensor, int]] = {}

    def mask(
        self, q_length: int, kv_length: int, mask_function: Any, dtype: torch.dtype, **_: Any
    ) -> torch.Tensor:
        """transformers' mask interface: a mask without numbers, remembered by its storage."""
        made = torch.empty(1, 1, q_length, kv_length, dtype=dtype, device="meta")
        window = window_of(mask_function, self.model_limit)
        self._masks[made.untyped_storage()._cdata] = made, window
        return made

    def saw(
        self, module: Any, key: torch.Tensor, value_size: int, mask: torch.Tensor | None
    ) -> None:
        """Record one layer's call of the hook."""
        layer = module.layer_idx
        if not getattr(module, "is_causal", True):
            raise _refusal(self.name, "its attention is not causal")
        known = None if mask is None else self._masks.get(mask.untyped_storage()._cdata)
        if known is None:
            raise _refusal(self.name, "its attention has a mask of its own")
        window = known[1]
        if window == ODD:
            raise _refusal(self.name, "its attention is neither causal nor has a sliding window")
        self.seen[layer] = (key.shape[1], key.shape[3], value_size)
        self.windows[layer] = None if window == FULL else window


def examine(checkpoint: Checkpoint) -> Shape:
    """The model's shape, or ModelNotSupported naming the architecture and what it lacks."""
    config, model_class = model_class_of(checkpoint.config)
    entries = checkpoint.tensors.values()
    check_stored_dtypes(e for e in entries if not _is_made_dense(checkpoint, e))
    is_made_dense = any(_is_made_dense(checkpoint, e) for e in entries)
    name = model_class.__name__
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise _refusal(name, "its config.json names no num_hidden_layers")
    limit = _model_limit(config, name)
    model = _hollow_model(config, model_class)
    if is_made_dense:
        _check_codes(checkpoint, model)
    recording = _record(model, name, limit)
    if set(recording.seen) != set(range(layers)):
        raise _refusal(
            name, f"{len(recording.seen)} of its {layers} layers use the attention interface"
        )
    shapes = set(recording.seen.values())
    if len(shapes) != 1:
        raise _refusal(name, f"its layers' key and value sizes differ: {shapes}")
    kv_heads, key_size, value_size = shapes.pop()
    if value_size > key_size:
        raise _refusal(name, f"values ({value_size}) are wider than keys")
    return Shape(
        architecture=name,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=key_size,
        model_limit=limit,
        num_parameters=sum(p.numel() for p in model.parameters()),
        windows=tuple(recording.windows[layer] for layer in range(layers)),
        scheme="MXFP4, made dense" if is_made_dense else "",
    )


def _is_made_dense(checkpoint: Checkpoint, entry: TensorEntry) -> bool:
    """Whether a tensor holds the codes or scales of matrices that become dense: see MADE_DENSE."""
    method = parse_quantization(checkpoint.config).method
    return method == "mxfp4" and entry.dtype == "U8" and entry.name.endswith(MXFP4_ENDS)


def _check_codes(checkpoint: Checkpoint, model: Any) -> None:
    """ModelNotSupported naming tensors of codes or scales that are missing or misshapen: what loads
    them names none."""
    found = checkpoint.tensors
    problems = []
    for name, parameter in model.named_parameters():
        if not any(name + end in found for end in MXFP4_ENDS):
            continue
        experts, k, n = parameter.shape  # stored the other way round, 32 of k to a block
        shapes = ((experts, n, k // 32, 16), (experts, n, k // 32))
        for end, shape in zip(MXFP4_ENDS, shapes, strict=True):
            entry = found.get(name + end)
            if entry is None:
                problems.append(f"{name}{end} is missing")
            elif (entry.dtype, entry.shape) != ("U8", shape):
                has = f"{entry.dtype} {list(entry.shape)}"
                problems.append(f"{entry.name} is {has}, not U8 {list(shape)}")
    if problems:
        some = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise _refusal(type(model).__name__, f"{len(problems)} tensors of MXFP4 do not fit: {some}")


def window_of(mask_function: Any, limit: int) -> int:
    """Number of tokens that a causal mask shows: FULL for all before, ODD for any other mask.

    mask_function  transformers' (batch, head, query, key) -> whether the query sees the key
    limit          tokens of context; the mask is checked at positions across it
    """
    key, zero = torch.arange(limit), torch.zeros((), dtype=torch.int64)

    def seen_by(position: int) -> torch.Tensor:
        sees: torch.Tensor = mask_function(zero, zero, torch.tensor(position), key)
        return sees.expand(limit)

    window = int(seen_by(limit - 1).sum())
    borders = [1 << n for n in range(limit.bit_length())] + [window, limit // 3]
    for position in sorted({p for n in borders for p in (n - 1, n, n + 1) if 0 <= p < limit}):
        expected = (key <= position) & (key > position - window)
        if window == 0 or not torch.equal(seen_by(position), expected):
            return ODD
    return FULL if window == limit else window


class FallbackModel:
    """A transformers model with decoder.Decoder's interface."""

    recordable = None  # its code may read values, and make tensors on the host

    def __init__(self, kernels: ops.Backend, model: Any, shape: Shape, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self._model = model
        self.dtype = dtype
        self.vocab_size = shape.vocab_size
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self._windows = shape.windows

    def prepare(self, limits: ops.Limits) -> None:
        """Does nothing: transformers' code can't be recorded."""

    def begin(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> bool:
        """Does nothing, for the same reason."""
        return False

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """See decoder.Decoder.forward."""
        logits: torch.Tensor = self._run(tokens, positions, batch, pool, last).logits[0]
        return logits

    def forward_hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See decoder.Decoder.forward_hidden."""
        out = self._run(tokens, positions, batch, pool, last, output_hidden_states=True)
        hidden: torch.Tensor = out.hidden_states[-1][0]
        return out.logits[0], hidden if last is None else hidden[last]

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
        **more: bool,
    ) -> Any:
        return self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            streamer_ctx=PagedContext(self.kernels, batch, pool, self._windows),
            logits_to_keep=0 if last is None else last,
            **more,
        )


def load_fallback(
    kernels: ops.Backend,
    checkpoint: Checkpoint,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    show_progress: bool,
) -> FallbackModel:
    """Load, compare with eager attention, pack; ModelNotSupported names what does not fit."""
    config, model_class = model_class_of(checkpoint.config)
    _quiet(show_progress)
    is_made_dense = bool(shape.scheme)
    if is_made_dense:
        dense_bytes = shape.num_parameters * dtype.itemsize
        says = "the MXFP4 matrices of %s become dense: %d MiB in memory, %d MiB in the file"
        logger.warning(says, shape.architecture, dense_bytes >> 20, checkpoint.stored_bytes >> 20)
    model, info = model_class.from_pretrained(
        checkpoint.path,
        config=config,
        quantization_config=Mxfp4Config(dequantize=True) if is_made_dense else None,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(kind, ()))):
            raise _refusal(shape.architecture, f"{kind.replace('_', ' ')}: {', '.join(names[:8])}")
    for name, parameter in model.named_parameters():
        check_numbers(name, parameter.detach())
    model.eval().to(device)
    with torch.inference_mode():
        tokens = (
            torch.arange(min(PROBE_TOKENS, shape.model_limit), device=device)
            * 7919
            % shape.vocab_size
        )
        expected = _eager_logits(model, tokens)
        _use_hook(model, shape.architecture)
        _pack(kernels, model)
        fallback = FallbackModel(kernels, model, shape, dtype)
        _compare(expected, _paged_logits(fallback, tokens), shape.architecture, dtype)
    return fallback


def model_class_of(given: dict[str, Any]) -> tuple[Any, Any]:
    """(config, class) from transformers' own tables; `auto_map` is dropped, no code is fetched.

    ModelNotSupported says what in this config.json can't be served.
    """
    name = architecture_of(given) or "no architecture"
    refuse_quantized(given, name)
    kind = str(given.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise _refusal(name, f"transformers {transformers.__version__} has no model_type {kind!r}")
    config_class: Any = CONFIG_MAPPING[kind]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(name, f"model_type {kind!r} is no causal language model")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if name != model_class.__name__:
        raise _refusal(name, f"only {model_class.__name__} of model_type {kind!r} can be served")
    fields = {k: v for k, v in given.items() if k != "auto_map"}
    _check_sizes(name, fields)
    try:
        config = config_class.from_dict(fields)
    except Exception as e:  # whatever that code finds wrong with it
        raise _refusal(name, f"transformers refuses its config.json: {e}") from e
    if not model_class._supports_attention_backend:
        raise _refusal(name, "its attention can't be replaced")
    if model_class._is_stateful:
        raise _refusal(name, "it keeps a state between tokens besides K and V")
    if strange := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise _refusal(name, f"layers of type {', '.join(strange)}")
    return config, model_class


def _check_sizes(name: str, fields: Any) -> None:
    """ModelNotSupported for a size or count so large that making the model would not end."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, dict | list):
            _check_sizes(name, value)
        if not isinstance(value, int):
            continue
        limit = MAX_COUNT if COUNTED.match(str(key)) else MAX_SIZE
        if value > limit:
            raise _refusal(name, f"{key} is {str(value)[:100]}, at most {limit} can be")


def _hollow_model(config: Any, model_class: Any) -> Any:
    """The model on the meta device: shapes without memory."""
    try:
        with torch.device("meta"):  # bfloat16, because MoE demands it there
            return model_class._from_config(config, dtype=torch.bfloat16).eval()
    except Exception as e:  # whatever that code makes of this config.json
        raise _refusal(model_class.__name__, f"it can't be made: {e}") from e


def _record(model: Any, name: str, limit: int) -> Recording:
    """Run a few tokens through the hollow model and see which layers call the hook, and how."""
    recording = Recording(name, limit)
    AttentionMaskInterface.register(RECORDING, recording.mask)
    _use_hook(model, name, RECORDING)
    ids = torch.arange(8, device="meta")
    try:
        with torch.inference_mode():
            model(
                input_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],  # without one, values are read
                position_ids=ids[None],
                use_cache=False,
                streamer_ctx=recording,
                logits_to_keep=1,
            )
    except ModelNotSupported:
        raise
    except Exception as e:  # likewise
        raise _refusal(name, f"a trial run failed: {e}") from e
    return recording


def _use_hook(model: Any, name: str, attention: str = ATTENTION) -> None:
    AttentionInterface.register(attention, _attend)
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        raise _refusal(name, f"it stays with {model.config._attn_implementation} attention")


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q [1, Hq, T, D], k and v [1, Hk, T, D], after rope.

    options  streamer_ctx; of the model: scaling, softcap, s_aux (sinks), and others of no effect
    """
    streamer_ctx: PagedContext | Recording | None = options.get("streamer_ctx")
    scaling: float | None = options.get("scaling")
    if streamer_ctx is None:
        raise _refusal(type(module).__name__, "it drops the attention's arguments")
    layer, value_size = module.layer_idx, value.shape[3]
    if isinstance(streamer_ctx, Recording):
        streamer_ctx.saw(module, key, value_size, attention_mask)
        return query.new_zeros((1, query.shape[2], query.shape[1], value_size)), None
    kernels, batch = streamer_ctx.kernels, streamer_ctx.batch
    if value_size < key.shape[3]:  # DeepSeek: narrower values; the pool holds one size
        value = torch.nn.functional.pad(value, (0, key.shape[3] - value_size))
    pool_layer = ops.layer_view(streamer_ctx.pool, layer)
    kernels.store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), pool_layer, batch)
    y = kernels.paged_attention(
        query[0].transpose(0, 1),
        pool_layer,
        batch,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=streamer_ctx.windows[layer],
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return y[None, :, :, :value_size], None


def _model_limit(config: Any, name: str) -> int:
    """Tokens of context the model is made for."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise _refusal(name, "its config.json names no max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)]
    for one in nested or [rope]:
        bound = UNSTEADY_ROPE.get(str(one.get("rope_type")))
        if bound is not None:
            limit = min(limit, int(one.get(bound) or limit))
    return limit


def _eager_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    ids = tokens[None]
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return out.logits[0].float()  # type: ignore[no-any-return]


def _paged_logits(model: FallbackModel, tokens: torch.Tensor) -> torch.Tensor:
    """The same tokens in two chunks, through blocks out of order."""
    count, block = len(tokens), 16
    blocks = -(-count // block)
    device = tokens.device
    table = torch.arange(blocks, device=device).flip(0)
    pool = model.kernels.new_pool(
        blocks, model.num_layers, block, model.num_kv_heads, model.head_dim, model.dtype, device
    )
    out = []
    for start, end in ((0, count // 2 + 1), (count // 2 + 1, count)):
        positions = torch.arange(start, end, device=device)
        batch = ops.AttentionBatch.of_row(table, start, end, block)
        out.append(model.forward(tokens[start:end], positions, batch, pool, None))
    return torch.cat(out).float()


def _compare(expected: torch.Tensor, got: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    distance = float((expected - got).abs().mean() / expected.std())
    if not distance <= TOLERANCE[dtype]:
        raise _refusal(
            name,
            f"its logits differ from eager attention's by {distance:.2g} standard deviations "
            f"({TOLERANCE[dtype]:g} allowed)",
        )


def _pack(kernels: ops.Backend, model: Any) -> None:
    """Pack the weights of every linear layer, one at a time, and free the originals."""
    shared = {id(e.weight) for e in (model.get_input_embeddings(),) if e is not None}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weight = module.weight
        elif type(module) is transformers.pytorch_utils.Conv1D:
            weight = module.weight.T
        else:
            continue
        bias = None if module.bias is None else module.bias.detach()
        module.forward = _Packed(kernels.pack_weight([weight.detach()], bias))
        if id(module.weight) not in shared:
            module.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


class _Packed:
    """A packed linear layer for inputs of any number of dimensions, also without rows."""

    def __init__(self, weight: ops.Linear) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._weight(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


def _quiet(show_progress: bool) -> None:
    """transformers' own progress bar if asked for and on a terminal, its log only for errors."""
    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    if show_progress and Console(stderr=True).is_terminal:
        log.enable_progress_bar()
    else:
        log.disable_progress_bar()


def _refusal(name: str, why: str) -> ModelNotSupported:
    return ModelNotSupported(f"{name} can't be served: {why}", param="model")

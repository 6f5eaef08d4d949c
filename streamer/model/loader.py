"""Safetensors or GGUF -> a model that computes: names and shapes first, then tensor by tensor.

Keeps no weights afterwards. `check_tensors` refuses leftovers and gaps by name before anything is
read; `load_decoder` reads, merges, packs and frees layer by layer, so that peak memory is one layer
above the result. Called by runner/load.py (on the GPU thread) and inspect.py.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from msgspec.structs import replace

from streamer.errors import ConfigError, ModelNotSupported
from streamer.kernels.ops import Backend, Weight, why_not_native
from streamer.kernels.weights import rows_of
from streamer.model.checkpoint import FLOATS, Checkpoint, TensorEntry
from streamer.model.decoder import Decoder
from streamer.model.families import DecoderConfig, expected_tensors
from streamer.model.files import WeightFiles
from streamer.model.gguf.blocks import LAYOUTS, scheme_of
from streamer.model.gguf.rows import Rows
from streamer.model.layers import has_bf16
from streamer.model.memory import return_freed
from streamer.model.quantization.float4 import cost_of
from streamer.model.quantization.interface import (
    DENSE,
    Matrix,
    Scheme,
    Stored,
    check_finite,
    check_numbers,
)
from streamer.model.quantization.on_the_fly import OnTheFly, kind_for, made_on_the_fly
from streamer.model.quantization.schemes import Schemes, parse_quantization
from streamer.model.ranks.linear import Shared
from streamer.model.runner.device import CPU

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of tensors that are read, by safetensors' names.
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ROPE_BUFFER = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# Scales and zero points of activations and of a quantized KV cache.
UNUSED = (
    rf"{ROPE_BUFFER}|(model\..+|lm_head)\."
    r"(input|output|activation|input_global|q|k|v|kv|prob)_(scale|zero_point)"
)

# Tensors that no dense matrix has, by their names after the module's.
QUANTIZED = frozenset(
    [
        *("qweight", "SCB", "weight.absmax"),
        *("weight_packed", "weight_scale", "weight_scale_inv", "weight_blocks"),
    ]
)


def check_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Matrix]:
    """How each matrix is read, by module; ModelNotSupported that names every missing, leftover or
    misshapen tensor and strange dtype, or ConfigError where the checkpoint is not what its
    `quantization` says.

    Not leftovers, by name: rotary inv_freq buffers, lm_head.weight of tied embeddings, and what a
    quantized checkpoint has for its activations, which are quantized here as they come.
    """
    vectors = {name: shape for name, shape in expected_tensors(config) if len(shape) == 1}
    expected = {name: Stored(FLOATS, (shape,)) for name, shape in vectors.items()}
    matrices = {}
    parsed = parse_quantization(checkpoint.config)
    schemes = _schemes(checkpoint, config, parsed)
    found = checkpoint.tensors
    for module, (scheme, stored, (n, k)) in schemes.items():
        with _named(module):
            tensors = scheme.stored(n, k, stored.keys())
        expected.update({f"{module}.{name}": rule for name, rule in tensors.items()})
        names = {name: f"{module}.{name}" for name in tensors if name in stored}
        matrices[module] = Matrix(scheme, n, k, names)
    unused = re.compile(UNUSED if parsed.method else ROPE_BUFFER)
    problems = []
    if missing := sorted(n for n, e in expected.items() if e.is_needed and n not in found):
        problems.append(f"missing {_list(missing)}")
    extra = sorted(
        name
        for name in found.keys() - expected.keys()
        if not unused.fullmatch(name) and not (config.tied and name == "lm_head.weight")
    )
    if extra:
        problems.append(f"left over {_list(extra)}")
    if misshapen := sorted(
        f"{name} is {list(found[name].shape)}, not {' or '.join(str(list(s)) for s in rule.shapes)}"
        for name, rule in expected.items()
        if name in found and rule.shapes and found[name].shape not in rule.shapes
    ):
        problems.append(f"misshapen {_list(misshapen)}")
    if problems:
        problems += _taken_for_dense(parsed.method, schemes)
        stored_as = described(matrices) if parsed.method else ""
        as_what = f" quantized as {stored_as}" if stored_as else ""
        raise ModelNotSupported(
            f"the tensors do not fit {config.architecture}{as_what}: {'; '.join(problems)}",
            param="model",
        )
    _check_dtypes({name: rule for name, rule in expected.items() if name in found}, found)
    return matrices


@contextmanager
def _named(module: str) -> Iterator[None]:
    """Let what a scheme refuses say of which matrix."""
    try:
        yield
    except ModelNotSupported as e:
        raise ModelNotSupported(f"{module}: {e.message}", param=e.param) from e


def _taken_for_dense(
    method: str, schemes: dict[str, tuple[Scheme, dict[str, TensorEntry], tuple[int, ...]]]
) -> list[str]:
    """What config.json says too little of, where matrices are quantized that it gives no scheme."""
    modules = sorted(
        module
        for module, (scheme, stored, _) in schemes.items()
        if scheme is DENSE and not QUANTIZED.isdisjoint(stored)
    )
    if not modules:
        return []
    if not method:
        return ["they are quantized, and config.json has no quantization_config"]
    return [f"quantization_config leaves out what is quantized, {_list(modules)}"]


def described(matrices: dict[str, Matrix]) -> str:
    """The schemes of the quantized matrices, that of most numbers first; "" where none is."""
    sizes: dict[str, int] = {}
    for matrix in matrices.values():
        if matrix.scheme is not DENSE:
            name = matrix.scheme.name
            sizes[name] = sizes.get(name, 0) + matrix.n * matrix.k
    return "; ".join(sorted(sizes, key=lambda name: -sizes[name]))


def _schemes(
    checkpoint: Checkpoint, config: DecoderConfig, schemes: Schemes
) -> dict[str, tuple[Scheme, dict[str, TensorEntry], tuple[int, ...]]]:
    """The scheme of each module's matrix, the tensors stored for it, and its shape."""
    has_blocks = any(entry.dtype in LAYOUTS for entry in checkpoint.tensors.values())
    asked = checkpoint.quantization
    method = "gguf" if checkpoint.is_gguf and (has_blocks or asked == "gguf") else schemes.method
    made = made_on_the_fly(method, asked)
    shapes = dict(expected_tensors(config))
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    vectors = [name for name, shape in shapes.items() if len(shape) == 1]
    found = {}
    for module, stored in _of_modules(checkpoint, modules, frozenset(vectors)).items():
        scheme = scheme_of(stored) if checkpoint.is_gguf else schemes.of(module, stored)
        if made and scheme is DENSE:
            scheme = OnTheFly(kind_for(module, made))
        found[module] = scheme, stored, shapes[f"{module}.weight"]
    if made and not any(isinstance(scheme, OnTheFly) for scheme, _, _ in found.values()):
        raise ConfigError(
            f"quantization {asked}: the checkpoint is quantized as {method}, nothing is dense",
            param="quantization",
        )
    return found


def _of_modules(
    checkpoint: Checkpoint, modules: Collection[str], others: Collection[str]
) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each module, but for the `others`, by their names after the module's."""
    found: dict[str, dict[str, TensorEntry]] = {module: {} for module in modules}
    for name, entry in checkpoint.tensors.items():
        module = name
        while name not in others and (cut := module.rfind(".")) > 0:
            module = module[:cut]
            if module in found:
                found[module][name[cut + 1 :]] = entry
                break
    return found


def _check_dtypes(expected: dict[str, Stored], found: dict[str, TensorEntry]) -> None:
    """ModelNotSupported for tensors that are stored in another dtype than they may be."""
    dense = {name: found[name] for name, rule in expected.items() if rule.dtypes == FLOATS}
    check_stored_dtypes(dense.values())
    if strange := sorted(
        f"{name} is {found[name].dtype}, not {' or '.join(rule.dtypes)}"
        for name, rule in expected.items()
        if found[name].dtype not in rule.dtypes
    ):
        raise ModelNotSupported(f"stored in another dtype: {_list(strange)}", param="model")


def check_stored_dtypes(entries: Iterable[TensorEntry]) -> None:
    """ModelNotSupported for tensors that are neither float32, bfloat16 nor float16."""
    strange = sorted(f"{e.name} ({e.dtype})" for e in entries if e.dtype not in FLOATS)
    if strange:
        raise ModelNotSupported(
            f"tensors are neither float32, bfloat16 nor float16: {_list(strange)}", param="model"
        )


def choose_dtype(
    setting: str,
    stored: str,
    device: torch.device = CPU,
    *,
    is_quantized: bool = False,
    is_native: bool = False,
) -> torch.dtype:
    """The dtype to compute in: `setting` (auto, float32, bfloat16, float16), or the checkpoint's.

    float16 has no fast path on a CPU, and bfloat16 would drop 3 of its 10 bits: there auto makes it
    float32; of a quantized checkpoint bfloat16, since the matrices keep fewer bits than that.
    bfloat16 on a CPU that would emulate it becomes float32 too, unless the native kernels compute
    it (`is_native`). All are logged.
    """
    name = STORED.get(stored, "bfloat16") if setting == "auto" else setting
    if name == "float16" and setting == "auto" and is_quantized:
        logger.warning("the checkpoint's dense tensors are float16, computing in bfloat16")
        name = "bfloat16"
    if name == "float16" and device.type == "cpu":
        if setting != "auto":
            raise ModelNotSupported("dtype float16 needs a GPU", param="dtype")
        logger.warning(
            "the checkpoint is float16, computing in float32; --dtype bfloat16 halves it"
        )
        name = "float32"
    if name not in DTYPES:
        raise ModelNotSupported(
            f"dtype {setting!r} is not auto, float32, bfloat16 or float16", param="dtype"
        )
    if name == "bfloat16" and device.type == "cpu" and not (is_native or has_bf16()):
        logger.warning("this CPU has no bfloat16 arithmetic, computing in float32")
        name = "float32"
    return DTYPES[name]


def load_decoder(
    kernels: Backend,
    checkpoint: Checkpoint,
    config: DecoderConfig | Shared,
    dtype: torch.dtype,
    device: torch.device = CPU,
    layer_done: Callable[[], None] = lambda: None,
) -> Decoder:
    """Check, then read, quantize where that is asked for, and pack all weights, or where they are
    shared, this rank's part of them. `layer_done` is called after each layer; what it raises ends
    the loading."""
    whole = config.part.whole if isinstance(config, Shared) else config
    matrices = check_tensors(checkpoint, whole)
    for name, cost in sorted({(m.scheme.name, cost_of(m.scheme)) for m in matrices.values()}):
        if cost:
            logger.warning("%s: %s", name, cost)
    with (
        FileSource(checkpoint, matrices, dtype, device, layer_done) as source,
        torch.inference_mode(),
    ):
        if isinstance(config, Shared):
            model = Decoder(kernels, config.part.config, config.source(source), config)
        else:
            model = Decoder(kernels, config, source)
    return_freed()
    return model


class FileSource:
    """A decoder's WeightSource over a checkpoint's files, safetensors or GGUF."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        matrices: dict[str, Matrix],
        dtype: torch.dtype,
        device: torch.device,
        layer_done: Callable[[], None],
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        self._matrices = matrices
        self._layer_done = layer_done
        self._files = WeightFiles(checkpoint.folder)
        self._shaped = Rows(checkpoint.config) if checkpoint.is_gguf else _shaped

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def take(self, name: str) -> torch.Tensor:
        """The tensor in the computing dtype."""
        return self._read(name).to(self.device, self.dtype)

    def weight(self, module: str) -> Weight:
        """See layers.WeightSource."""
        matrix = self._matrices[module]
        tensors = {name: self._read(whole) for name, whole in matrix.names.items()}
        with _named(module):
            weight = matrix.scheme.read(tensors, matrix.n, matrix.k)
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, self.dtype)
        if self.device != CPU:
            weight = weight.unpacked()
        return check_finite(module, weight, with_codes=self.device != CPU).to(self.device)

    def rows(self, module: str, start: int, end: int) -> Weight:
        """Rows of `weight` from `start` up to `end`: of a dense matrix nothing else is read."""
        matrix = self._matrices[module]
        if matrix.scheme is not DENSE or self._checkpoint.is_gguf:
            return rows_of(self.weight(module), start, end)
        entry = self._checkpoint.tensors[matrix.names["weight"]]
        row_bytes = (entry.end - entry.start) // matrix.n
        first, last = entry.start + start * row_bytes, entry.start + end * row_bytes
        part = replace(entry, shape=(end - start, matrix.k), start=first, end=last)
        return self._read_entry(part).to(self.device, self.dtype)

    def layer_done(self) -> None:
        """Keep no more memory than this layer used, and tell the caller."""
        self._files.memory.shrink()
        if self.device == CPU and why_not_native():  # of 32-bit numbers much would be kept
            return_freed()
        self._layer_done()

    def _read(self, name: str) -> torch.Tensor:
        """As it is stored; ModelNotSupported for numbers that would make every answer NaN."""
        return self._read_entry(self._checkpoint.tensors[name])

    def _read_entry(self, entry: TensorEntry) -> torch.Tensor:
        data = self._shaped(entry, self._files.read(entry))
        if entry.dtype in FLOATS:  # of other types the schemes know what is a number
            check_numbers(entry.name, data)
        return data


def _shaped(entry: TensorEntry, data: torch.Tensor) -> torch.Tensor:
    """A tensor of safetensors from its bytes."""
    return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


@contextmanager
def progress_bar(name: str, total: int, unit: str, show: bool) -> Iterator[Callable[[], None]]:
    """A rich bar over `total` units on stderr, if stderr is a terminal."""
    done = itertools.count(1)
    with progress_bars([name], total, unit, show) as shown:
        yield lambda: shown(0, next(done))


@contextmanager
def progress_bars(
    names: Iterable[str], total: int, unit: str, show: bool
) -> Iterator[Callable[[int, int], None]]:
    """A bar for each name, as `progress_bar`; what comes is called with a bar's index and how many
    units are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        disable=not (show and console.is_terminal),
    ) as progress:
        tasks = [progress.add_task(name, total=total) for name in names]
        yield lambda index, done: progress.update(tasks[index], completed=done)


def _list(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)}: {', '.join(names[:limit])}{rest}"

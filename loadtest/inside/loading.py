"""`streamer bench load`: a checkpoint's way from the page cache into panels, format by format.

Layers of a decoder are stored in each format, their values random, and loaded as the loader does:
files into memory (WeightFiles), the format's codes and scales out of it, those into the kernels'
panels, parts that are computed as one together. Rates are of stored bytes; beside each stand those
of reading all of the file on one thread: as any program does, and into memory that nothing used
before and that has huge pages, as the panels' is. The fastest run counts. Dense matrices, and those
that are quantized meanwhile, are the last rows.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from streamer.errors import ConfigError
from streamer.loadtest.inside.linear import PARTS
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from streamer.kernels.weights import Weight
    from streamer.model.checkpoint import TensorEntry
    from streamer.model.files import WeightFiles
    from streamer.model.quantization.interface import Scheme

FILE = "weights"
LEGEND = (
    "GB of the file a second. plain: the file read at once, as open(path, 'rb').read() does; new: "
    "read into new memory in huge pages; read: its tensors into memory that is used again; parse: "
    "codes and scales out of them; pack: those into panels; both: the last two; load: all of it; "
    "/ new, / plain: how many times their rates."
)
MAX_RATE = 100  # GB/s; beyond, nothing is done


class Stored(NamedTuple):
    """A matrix in the file: its shape, and tensors with the shapes that they are read in."""

    n: int
    k: int
    tensors: dict[str, tuple[TensorEntry, tuple[int, ...]]]


Layer = list[tuple[list[Stored], str | None]]  # matrices that are computed as one, gates


class Measured(msgspec.Struct, frozen=True):
    """One format: bytes of the file, and seconds of reading it at once, of reading it into new
    memory, of reading a tensor after the other, of parsing, of packing, and of loading it: these
    three and what is between."""

    name: str
    stored: int
    read_plain: float
    read_new: float
    read: float
    parse: float
    pack: float
    load: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many layers, formats and threads."""
    add = parser.add_argument
    add("--layers", type=int, default=16, help="of Qwen3-0.6B's shapes (16)")
    add("--scale", type=int, default=1, help="times these widths (1); 4 for those of 8B models")
    add("--formats", nargs="+", metavar="NAME", help="instead of all, as the table names them")
    add("--threads", type=int, help="of the kernels (all cores)")
    add("--repeats", type=int, default=5, help="of which the fastest counts (5)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure every format and print a table."""
    import torch

    from streamer.kernels import ops

    known = schemes()
    names = args.formats or list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"--formats: {unknown[0]} is none of: {'; '.join(known)}", param="formats"
        )
    for name in ("layers", "scale", "repeats", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1", param=name)
    if why := ops.why_not_native():
        raise ConfigError(f"there are no native kernels here: {why}", param="threads")
    threads = args.threads or torch.get_num_threads()
    ops.for_cpu().set_threads(threads)
    torch.set_num_threads(1)  # as where a model is loaded
    found = []
    for name in names:
        with console.status(f"Measuring {name}"):
            found.append(measure(name, known[name], args))
    title = f"layers: {args.layers}, times the widths: {args.scale}, threads: {threads}"
    console.print(terminal(table(found), title))
    console.print(LEGEND)
    return 0


def schemes() -> dict[str, Scheme]:
    """How a matrix is stored, by the table's names."""
    from streamer.model.gguf.blocks import LAYOUTS, Blocks
    from streamer.model.quantization.float4 import Mxfp4
    from streamer.model.quantization.gptq import Awq, Gptq
    from streamer.model.quantization.interface import DENSE
    from streamer.model.quantization.on_the_fly import KINDS, OnTheFly
    from streamer.model.quantization.scaled import Grid, Numbers, Packed

    found: dict[str, Scheme] = {f"GGUF {name}": Blocks(name) for name in LAYOUTS}
    found |= {
        "GPTQ 4 bits": Gptq(4, 128, is_symmetric=False, has_order=False, is_v1=True),
        "GPTQ 4 bits, desc_act": Gptq(4, 128, is_symmetric=False, has_order=True, is_v1=True),
        "GPTQ 8 bits": Gptq(8, 128, is_symmetric=False, has_order=False, is_v1=True),
        "AWQ": Awq(128, is_symmetric=False),
        "compressed-tensors int4": Packed(4, Grid(1, 128)),
        "compressed-tensors int4, zeros": Packed(4, Grid(1, 32), has_zeros=True),
        "compressed-tensors int8": Numbers("", False, (Grid(),)),
        "FP8": Numbers("", True, (Grid(),)),
        "FP8, 128 x 128": Numbers("", True, (Grid(128, 128),)),
        "MXFP4": Mxfp4(has_blocks=True),
        "dense": DENSE,
    }
    return found | {f"dense -> {kind}": OnTheFly(kind) for kind in KINDS}


def measure(name: str, scheme: Scheme, args: argparse.Namespace) -> Measured:
    """One format: all matrices are written once, and loaded so often."""
    import torch

    from streamer.model.files import WeightFiles

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        with path.open("wb") as file:
            found: list[Layer] = [
                [
                    ([stored(file, scheme, n * args.scale, k * args.scale) for n in outputs], gates)
                    for outputs, k, gates in PARTS
                ]
                for _ in range(args.layers)
            ]
            size = file.tell()
        with closing(WeightFiles(Path(folder))) as files, torch.inference_mode():
            runs = [
                (read_plain(path), read_new(path), *load(files, scheme, found))
                for _ in range(args.repeats)
            ]
    return Measured(name, size, *map(min, zip(*runs, strict=True)))


def stored(file: IO[bytes], scheme: Scheme, n: int, k: int) -> Stored:
    """Append a matrix, its tensors with random values."""
    from streamer.model.checkpoint import TensorEntry

    found = {}
    for name, rule in scheme.stored(n, k, ()).items():
        if not rule.is_needed:
            continue
        dtype = "BF16" if "BF16" in rule.dtypes else rule.dtypes[0]
        shape = rule.shapes[0]
        values = random_values(name, dtype, shape, (n, k))
        start = file.tell()
        file.write(values.numpy().tobytes())
        entry = TensorEntry(name, dtype, shape, FILE, start, file.tell())
        found[name] = entry, shape
    return Stored(n, k, found)


def random_values(
    name: str, dtype: str, shape: tuple[int, ...], of: tuple[int, int]
) -> torch.Tensor:
    """A tensor's bytes: valid, and such that scales fit into float16."""
    import torch

    from streamer.model.gguf.blocks import LAYOUTS
    from streamer.model.loader import TORCH_DTYPES

    def numbers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), dtype=torch.uint8)

    count = math.prod(shape)
    if name == "weight_shape":
        return torch.tensor(of).view(torch.uint8)
    if name == "g_idx":
        inputs = torch.Generator().manual_seed(of[1])  # all that have the same, in one order
        return (torch.randperm(of[1], generator=inputs) // 128).to(torch.int32).view(torch.uint8)
    if dtype in LAYOUTS:
        layout = LAYOUTS[dtype]
        low, high = (112, 124) if dtype == "MXFP4" else (0x20, 0x40)  # of scales, below 2
        return numbers(low, high, count // layout.weights * layout.bytes)
    kind = TORCH_DTYPES[dtype]
    if kind.is_floating_point and kind.itemsize > 1:
        return (torch.rand(count) / 64 + 2**-7).to(kind).view(torch.uint8)
    if name.endswith("scales"):  # exponents
        return numbers(112, 124, count)
    return numbers(0, 0x7E if kind == torch.float8_e4m3fn else 256, count * kind.itemsize)


def read_plain(path: Path) -> float:
    """Seconds of reading a file whole."""
    start = time.perf_counter()
    path.read_bytes()
    return time.perf_counter() - start


def read_new(path: Path) -> float:
    """Seconds of reading a file whole into memory as the panels' is, which nothing used before."""
    import torch

    from streamer.kernels.cpu.memory import CHUNK, in_huge_pages

    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        memory = in_huge_pages(torch.empty(max(size, CHUNK), dtype=torch.uint8))
        left = memory.numpy()[:size].data
        start = time.perf_counter()
        while left and (count := file.readinto(left)):
            left = left[count:]
        return time.perf_counter() - start


def load(
    files: WeightFiles, scheme: Scheme, layers: Sequence[Layer]
) -> tuple[float, float, float, float]:
    """Seconds of reading, of parsing, of packing all layers once, and of all."""
    import torch

    from streamer.kernels.cpu import native
    from streamer.model.memory import return_freed

    read = parse = pack = 0.0
    kept = []  # as a model keeps them
    begin = time.perf_counter()
    for layer in layers:
        for matrices, gates in layer:
            parts = []
            for matrix in matrices:
                start = time.perf_counter()
                raw = [files.read(entry) for entry, _ in matrix.tensors.values()]
                now = time.perf_counter()
                read, start = read + now - start, now
                parts.append(parsed(scheme, matrix, raw))
                parse += time.perf_counter() - start
            start = time.perf_counter()
            kept.append(native.pack_weight(parts, None, gates, dtype=torch.bfloat16))
            pack += time.perf_counter() - start
            del parts, raw
        files.memory.shrink()
    took = time.perf_counter() - begin
    return_freed()
    return read, parse, pack, took


def parsed(scheme: Scheme, matrix: Stored, raw: list[torch.Tensor]) -> Weight:
    """A matrix of its tensors' bytes, with the loader's checks."""
    import torch

    from streamer.model.checkpoint import FLOATS
    from streamer.model.loader import TORCH_DTYPES
    from streamer.model.quantization.interface import check_finite, check_numbers

    tensors = {}
    for (name, (entry, shape)), data in zip(matrix.tensors.items(), raw, strict=True):
        kind = TORCH_DTYPES.get(entry.dtype)
        tensors[name] = data.view(matrix.n, -1) if kind is None else data.view(kind).view(shape)
        if entry.dtype in FLOATS:
            check_numbers(name, tensors[name])
    weight = scheme.read(tensors, matrix.n, matrix.k)
    if isinstance(weight, torch.Tensor):
        return weight
    return check_finite("", weight, with_codes=False)


def table(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Rows of text: gigabytes of the file a second, and how many times as fast parsing and packing
    are as reading into new memory, and loading as reading the file."""
    titles = ("plain, GB/s", "new", "read", "parse", "pack", "both", "/ new", "load", "/ plain")
    rows: list[tuple[str, ...]] = [("format", "MB", *titles)]
    for one in found:
        both = one.parse + one.pack
        reads = (one.read_plain, one.read_new, one.read)
        seconds = (*reads, one.parse, one.pack, both, one.load)
        rates = [one.stored / s / 1e9 for s in seconds]
        shown = ["-" if rate > MAX_RATE else f"{rate:.1f}" for rate in rates]
        shares = [f"{one.read_new / both:.2f}", f"{one.read_plain / one.load:.1f}"]
        size = f"{one.stored / 1e6:.0f}"
        rows.append((one.name, size, *shown[:6], shares[0], shown[6], shares[1]))
    return rows

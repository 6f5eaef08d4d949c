"""`streamer bench linear`: the native kernels' matrix products by themselves, dense and quantized.

All matrices of a decoder are multiplied one after the other, as a step does without attention:
bfloat16 first, then each form of codes. One row is a matter of memory: its rate stands beside that
of a plain sum over memory, right before or after, since a virtual machine's changes from minute to
minute. Many rows are a matter of arithmetic, and stand beside bfloat16. The fastest run counts.
Whole prompts of a checkpoint are measured by prompts.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.errors import ConfigError
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

READ_BYTES = 256 << 20
# Of Qwen3-0.6B's layer: outputs of the matrices that are computed as one, their inputs, gates.
PARTS = (
    ((2048, 1024, 1024), 1024, None),
    ((1024,), 2048, None),
    ((3072, 3072), 1024, "silu"),
    ((1024,), 3072, None),
)
LAYER = tuple((sum(outputs), k, gates) for outputs, k, gates in PARTS)  # N, K


class Form(msgspec.Struct, frozen=True):
    """Codes of random values: as QuantizedWeight has them.

    offset  times a scale, subtracted; a whole number is a zero point
    """

    bits: int
    group: int
    zero: int = 0
    offset: float = 0.0


FORMS = {
    "Q4_0": Form(4, 32, 8),
    "Q4_K": Form(4, 32, offset=0.7),
    "int4": Form(4, 32, offset=7.0),
    "GPTQ 4 bits": Form(4, 128, offset=7.0),
    "Q6_K": Form(6, 16, 32),
    "Q8_0": Form(8, 32, 128),
}


class Measured(msgspec.Struct, frozen=True):
    """One form: bytes of its weights, seconds of all products for each number of rows, and bytes a
    second that a plain sum read meanwhile."""

    name: str
    num_weights: int
    num_bytes: int
    seconds: dict[int, float]
    read: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many layers, rows and threads."""
    add = parser.add_argument
    says = "of Qwen3-0.6B's shapes (16); few lie in the last cache, faster than memory"
    add("--layers", type=int, default=16, help=says)
    says = "at once (1 8 32 64 512); without a number: no matrices by themselves"
    add("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 512], help=says)
    says = "also compute whole prompts of --model, in bfloat16, int8 and int4 in turn"
    add("--prompts", type=int, nargs="+", default=[], metavar="TOKENS", help=says)
    add("--model", help="checkpoint of the prompts (the bundled model)")
    add("--threads", type=int, help="of the kernels (all cores)")
    add("--seconds", type=float, default=0.5, help="of each measurement, at least one run (0.5)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure every form and print a table, and one of whole prompts where they are asked for."""
    import torch

    from streamer.kernels import ops
    from streamer.loadtest.inside import prompts

    if why := ops.why_not_native():
        raise ConfigError(f"there are no native kernels here: {why}", param="threads")
    if min((args.layers, *args.rows, *args.prompts)) < 1:
        raise ConfigError("--layers, --rows and --prompts must be at least 1", param="rows")
    if args.model and not args.prompts:
        raise ConfigError("--model: only --prompts reads one", param="model")
    kernels = ops.for_cpu()
    threads = args.threads or torch.get_num_threads()
    kernels.set_threads(threads)
    found = []
    for name in ("bfloat16", *FORMS) if args.rows else ():
        with console.status(f"Measuring {name}"):
            found.append(measure(name, args.layers, args.rows, args.seconds))
    if found:
        console.print(
            terminal(table(found), f"{args.layers} {'layer' if args.layers == 1 else 'layers'}")
        )
    if args.prompts:
        times = prompts.measure(args.model, args.prompts, threads, console)
        console.print(terminal(prompts.table(times), "whole prompts"))
    return 0


def measure(name: str, layers: int, rows: Sequence[int], seconds: float) -> Measured:
    """One form, for each number of rows."""
    import torch

    from streamer.kernels.cpu import native

    form = FORMS.get(name)
    stack = [
        [
            native.pack_weight([random_weight(n, k, form)], None, gates, dtype=torch.bfloat16)
            for n, k, gates in LAYER
        ]
        for _ in range(layers)
    ]
    num_bytes = sum(m.num_bytes for layer in stack for linear in layer for m in linear.matrices)
    read = read_rate(seconds)
    times = {count: fastest(recorded(stack, count), seconds) for count in sorted(rows)}
    read = max(read, read_rate(seconds))
    return Measured(name, layers * sum(n * k for n, k, _ in LAYER), num_bytes, times, read)


def random_weight(n: int, k: int, form: Form | None) -> Any:
    """A matrix of the form; None: bfloat16."""
    import torch

    from streamer.kernels.weights import QuantizedWeight

    if form is None:
        return torch.randn(n, k).bfloat16()
    codes = torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8)
    scales = torch.full((n, k // form.group), 2.0**-7)
    offsets = zeros = None
    if form.offset.is_integer():
        zeros = torch.full_like(scales, form.offset, dtype=torch.uint8) if form.offset else None
    else:
        offsets = scales * -form.offset
    return QuantizedWeight(codes, scales, form.group, form.bits, form.zero, offsets, zeros=zeros)


def recorded(stack: Sequence[Sequence[Any]], count: int) -> Any:
    """All products for `count` rows as one program, called to run it."""
    import torch

    from streamer.kernels.cpu import native
    from streamer.kernels.cpu.program import Count, Program

    x = torch.randn(count, LAYER[0][1]).bfloat16()
    attended = torch.randn(count, LAYER[1][1]).bfloat16()
    norm = torch.ones(LAYER[0][1]).bfloat16()

    def forward() -> torch.Tensor:
        h = native.rms_norm(x, norm, 1e-6)
        for qkv, out, gate_up, down in stack:
            qkv(h)
            out(attended, add_to=h)
            down(gate_up(h), add_to=h)
        return h

    program = Program.record({Count.TOKENS: [x, attended]}, forward)
    return lambda: program.run((count, 0, 0))


def fastest(call: Any, seconds: float) -> float:
    """Seconds of the fastest run."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def read_rate(seconds: float) -> float:
    """Bytes a second of a sum over memory, by torch's threads."""
    import torch

    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / fastest(memory.sum, seconds)


def table(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Rows of text: rates of a row, then of each larger number of rows."""
    dense = found[0]
    counts = list(dense.seconds)
    heading = ["weights", "bits"]
    for n in counts:
        heading += ["1 row, GB/s", "of a sum's"] if n == 1 else [f"{n} rows, GOP/s", "/ bf16"]
    rows = [tuple(heading)]
    for one in found:
        row = [one.name, f"{8 * one.num_bytes / one.num_weights:.2f}"]
        for n in counts:
            took = one.seconds[n]
            if n == 1:
                row += [
                    f"{one.num_bytes / took / 1e9:.1f}",
                    f"{one.num_bytes / took / one.read:.2f}",
                ]
            else:
                rate = 2 * n * one.num_weights / took / 1e9
                row += [f"{rate:,.0f}", f"{dense.seconds[n] / took:.2f}"]
        rows.append(tuple(row))
    return rows

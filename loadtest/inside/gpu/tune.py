"""The section of `streamer bench gpu` that times matrices, and tries tiles and stages of kernels.

Sets the sizes that the kernels' files call unmeasured, times each, and reports every one beside the
one in use: what is fastest is written into those files by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from streamer.loadtest.inside.gpu import linear
from streamer.loadtest.inside.gpu.kernels import Shape, seconds_of
from streamer.loadtest.inside.gpu.kernels import paged as paged_attention
from streamer.loadtest.inside.gpu.models import Where
from streamer.loadtest.inside.gpu.report import Report, describe

DECODE = Shape("decode 256 x 1,024, 16/8 heads of 128", 256, 1, 1024, 16, 8, 128)
PREFILL = Shape("prefill 4 x 2,048, 16/8 heads of 128", 4, 2048, 2048, 16, 8, 128)
TINY_DECODE = Shape("decode 3 x 40", 3, 1, 40, 4, 2, 16)
TINY_PREFILL = Shape("prefill 2 x 24", 2, 24, 24, 4, 2, 16)


class Choice(NamedTuple):
    """One setting of a kernel's file: its module's name, the constants, their values."""

    module: str
    values: dict[str, object]

    @property
    def says(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())


def _attention(name: str, values: tuple[object, ...]) -> list[Choice]:
    return [Choice("paged", {name: value}) for value in values]


DECODES = [
    *_attention("PROGRAMS", (528, 1056, 4224)),
    *_attention("NARROW_STAGES", ({1: 3, 2: 3, 4: 3}, {1: 3, 2: 4, 4: 3})),
    *_attention("NARROW_ELEMENTS", ({1: 2048, 2: 2048, 4: 2048}, {1: 2048, 2: 8192, 4: 2048})),
    *(Choice("items", {"MIN_SPLIT": n}) for n in (128, 256, 1024)),
]
PREFILLS = [
    *_attention("WIDE", (32, 64)),
    *_attention("STAGES", (2, 4)),
    Choice(
        "paged",
        {"KEY_ELEMENTS": {1: 16384, 2: 16384, 4: 2048}, "MAX_KEYS": {1: 128, 2: 128, 4: 64}},
    ),
]
LINEARS = [  # compiled anew for each form, in one to three seconds each
    *(Choice("few_rows", {"OUTPUTS": n}) for n in (4, 16)),
    Choice("few_rows", {"MAX_FEW": 4}),
    *(Choice("multiply", {"OUTPUTS": {16: n, 32: n, 64: n}}) for n in (64, 128)),
    *(Choice("multiply", {"MAX_MEDIUM": n}) for n in (32, 256)),
    Choice("many_rows", {"PIECE_BYTES": 64 << 20}),
]


def tune(where: Where, report: Report) -> None:
    """Microseconds of a weight in every form; of attention and of the forms that the linear kernels
    unpack, for each setting."""
    linear.matrices(where, report)
    decode, prefill = (TINY_DECODE, TINY_PREFILL) if where.is_tiny else (DECODE, PREFILL)
    for shape, choices in ((decode, DECODES), (prefill, PREFILLS)):
        _try(
            shape.name, choices, partial(paged_attention, shape, where.dtype, where), where, report
        )
    rows, (n, k) = linear.sizes_of(where)
    for form in linear.WIDENED:
        weight = linear.weight_of(form, (n, k), where)
        for count in rows:
            x = torch.randn(count, k, dtype=where.dtype, device=where.device)
            what = f"{form.name}, {count} x {k:,} x {n:,}"
            _try(what, LINEARS, partial(partial, weight, x), where, report)


def _try(
    what: str,
    choices: list[Choice],
    make: Callable[[], Callable[[], object]],
    where: Where,
    report: Report,
) -> None:
    """Report the time with each choice, the one in use first."""
    used = seconds_of(make(), where, report)
    report.add(what, "as it is", used * 1e6, "us")
    for choice in choices:
        report.doing(f"{what}, {choice.says}")
        with _set(choice, where):
            try:
                took = seconds_of(make(), where, report)
            except Exception as error:
                if not _is_of_the_tile(error):
                    raise
                report.add(what, choice.says, 0.0, "us", f"does not fit: {describe(error)}")
                continue
        report.add(what, choice.says, took * 1e6, "us", f"{used / took:.2f} of the speed as it is")


def _is_of_the_tile(error: Exception) -> bool:
    """Whether Triton can't compile a kernel with it, or the device has no room for it. An error of
    the device itself ends the section: nothing after it can be trusted."""
    if isinstance(error, torch.AcceleratorError) or str(error).startswith("Triton Error [CUDA]"):
        return False
    is_triton = type(error).__module__.startswith("triton.")  # whose classes have a base of its own
    return is_triton or isinstance(error, (RuntimeError, ValueError))


@contextmanager
def _set(choice: Choice, where: Where) -> Iterator[None]:
    """The kernels' file with these constants; without a GPU its kernels are not what is timed."""
    if where.device.type != "cuda":
        yield
        return
    from streamer.kernels.gpu.attention import items, paged
    from streamer.kernels.gpu.linear import few_rows, many_rows, multiply

    files = {
        "items": items,
        "paged": paged,
        "few_rows": few_rows,
        "multiply": multiply,
        "many_rows": many_rows,
    }
    module: Any = files[choice.module]
    before = {name: getattr(module, name) for name in choice.values}
    try:
        for name, value in choice.values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)

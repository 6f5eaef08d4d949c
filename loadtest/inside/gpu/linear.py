"""Matrices of `streamer bench gpu`'s section `tune`: one weight in every form, times and tiles.

Makes random weights as dense numbers, as codes of 4 and 8 bits and as FP8, and times each beside
the dense one. Called by tune.py, which also tries other tiles of those that kernels unpack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from streamer.loadtest.inside.gpu.kernels import GB, seconds_of
from streamer.loadtest.inside.gpu.models import Where
from streamer.loadtest.inside.gpu.report import Report

# Of x; outputs and inputs: Llama-3.1-8B's gates and ups, in 4 bits more than an H100's L2 holds,
# from which a smaller weight would be read again.
ROWS, SHAPE = (1, 4, 64, 256, 1024), (28_672, 4096)
TINY_ROWS, TINY_SHAPE = (1, 8), (64, 64)

Linear = Callable[[torch.Tensor], torch.Tensor]


class Form(NamedTuple):
    """A quantized weight: bits of a code, columns of a scale (0: all), whether codes are e4m3."""

    name: str
    bits: int
    group: int = 0
    is_float: bool = False

    def num_bytes(self, shape: tuple[int, int]) -> float:
        """Codes, and scales of two bytes."""
        n, k = shape
        return n * k * self.bits / 8 + n * (k / (self.group or k)) * 2


FP8 = Form("FP8", 8, is_float=True)
# What multiply.py unpacks.
WIDENED = (Form("4 bits", 4, 32), Form("8 bits", 8), Form("FP8 in groups of 128", 8, 128, True))


def sizes_of(where: Where) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Rows of x to try, and a weight's outputs and inputs."""
    return (TINY_ROWS, TINY_SHAPE) if where.is_tiny else (ROWS, SHAPE)


def matrices(where: Where, report: Report) -> None:
    """Microseconds of a weight in bfloat16 and in each form, and how many times as fast that is."""
    rows, shape = sizes_of(where)
    xs = [torch.randn(n, shape[1], dtype=where.dtype, device=where.device) for n in rows]
    what = f"{shape[0]:,} x {shape[1]:,}, {{:,}} rows"
    dense = []
    linear = dense_weight(shape, where)
    for x in xs:
        took = seconds_of(partial(linear, x), where, report)
        dense.append(took)
        note = f"{shape[0] * shape[1] * where.dtype.itemsize / took / GB:,.0f} GB/s of weights"
        report.add(what.format(len(x)), "dense", took * 1e6, "us", note)
    del linear
    for form in (*WIDENED, FP8):
        report.doing(f"a weight in {form.name}")
        linear = weight_of(form, shape, where)
        for x, before in zip(xs, dense, strict=True):
            took = seconds_of(partial(linear, x), where, report)
            note = f"{before / took:.2f} times as fast as dense; "
            note += f"{form.num_bytes(shape) / took / GB:,.0f} GB/s of weights"
            if form is FP8:
                note += ", by torch._scaled_mm" if has_products(where) else ", widened"
            report.add(what.format(len(x)), form.name, took * 1e6, "us", note)


def dense_weight(shape: tuple[int, int], where: Where) -> Linear:
    """A random weight in the device's dtype."""
    from streamer.kernels import ops

    weight = torch.randn(shape, dtype=where.dtype, device=where.device)
    return ops.choose(where.device).pack_weight([weight], dtype=where.dtype)


def weight_of(form: Form, shape: tuple[int, int], where: Where) -> Linear:
    """A random weight of that form, packed."""
    from streamer.kernels import ops
    from streamer.kernels.weights import QuantizedWeight

    n, k = shape
    group = min(form.group or k, k)
    scales = torch.rand(n, -(-k // group), device=where.device)
    if form.is_float:
        codes = torch.randn(n, k, device=where.device).to(torch.float8_e4m3fn)  # none is NaN
    else:
        codes = torch.randint(0, 1 << form.bits, (n, k), dtype=torch.uint8, device=where.device)
    zero = 0 if form.is_float else 1 << (form.bits - 1)
    weight = QuantizedWeight(codes=codes, scales=scales, group=group, bits=form.bits, zero=zero)
    return ops.choose(where.device).pack_weight([weight], dtype=where.dtype)


def has_products(where: Where) -> bool:
    """Whether the device multiplies FP8 by itself."""
    if where.device.type != "cuda":
        return False
    from streamer.kernels.gpu.linear import fp8

    return fp8.has_products(where.device)

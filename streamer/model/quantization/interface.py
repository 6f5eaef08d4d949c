"""What a quantization scheme says of a matrix: the tensors that store it, its size, its codes.

Values and the Scheme protocol alone. A scheme is one way of storing a matrix [N, K] as tensors of a
safetensors file; schemes.py chooses it by config.json, loader.py checks the tensors and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from streamer.errors import ModelNotSupported
from streamer.kernels.weights import GROUPS, QuantizedWeight, Weight
from streamer.model.checkpoint import FLOATS

Shape = tuple[int, ...]
FLOAT32_MAX = torch.finfo(torch.float32).max
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Stored(NamedTuple):
    """A tensor that stores (part of) a matrix: the safetensors dtypes and shapes that it may have.

    shapes     none: any shape
    is_needed  false where the matrix can be read without it
    """

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_needed: bool = True


class Form(NamedTuple):
    """What a matrix becomes: bits of a code (0: dense), columns of a scale, and beside it offsets
    or zero points, which take 4 bits on a CPU where the codes do. `is_float`: codes are e4m3, which
    a CPU makes integers in groups of 32."""

    bits: int
    group: int
    has_offsets: bool = False
    is_float: bool = False
    has_zeros: bool = False

    def held_bytes(self, n: int, k: int, item_bytes: int, *, on_cpu: bool) -> int:
        """Memory of a matrix [n, k], packed: 4, 6 (on a CPU) or 8 bits a code, 16 a scale."""
        if not self.bits:
            return n * k * item_bytes
        codes = n * k * (4 if self.bits <= 4 else 6 if self.bits <= 6 and on_cpu else 8) // 8
        group = 32 if self.is_float and on_cpu else self.group
        groups = math.ceil(k / group)
        if self.has_zeros and self.bits <= 4 and on_cpu:
            return codes + n * groups * 2 + n * math.ceil(groups / 4) * 2
        return codes + n * groups * (4 if self.has_offsets or self.has_zeros else 2)


class Scheme(Protocol):
    """One way of storing a matrix [N, K]. Tensors go by their names after `MODULE.`."""

    @property
    def name(self) -> str:
        """For people: "GPTQ, 4 bits, groups of 128"."""
        ...

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        """The tensors of a matrix [n, k]; where a scheme has spellings, those that are `found`.

        ModelNotSupported where a matrix of that shape can't be stored so.
        """
        ...

    def form(self, n: int, k: int) -> Form:
        """What `read` will return."""
        ...

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Weight:
        """The matrix, of tensors that fit `stored`; ModelNotSupported where their values lie."""
        ...


class Dense:
    """A matrix stored as it is, `weight`."""

    name = "dense"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        return {"weight": Stored(FLOATS, ((n, k),))}

    def form(self, n: int, k: int) -> Form:
        return Form(0, k)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Weight:
        return tensors["weight"]


DENSE = Dense()


class Matrix(NamedTuple):
    """A matrix of a checkpoint: how it is stored, its shape [N, K], and its tensors' names."""

    scheme: Scheme
    n: int
    k: int
    names: dict[str, str]  # after the module's name -> whole

    @property
    def form(self) -> Form:
        return self.scheme.form(self.n, self.k)


def held_group(group: int, k: int, field: str = "group_size") -> int:
    """Columns of a scale in QuantizedWeight for a format with `group` columns a scale (-1: all)."""
    if group == -1 or group >= k:
        return k
    for size in GROUPS:
        if group > 0 and group % size == 0:
            return size
    raise ModelNotSupported(
        f"quantization_config: {field} {group} is no multiple of 16, and not -1", param=field
    )


def regroup(scales: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """Scales [N, ceil(k / group)] of a format's groups as float32, or zero points as they are, a
    column a `held_group`; in memory by outputs or by groups, as they come."""
    scales = scales if scales.dtype == torch.uint8 else scales.float()
    held = held_group(group, k)
    if group in (-1, held) or group >= k:
        return scales
    return scales.repeat_interleave(group // held, 1)[:, : math.ceil(k / held)].contiguous()


def check_finite(
    module: str, weight: QuantizedWeight, *, with_codes: bool = True
) -> QuantizedWeight:
    """The weight; ModelNotSupported for a scale or offset that would make every answer NaN: one
    that is no number, or so large that a weight would be infinite.

    with_codes: for codes of FP8 that are no numbers, too. A CPU's backends find them: NotFinite."""
    is_float = weight.codes.dtype == torch.float8_e4m3fn
    if is_float and with_codes:
        check_numbers(f"{module}.weight", weight.codes)
    value = 256 if weight.table is not None else FP8_MAX if is_float else 1 << weight.bits
    most = value * _largest(f"{module}: scales", weight.scales)
    if weight.offsets is not None:
        most += _largest(f"{module}: offsets", weight.offsets)
    if most > FLOAT32_MAX:
        raise wrong(module, "scales are too large for float32", "model")
    return weight


def _largest(where: str, values: torch.Tensor) -> float:
    """The largest magnitude, 0 of none; ModelNotSupported for numbers that are NaN or infinite."""
    # abs() takes new memory, and aminmax ten times as long where outputs lie side by side
    largest = max(-float(values.amin()), float(values.amax())) if values.numel() else 0.0
    if not math.isfinite(largest):
        check_numbers(where, values)
    return largest


def check_numbers(where: str, values: torch.Tensor) -> None:
    """ModelNotSupported for floats or e4m3 codes that are NaN or infinite.

    A sum is, if a number is: 36 GB/s in bfloat16, 70 times as fast as looking at each; the largest
    codes of FP8 tell at 28 GB/s (a core of an EPYC Zen 5, 2026-11-22).
    """
    if values.dtype == torch.float8_e4m3fn:
        codes = values.view(torch.uint8)
        if int(codes.amax()) < 0xFF and int(codes.view(torch.int8).amax()) < 0x7F:
            return
        strange = int(((codes & 0x7F) == 0x7F).sum())
    elif math.isfinite(float(values.sum())):
        return
    else:
        strange = int((~values.isfinite()).sum())
    if strange:
        raise wrong(where, f"{strange} are NaN or infinite", "model")


def num_groups(k: int, group: int) -> int:
    """Groups of a format in rows of k columns."""
    return 1 if group == -1 else math.ceil(k / group)


def wrong(where: str, problem: str, field: str = "quantization_config") -> ModelNotSupported:
    """The error for a quantized checkpoint, naming what is wrong and where."""
    return ModelNotSupported(f"{where}: {problem}", param=field)

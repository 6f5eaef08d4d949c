"""Codes of 4 bits that stand for 16 floats: MXFP4, NVFP4 and bitsandbytes; also its int8.

Parsers from stored tensors to QuantizedWeight; no state. Bytes hold neighbouring columns, the low
bits first (bitsandbytes: the high ones).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping

import msgspec
import torch

from streamer.kernels.weights import QuantizedWeight
from streamer.model.quantization.bits import stored_layout, unpack, unsigned
from streamer.model.quantization.interface import Form, Scheme, Stored, wrong
from streamer.model.quantization.scaled import scale_values

# e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the negative ones; here doubled, plus 12.
E2M1_TABLE = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
E2M1_ZERO = 12
BLOCKS = (64, 128, 32)
MAX_NESTED = 4096  # the longest blocks that bitsandbytes makes
MAX_STATE_BYTES = 1 << 16
MAX_OFFSET = 1e30  # of scales, which are float32
STATE = "weight.quant_state.bitsandbytes__"


class Mxfp4(msgspec.Struct, frozen=True):
    """e2m1 with a power of two a group of 32.

    has_blocks: as gpt-oss stores it, blocks [N, K / 32, 16] and their scales; else as
    compressed-tensors does, packed [N, K / 2]
    """

    has_blocks: bool

    @property
    def name(self) -> str:
        return "MXFP4, groups of 32" if self.has_blocks else "compressed-tensors, MXFP4"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        if k % 32:
            raise wrong("MXFP4", f"{k} columns are no multiple of 32")
        scales = Stored(("U8", "F8_E8M0"), ((n, k // 32),))
        if self.has_blocks:
            return {
                "weight_blocks": Stored(("U8",), ((n, k // 32, 16),)),
                "weight_scales": scales,
            }
        return {"weight_packed": Stored(("U8",), ((n, k // 2),)), "weight_scale": scales}

    def form(self, n: int, k: int) -> Form:
        return Form(4, 32)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        packed = tensors["weight_blocks" if self.has_blocks else "weight_packed"]
        scales = tensors["weight_scales" if self.has_blocks else "weight_scale"]
        return _e2m1(packed.reshape(n, k // 2), scale_values(scales), 32, k)


class Nvfp4(msgspec.Struct, frozen=True):
    """e2m1 with an e4m3 scale a group of 16, and one of float32 for the matrix.

    is_modelopt: ModelOpt's names, and its global scale multiplies; compressed-tensors' divides
    """

    is_modelopt: bool

    @property
    def name(self) -> str:
        return f"{'ModelOpt' if self.is_modelopt else 'compressed-tensors'}, NVFP4, groups of 16"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        if k % 16:
            raise wrong("NVFP4", f"{k} columns are no multiple of 16")
        packed, whole = self._names
        return {
            packed: Stored(("U8",), ((n, k // 2),)),
            "weight_scale": Stored(("F8_E4M3",), ((n, k // 16),)),
            whole: Stored(("F32",), ((), (1,))),
        }

    def form(self, n: int, k: int) -> Form:
        return Form(4, 16)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        packed, whole = self._names
        factor = float(tensors[whole])
        if not math.isfinite(factor) or factor <= 0:
            raise wrong(whole, f"is {factor}, not a number above 0")
        scales = tensors["weight_scale"].float() * (factor if self.is_modelopt else 1 / factor)
        return _e2m1(tensors[packed], scales, 16, k)

    @property
    def _names(self) -> tuple[str, str]:
        if self.is_modelopt:
            return "weight", "weight_scale_2"
        return "weight_packed", "weight_global_scale"


def _e2m1(packed: torch.Tensor, scales: torch.Tensor, group: int, k: int) -> QuantizedWeight:
    """Of scales that are nobody else's."""
    table = torch.tensor(E2M1_TABLE, dtype=torch.uint8)
    layout = stored_layout("NIBBLES", packed.shape[0], k)
    codes = packed if layout is not None else unpack(packed, 4, k)
    return QuantizedWeight(codes, scales.mul_(0.5), group, 4, E2M1_ZERO, table=table, layout=layout)


class Bnb4(msgspec.Struct, frozen=True):
    """bitsandbytes' nf4 and fp4: 16 floats in -1 to 1 times the largest of a block.

    The floats are rounded to 127ths, an eighth of what bfloat16 would keep of the largest: an error
    that is a tenth of the format's own.
    """

    kind: str  # nf4 or fp4
    is_nested: bool  # scales are quantized too

    @property
    def name(self) -> str:
        return f"bitsandbytes, {self.kind}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        state = next((name for name in found if name.startswith(STATE)), STATE + self.kind)
        sizes = tuple((n * k // size,) for size in BLOCKS)
        tensors = {
            "weight": Stored(("U8",), ((n * k // 2, 1), (1, n * k // 2))),
            "weight.absmax": Stored(("U8" if self.is_nested else "F32",), sizes),
            "weight.quant_map": Stored(("F32",), ((16,),)),
            state: Stored(("U8",), ()),
        }
        if self.is_nested:
            tensors["weight.nested_absmax"] = Stored(("F32",), ())
            tensors["weight.nested_quant_map"] = Stored(("F32",), ((256,),))
        return tensors

    def form(self, n: int, k: int) -> Form:
        return Form(4, 64)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        state = _state(tensors)
        block = state.get("blocksize")
        if not isinstance(block, int) or block not in BLOCKS:
            sizes = ", ".join(map(str, sorted(BLOCKS)))
            says = f"blocksize {str(block)[:100]} is none of those that are read: {sizes}"
            raise wrong("quant_state", says)
        if state.get("shape") != [n, k] or state.get("quant_type") != self.kind:
            says = f"{state.get('quant_type')} {state.get('shape')}"[:100]
            raise wrong("quant_state", f"says {says}, not {self.kind} {[n, k]}")
        largest = tensors["weight.absmax"]
        if k % block or largest.numel() != n * k // block:
            raise wrong("quant_state", f"blocksize {block} does not divide rows of {k}")
        if self.is_nested:
            largest = _unnested(largest, tensors, state)
        codes, layout = tensors["weight"].reshape(n, k // 2), stored_layout("NIBBLES", n, k)
        codes = (codes >> 4) | (codes << 4)
        if layout is None:
            codes = unpack(codes, 4, k)
        values = tensors["weight.quant_map"]
        if not bool((values.abs() <= 1).all()):  # nor NaN
            raise wrong("weight.quant_map", "has values beyond 1")
        table = ((values * 127).round() + 128).to(torch.uint8)
        scales = largest.view(n, k // block) / 127
        return QuantizedWeight(codes, scales, block, 4, zero=128, table=table, layout=layout)


class Bnb8(msgspec.Struct, frozen=True):
    """bitsandbytes' LLM.int8: int8 with the largest of each row; no outliers are kept apart."""

    name: str = "bitsandbytes, int8, a scale for each output"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        return {
            "weight": Stored(("I8",), ((n, k),)),
            "SCB": Stored(("F32",), ((n,),)),
            "weight_format": Stored(("U8",), ((), (1,)), is_needed=False),
        }

    def form(self, n: int, k: int) -> Form:
        return Form(8, k)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        if "weight_format" in tensors and int(tensors["weight_format"]) != 0:
            raise wrong("weight_format", "is not 0: rows as they are")
        scales = tensors["SCB"].view(n, 1) / 127
        codes, layout = tensors["weight"], stored_layout("SIGNED", n, k)
        if layout is None:
            codes = unsigned(codes)
        return QuantizedWeight(codes, scales, k, 8, zero=128, layout=layout)


def cost_of(scheme: Scheme) -> str:
    """What holding a matrix of these formats in the common form costs beside the file; "" for
    nothing, and of other schemes."""
    if isinstance(scheme, Nvfp4):
        return "packed, its scales take 16 bits, not 8: 5 bits a weight instead of 4.5"
    if isinstance(scheme, Bnb4):
        scales = "packed, its scales take 16 bits, not 8, and " if scheme.is_nested else ""
        return f"{scales}the 16 values are rounded to 127ths of the largest of a block"
    if isinstance(scheme, Bnb8):
        return "no columns of activations are kept in 16 bits; on a CPU all are rounded to int8"
    return ""


def _state(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """The JSON object that bitsandbytes stores as a tensor of bytes."""
    raw = next(t for name, t in tensors.items() if name.startswith(STATE))
    if raw.numel() > MAX_STATE_BYTES:
        raise wrong("quant_state", f"has {raw.numel()} bytes, at most {MAX_STATE_BYTES} are read")
    try:
        state = json.loads(bytes(raw.flatten().tolist()))
    except (ValueError, RecursionError) as e:
        raise wrong("quant_state", f"can't be read as JSON: {e}") from e
    if not isinstance(state, dict):
        raise wrong("quant_state", "is no JSON object")
    return state


def _unnested(
    codes: torch.Tensor, tensors: Mapping[str, torch.Tensor], state: Mapping[str, object]
) -> torch.Tensor:
    """The scales of blocks, themselves quantized in blocks."""
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= MAX_NESTED:
        says = f"nested_blocksize {str(block)[:100]} is no integer of 1 to {MAX_NESTED}"
        raise wrong("quant_state", says)
    largest = tensors["weight.nested_absmax"].float().flatten()
    if (
        not isinstance(offset, float | int)
        or not abs(offset) <= MAX_OFFSET
        or largest.numel() != math.ceil(codes.numel() / block)
    ):
        raise wrong("quant_state", "nested_blocksize and nested_offset do not fit nested_absmax")
    values = tensors["weight.nested_quant_map"][codes.long()]
    return values * largest.repeat_interleave(block)[: codes.numel()] + float(offset)

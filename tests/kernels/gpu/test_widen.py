"""The assembly that widens codes, on a machine without a GPU: each instruction by its definition in
NVIDIA's PTX manual, for every code.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from streamer.kernels.gpu.attention import widen

CODES = np.arange(256, dtype=np.uint8)
BF16, FP16 = torch.bfloat16, torch.float16


def run(assembly: str, word: int) -> tuple[int, int]:
    """$0 and $1 of a text whose $2 is `word`."""
    registers: dict[str, int] = {"$2": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in assembly.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *operands = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        results = OPERATIONS[name](*map(value, operands))
        if to.startswith("{"):  # a register's halves
            low, high = (half.strip() for half in to.strip("{}").split(","))
            registers |= {low: results & 0xFFFF, high: results >> 16}
        else:
            registers[to] = results
    return registers["$0"], registers["$1"]


def permuted(a: int, b: int, selector: int) -> int:
    """prmt: bytes of b and a, eight in all, by the selector's hexadecimal digits."""
    source = (b << 32 | a).to_bytes(8, "little")
    picked = [source[selector >> 4 * i & 7] for i in range(4)]
    return int.from_bytes(bytes(picked), "little")


def and_or(a: int, b: int, c: int, table: int) -> int:
    """lop3 with the table of (a & b) | c."""
    assert table == (0xF0 & 0xCC) | 0xAA
    return a & b | c


def halves(dtype: torch.dtype, operation: Any) -> Any:
    """An instruction of two numbers in each register."""

    def on(*words: int) -> int:
        pairs = (torch.tensor([n & 0xFFFF, n >> 16]).to(torch.uint16).view(dtype) for n in words)
        result = operation(*(pair.double() for pair in pairs))
        low, high = result.to(dtype).view(torch.uint16).tolist()
        return int(high) << 16 | int(low)

    return on


def converted(pair: int) -> int:
    """cvt.rn.f16x2.e4m3x2: exact."""
    codes = torch.tensor([pair & 0xFF, pair >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    low, high = codes.to(FP16).view(torch.uint16).tolist()
    return int(high) << 16 | int(low)


OPERATIONS: dict[str, Any] = {
    "prmt.b32": permuted,
    "lop3.b32": and_or,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mov.b32": lambda a: a,
    "fma.rn.bf16x2": halves(BF16, lambda x, y, z: x * y + z),
    "add.f16x2": halves(FP16, torch.add),
    "cvt.rn.f16x2.e4m3x2": converted,
}


@pytest.mark.parametrize(
    ("assembly", "codes", "dtype"),
    [
        (widen.INT8_TO_BF16, torch.int8, BF16),
        (widen.INT8_TO_FP16, torch.int8, FP16),
        (widen.E4M3_TO_BF16, torch.float8_e4m3fn, BF16),
        (widen.E4M3_TO_FP16, torch.float8_e4m3fn, FP16),
    ],
    ids=["int8-bf16", "int8-fp16", "e4m3-bf16", "e4m3-fp16"],
)
def test_every_code_is_widened_exactly(
    assembly: Any, codes: torch.dtype, dtype: torch.dtype
) -> None:
    """In each of a register's four places, beside other codes; e4m3's two NaN are left out."""
    found = []
    for word in CODES.reshape(-1, 4).view(np.uint32)[:, 0].tolist():
        found += run(assembly.value, word)
    made = torch.tensor(found).to(torch.uint32).view(torch.uint16).view(dtype)
    expected = torch.from_numpy(CODES).view(codes)
    is_number = ~expected.float().isnan()
    assert int(is_number.sum()) >= 254
    assert torch.equal(made.float()[is_number], expected.float()[is_number])

"""Codes of a quantized pool as numbers of q's dtype, in registers, which holds them exactly.

Triton's own conversions take three to eight instructions a code, and where the tensor core wants
values by columns they read shared memory a byte at a time. These take one to two and a half. They
are marked as impure so that Triton leaves them where codes have the order of memory. Inlined into
tile.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from streamer.kernels.gpu.common import IS_INTERPRETED

HAS_ASSEMBLY = tl.constexpr(not IS_INTERPRETED)

# Four codes of a register, $2, become two registers of two numbers, $0 and $1.
#
# bfloat16 0x4300 is 128 and 0xC380 -256, and the last bit of either is 1: 0x4300 with a code's low
# seven bits, and 0xC300 with its sign bit, are the code together. Before Hopper there is only the
# fused multiply and add of bfloat16: 0x3F80 is 1, and 0x8000 -0.
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, e, f, g;
    mov.b32 g, 0x3F803F80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 d, b, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 e, a, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 f, b, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $0, c, g, e;
    fma.rn.bf16x2 $1, d, g, f;
}""")
# float16 0x6400 is 1024, and its last bit is 1: with a code + 128 it is 1152 + the code.
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    xor.b32 a, $2, 0x80808080;
    mov.b32 d, 0xE480E480;
    prmt.b32 b, a, 0x64646464, 0x4140;
    prmt.b32 c, a, 0x64646464, 0x4342;
    add.f16x2 $0, b, d;
    add.f16x2 $1, c, d;
}""")
# An e4m3 number's exponent and mantissa at the end of bfloat16's exponent and the beginning of its
# mantissa are 2**-120 of it, subnormal ones too. NaN becomes 480: its head's scale is NaN.
E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, e, f;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
    mov.b32 e, 0x7B807B80;
    mov.b32 f, 0x80008000;
    fma.rn.bf16x2 $0, c, e, f;
    fma.rn.bf16x2 $1, d, e, f;
}""")
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Codes int8 or e4m3, by rows of at least four, as numbers of `dtype`."""
    IS_INT8: tl.constexpr = codes.dtype == tl.int8
    if HAS_ASSEMBLY and dtype == tl.bfloat16:
        TO_BF16: tl.constexpr = INT8_TO_BF16 if IS_INT8 else E4M3_TO_BF16
        bits = codes.to(tl.int8, bitcast=True)
        y = tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [bits], tl.bfloat16, False, 4)
    elif HAS_ASSEMBLY and dtype == tl.float16:
        TO_FP16: tl.constexpr = INT8_TO_FP16 if IS_INT8 else E4M3_TO_FP16
        bits = codes.to(tl.int8, bitcast=True)
        y = tl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [bits], tl.float16, False, 4)
    else:
        y = codes.to(dtype)
    return y

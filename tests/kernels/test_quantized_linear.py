"""Quantized linear layers of the native kernels: bit for bit their arithmetic, in any batch.

`exact` is that arithmetic in torch: activations rounded to int8, integer sums of each block, which
are scaled and added in order. `dequantize` is what it approximates.
"""

from __future__ import annotations

import hashlib
import math
import os

import pytest
import torch
import torch.nn.functional as F

from streamer.kernels import quantized
from streamer.kernels.cpu import native, quantized_linear
from streamer.kernels.cpu.program import team
from streamer.kernels.weights import QuantizedWeight, dequantize

FORMS = [  # bits, group, zero (-1: one for each group), offsets, table, permuted
    (4, 32, 8, False, False, False),
    (4, 32, 0, True, False, False),
    (4, 32, 128, False, True, False),
    (4, 16, 12, True, True, True),
    (3, 64, 4, False, False, True),
    (2, 16, 0, True, False, False),
    (4, 128, 8, True, False, False),
    (8, 32, 128, False, False, False),
    (8, 16, 128, False, False, True),
    (6, 16, 32, False, False, False),
    (5, 32, 0, True, False, False),
    (8, 0, 128, False, False, False),  # a scale for each output
    (4, 0, 8, True, False, False),
    (4, 32, -1, True, False, False),
    (3, 16, -1, True, False, True),
    (4, 128, -1, True, False, False),
    (4, 0, -1, True, False, False),
    (4, 64, 8, False, False, False),
    (4, 64, -1, True, False, False),
    (4, 64, -1, True, False, True),
    (8, 64, 0, True, False, False),
    (8, 128, 128, False, False, False),
    (8, 0, 0, True, False, False),
    (8, 32, 0, True, False, False),
    (8, 16, 0, True, False, False),
]
IS_OLD = "x86-64" in os.environ.get("CFLAGS", "")  # set by test_library.py
SHAPES = [(96, 160), (33, 200), (7, 40), (70, 331)]  # N, K
DIGEST = "b5c5ad5952dc20f1f9e741e80662a916"  # of the products of all forms and shapes


def make(
    n: int,
    k: int,
    form: tuple[int, int, int, bool, bool, bool],
    *,
    seed: int = 0,
    wide: bool = False,
) -> QuantizedWeight:
    """A random weight; `wide` has scales that float16 can't hold."""
    bits, group, zero, has_offsets, has_table, is_permuted = form
    random = torch.Generator().manual_seed(seed)
    group = group or k
    groups = -(-k // group)
    scales = (torch.rand(n, groups, generator=random) * 0.01 + 0.001).half().float()
    offsets = torch.randint(-2048, 2049, (n, groups), generator=random) / 2**15  # exact in float16
    zeros = None
    if wide:
        scales *= 1e-6
    if zero < 0:
        zero, zeros = 0, torch.randint(0, 2**bits, (n, groups), generator=random).byte()
    return QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), generator=random, dtype=torch.uint8),
        scales,
        group,
        bits,
        zero,
        offsets if has_offsets and zeros is None else None,
        torch.randint(0, 256, (16,), generator=random, dtype=torch.uint8) if has_table else None,
        torch.randperm(k, generator=random) if is_permuted else None,
        zeros=zeros,
    )


def inputs(rows: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once; the oldest machines round the product, too."""
    if IS_OLD:
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def exact(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """What the kernel computes before bias and rounding to x's dtype: float32 [T, N]."""
    n, k = weight.shape
    block, span = quantized_linear.block_of(weight)
    order = torch.arange(k) if weight.permutation is None else weight.permutation
    padding = (0, -k % block)
    ordered = F.pad(x.float()[:, order], (0, -k % span)).view(len(x), -1, span)
    activations, sizes = quantized.quantize(ordered, torch.int8)
    activations = activations.view(len(x), -1, block)[:, : -(-k // block)]
    codes = weight.codes if weight.table is None else weight.table[weight.codes.long()]
    values = F.pad(codes.double() - weight.zero, padding).view(n, -1, block)
    sums = torch.einsum("tbk,nbk->tnb", activations.double(), values)
    totals = activations.float().sum(-1)
    count, one = sums.shape[2], torch.ones(1)
    within = blocks_within(weight, block)
    is_long = weight.bits > 6 and within > 1
    length = within if is_long else count if weight.bits > 6 else span // block
    y = total = torch.zeros(len(x), n)
    activations = torch.zeros(len(x), 1)
    for b in range(count):
        g, product = b * block // weight.group, sums[:, :, b].float()
        scale, size = weight.scales[:, g], sizes[:, b * block // span, None]
        if weight.zeros is not None:
            product -= weight.zeros[:, g] * totals[:, b, None]
        own = one  # factors of a block's product, and then of the sum of several
        first, then = scale, size
        if is_long:
            first, then = size, scale
        elif weight.bits > 6:
            own, then = size, one
        total = fused(product * own, first, total)
        if weight.offsets is not None and is_long:
            activations = fused(size, totals[:, b, None], activations)
        elif weight.offsets is not None:
            total = fused(weight.offsets[:, g], totals[:, b, None] * own, total)
        if (b + 1) % length == 0 or b + 1 == count:
            y, total = fused(total, then, y), torch.zeros(len(x), n)
            if weight.offsets is not None and is_long:
                y = fused(weight.offsets[:, g], activations, y)
                activations = torch.zeros(len(x), 1)
    return y


def blocks_within(weight: QuantizedWeight, block: int) -> int:
    """Blocks of 8 bits that are added up before the scale of their group multiplies them."""
    per_group = -(-min(weight.group, weight.shape[1]) // block)
    return max(n for n in range(1, 17) if per_group % n == 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_its_arithmetic(
    n: int, k: int, form: tuple[int, int, int, bool, bool, bool]
) -> None:
    """Bit for bit, and within the rounding of the activations of the dequantized product."""
    weight = make(n, k, form)
    packed = native.pack_weight([weight], dtype=torch.float32)
    assert packed.shape == (n, k)
    x = inputs(13, k)
    y = packed(x)
    assert torch.equal(y, exact(weight, x))
    dense = dequantize(weight).double()
    # Each activation is off by at most half a step: 1/254 of the largest of its block.
    rounding = x.abs().amax(-1, keepdim=True).double() / 254 * dense.abs().sum(-1)
    assert ((y - x.double() @ dense.T).abs() <= rounding + 1e-5).all()


@pytest.mark.skipif(IS_OLD, reason="this machine has no fused multiply-add")
def test_every_cpu_gives_the_same_bits() -> None:
    """Of all forms and shapes: one digest on AVX512, AVX2 and ARM. No number is torch's `randn`,
    whose bits are the CPU's.
    """
    digest = hashlib.blake2b(digest_size=16)
    for dtype in (torch.float32, torch.bfloat16):
        for form in FORMS:
            for n, k in SHAPES:
                random = torch.Generator().manual_seed(k)
                x = torch.randint(-1000, 1001, (13, k), generator=random) / 256
                y = native.pack_weight([make(n, k, form)], dtype=dtype)(x.to(dtype))
                digest.update(y.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGEST


@pytest.mark.parametrize("k", [2500, 2560])  # of a block each 79, a prime number, and 80
@pytest.mark.parametrize("form", [FORMS[i] for i in (0, 3, 7, 9, 11, 13, 14, 21, 22, 23)])
def test_rows_too_long_for_one_pass(form: tuple[int, int, int, bool, bool, bool], k: int) -> None:
    """Many rows take K in pieces: of whole spans, so that the bits stay the same."""
    weight, x = make(40, k, form), inputs(13, k)
    packed = native.pack_weight([weight], dtype=torch.float32)
    expected = exact(weight, x)
    assert torch.equal(packed(x), expected)
    assert torch.equal(packed(x[12:]), expected[12:])


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3], FORMS[8], FORMS[13]])
def test_scales_that_float16_cannot_hold(form: tuple[int, int, int, bool, bool, bool]) -> None:
    """Stay float32."""
    weight, x = make(40, 70, form, wide=True), inputs(5, 70)
    assert torch.equal(native.pack_weight([weight], dtype=torch.float32)(x), exact(weight, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_depend_on_their_number(
    form: tuple[int, int, int, bool, bool, bool], dtype: torch.dtype
) -> None:
    """Bit for bit: alone, 1 to 40 rows, 480 and more, by one thread and by two."""
    n, k = 70, 150
    packed = native.pack_weight([make(n, k, form)], dtype=dtype)
    x = inputs(64, k, dtype)
    whole = packed(x)
    wrong = [r for r in range(1, 41) if not torch.equal(packed(x[:r]), whole[:r])]
    assert wrong == []
    assert torch.equal(packed(x[11:12]), whole[11:12])
    assert torch.equal(packed(x.repeat(9, 1)), whole.repeat(9, 1))
    team.set_threads(2)
    try:
        assert torch.equal(packed(x), whole)
        assert torch.equal(native.pack_weight([make(n, k, form)], dtype=dtype)(x), whole)
    finally:
        team.set_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_sum_and_gates(dtype: torch.dtype) -> None:
    """As a dense layer's: after the product, in float32, rounded once."""
    for n in (2, 34, 66):
        weight, x = make(n, 48, FORMS[0]), inputs(5, 48, dtype)
        bias = inputs(1, n, seed=3)[0]
        y = exact(weight, x) + bias
        assert torch.equal(native.pack_weight([weight], bias, dtype=dtype)(x), y.to(dtype))
        total = inputs(5, n, dtype, seed=4)
        expected = (total.float() + y).to(dtype)
        assert native.pack_weight([weight], bias, dtype=dtype)(x, add_to=total) is total
        assert torch.equal(total, expected)
        gated = native.pack_weight([weight], bias, "silu", dtype=dtype)(x)
        gate, up = y.chunk(2, -1)
        near = {"rtol": 1e-5 if dtype is torch.float32 else 2**-7, "atol": 1e-6}
        torch.testing.assert_close(gated.float(), F.silu(gate) * up, **near)


def test_parts_of_different_forms() -> None:
    """Side by side (q, k, v as Q4_K, Q6_K, dense), and as gates in the wider form."""
    k = 96
    four, six = make(33, k, FORMS[1]), make(20, k, FORMS[9], seed=1)
    dense = inputs(7, k, seed=2)
    x, bias = inputs(5, k), inputs(1, 93, seed=3)[0]
    y = native.pack_weight([four, make(33, k, FORMS[1]), six, dense], bias, dtype=torch.float32)(x)
    assert torch.equal(y[:, :33], exact(four, x) + bias[:33])
    assert torch.equal(y[:, 33:66] - bias[33:66], exact(four, x) + bias[33:66] - bias[33:66])
    assert torch.equal(y[:, 66:86], exact(six, x) + bias[66:86])
    torch.testing.assert_close(y[:, 86:], x @ dense.T + bias[86:], rtol=1e-5, atol=1e-5)
    for pair in ([four, make(33, k, FORMS[9])], [make(33, k, FORMS[3]), make(33, k, FORMS[2])]):
        gates = native.pack_weight(pair, None, "silu", dtype=torch.float32)(x)
        gate, up = (x @ dequantize(part).T for part in pair)
        rounding = 0.02 * (1 + gate.abs().max()) * (1 + up.abs().max())
        torch.testing.assert_close(gates, F.silu(gate) * up, rtol=0.0, atol=float(rounding))


@pytest.mark.parametrize(
    "forms",
    [[FORMS[0], FORMS[1]], [FORMS[9], FORMS[1]], [FORMS[2], FORMS[11]], [FORMS[7], FORMS[6]]],
)
def test_the_wider_form_holds_the_same_values(
    forms: list[tuple[int, int, int, bool, bool, bool]],
) -> None:
    parts = [make(9, 200, form, seed=i) for i, form in enumerate(forms)]
    wide = quantized_linear.widest(parts)
    for part, expected in zip(wide, parts, strict=True):
        assert isinstance(part, QuantizedWeight)
        torch.testing.assert_close(dequantize(part), dequantize(expected), rtol=1e-5, atol=1e-7)
    assert len(quantized_linear.runs(wide)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_zero_points_take_as_many_bits_as_codes(
    form: tuple[int, int, int, bool, bool, bool],
) -> None:
    """Where offsets are those of 4-bit codes: 4.63 bits a weight in groups of 32, not 5."""
    weight = make(64, 256, form)
    (matrix,) = native.pack_weight([weight], dtype=torch.float32).matrices
    (other,) = native.pack_weight([weight.with_offsets()], dtype=torch.float32).matrices
    assert (weight.zeros is None) == (form[2] >= 0)
    assert other.num_bytes >= matrix.num_bytes
    if form[:3] == (4, 32, -1):
        assert matrix.num_bytes == 64 * 256 * 37 // 64
        assert other.num_bytes == 64 * 256 * 5 // 8


def test_float8_becomes_integers() -> None:
    """By a fifth of float8's own rounding, on the average."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(40, 200, generator=random)
    codes = (values * 100).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(codes, torch.full((40, 2), 0.01), 128, 8)
    integers = quantized_linear.as_integers(weight).unpacked()
    error = (dequantize(integers) - dequantize(weight)).square().mean().sqrt()
    own = (dequantize(weight) - values).square().mean().sqrt()
    assert own / 6 < error < own / 4
    x = inputs(3, 200)
    packed = native.pack_weight([weight], dtype=torch.float32)
    assert torch.equal(packed(x), exact(integers, x))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(value: float, dtype: torch.dtype) -> None:
    """In that row; the others do not change."""
    for form in FORMS:
        packed = native.pack_weight([make(20, 100, form)], dtype=dtype)
        x = inputs(9, 100, dtype)
        expected = packed(x)
        x[4, 77] = value
        y = packed(x)
        assert y[4].isnan().all()
        others = torch.arange(9) != 4
        assert torch.equal(y[others], expected[others])


def test_zeros_and_tiny_inputs() -> None:
    """Blocks without a usable scale are zeros."""
    packed = native.pack_weight([make(20, 64, FORMS[1])], dtype=torch.float32)
    x = torch.zeros(2, 64)
    x[1] = 1e-36
    assert torch.equal(packed(x), torch.zeros(2, 20))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table(form: tuple[int, int, int, bool, bool, bool], dtype: torch.dtype) -> None:
    """Dequantized, in the order of x."""
    weight = make(70, 90, form)
    table = native.pack_weight([weight], dtype=dtype, is_table=True)
    tokens = torch.tensor([69, 0, 31, 32, 33, 5])
    near = {"rtol": 1e-6 if dtype is torch.float32 else 2**-8, "atol": 1e-8}
    torch.testing.assert_close(table.rows(tokens).float(), dequantize(weight)[tokens], **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_dense_table(dtype: torch.dtype) -> None:
    """The same memory serves as embedding and as head."""
    for n, k in ((70, 33), (5, 64)):
        weight = inputs(n, k, dtype)
        table = native.pack_weight([weight], is_table=True)
        assert torch.equal(table.rows(torch.arange(n).flip(0)), weight.flip(0))


def test_a_large_vocabulary() -> None:
    """151,936 outputs with zero points, as head and as table, in rows of one group and a half."""
    n, k = 151_936, 96
    weight = make(n, k, (4, 64, -1, True, False, False))
    packed = native.pack_weight([weight], dtype=torch.float32, is_table=True)
    x = inputs(2, k)
    assert torch.equal(packed(x), exact(weight, x))
    last = torch.tensor([n - 1])
    torch.testing.assert_close(packed.rows(last), dequantize(weight)[last])


def test_a_strided_input() -> None:
    """A view of a wider tensor."""
    weight, x = make(40, 48, FORMS[0]), inputs(3, 96)
    y = native.pack_weight([weight], dtype=torch.float32)(x[:, 48:])
    assert torch.equal(y, exact(weight, x[:, 48:]))


def test_a_group_that_has_no_form_is_refused() -> None:
    weight = QuantizedWeight(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 4), 24, 4)
    with pytest.raises(ValueError, match="groups of 24 columns"):
        native.pack_weight([weight], dtype=torch.float32)

"""Codes as files have them: panels made of them are those made of the same codes, one a byte."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import pytest
import torch

from streamer.kernels import reference
from streamer.kernels.cpu import blocks, native, quantized_linear
from streamer.kernels.cpu.linear import Linear
from streamer.kernels.weights import NotFinite, QuantizedWeight, columns_of, dequantize, rows_of

K = 768  # more than pack.c takes at once
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's outputs, from the lowest bits up


def stored(name: str, n: int, bits: int, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes as a layout has them, and one a byte."""
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), generator=random, dtype=torch.uint8)
    if name == "BYTES":
        return codes, codes
    if name == "SIGNED":
        return (codes.int() - 128).to(torch.int8), codes
    if name == "NIBBLES":
        return codes[:, ::2] | codes[:, 1::2] << 4, codes
    wide = codes.long()
    if name == "OUTPUTS":
        fields = wide.t().reshape(k, n // 8, 8)
        shifts = torch.tensor(AWQ_PLACES) * 4
    else:
        wide = torch.nn.functional.pad(wide, (0, -k % (32 // bits)))
        fields = wide.view(n, -1, 32 // bits).transpose(0, 1).transpose(1, 2)
        fields = fields.transpose(1, 2)
        shifts = torch.arange(0, 32, bits)
    return (fields << shifts).sum(-1).to(torch.uint32).view(torch.int32), codes


CASES = [("BYTES", 8), ("SIGNED", 8), ("NIBBLES", 4), ("OUTPUTS", 4)]
CASES += [("WORDS", bits) for bits in (2, 4, 8)]


def weights(
    name: str, n: int, bits: int, *, is_permuted: bool = False
) -> tuple[QuantizedWeight, QuantizedWeight]:
    data, codes = stored(name, n, bits)
    scales = torch.rand(n, K // 32).half().float() + 1
    order = torch.randperm(K) if is_permuted else None
    layout = blocks.layout(name, n, K)
    kept = QuantizedWeight(data, scales, 32, bits, 3, permutation=order, layout=layout)
    codes = codes if order is None else codes[:, order]
    return kept, QuantizedWeight(codes, scales, 32, bits, 3, permutation=order)


def panels(linear: Linear) -> list[torch.Tensor]:
    found = []
    for matrix in linear.matrices:
        assert isinstance(matrix, quantized_linear.Quantized)
        found.append(matrix._packed)
    return found


def same(a: Linear, b: Linear) -> bool:
    return all(torch.equal(x, y) for x, y in zip(panels(a), panels(b), strict=True))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("n", [64, 24, 88])
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_panels_of_stored_codes_are_those_of_bytes(
    name: str, bits: int, n: int, is_gated: bool
) -> None:
    kept, plain = weights(name, n, bits)
    activation = "silu" if is_gated else None
    packed = [
        native.pack_weight([part], None, activation, dtype=torch.float32) for part in (kept, plain)
    ]
    assert same(*packed)
    assert torch.equal(dequantize(kept), dequantize(plain))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("group", [32, 128, K])
def test_panels_of_the_same_words_are_made_together(group: int, is_gated: bool) -> None:
    """A few columns of each in turn, a group going on where the columns before ended; the last
    panels are fewer and not whole."""
    n = 840
    data, codes = stored("OUTPUTS", n, 4)
    scales = torch.rand(n, K // group).half().float() + 1
    zeros = torch.randint(0, 16, (n, K // group)).byte()
    kept = QuantizedWeight(
        data, scales, group, 4, zeros=zeros, layout=blocks.layout("OUTPUTS", n, K)
    )
    plain = QuantizedWeight(codes, scales, group, 4, zeros=zeros)
    activation = "silu" if is_gated else None
    packed = [
        native.pack_weight([part], None, activation, dtype=torch.float32) for part in (kept, plain)
    ]
    assert same(*packed)
    assert torch.equal(kept.unpacked().codes, codes)


def tall(x: torch.Tensor) -> torch.Tensor:
    """The same, the rows of a column side by side in memory."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("beside", ["nothing", "offsets", "zeros"])
@pytest.mark.parametrize("n", [64, 24, 88])
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_numbers_by_groups_are_packed_as_those_by_outputs(
    name: str, bits: int, n: int, beside: str, activation: str | None
) -> None:
    """One part, gates and ups, and parts of both kinds, which are stacked or cut."""
    kept = weights(name, n, bits)[0]
    if beside == "offsets":
        kept = dataclasses.replace(kept, offsets=torch.rand(n, K // 32).half().float())
    if beside == "zeros":
        zeros = torch.randint(0, 1 << bits, (n, K // 32)).byte()
        kept = dataclasses.replace(kept, zero=0, zeros=zeros)
    by_groups = dataclasses.replace(
        kept,
        scales=tall(kept.scales),
        offsets=None if kept.offsets is None else tall(kept.offsets),
        zeros=None if kept.zeros is None else tall(kept.zeros),
    )
    for count in (1, 2, 3) if activation is None else (1, 2):
        expected = native.pack_weight([kept] * count, None, activation, dtype=torch.float32)
        for last in (kept, by_groups):
            parts = [by_groups] * (count - 1) + [last]
            assert same(native.pack_weight(parts, None, activation, dtype=torch.float32), expected)


@pytest.mark.parametrize("k", [20, 100, 516, 522, 1000])
@pytest.mark.parametrize(
    ("name", "bits"), [("OUTPUTS", 4), ("WORDS", 2), ("WORDS", 4), ("WORDS", 8)]
)
def test_columns_may_end_within_a_word_or_what_is_read_at_once(
    name: str, bits: int, k: int
) -> None:
    data, codes = stored(name, 40, bits, k)
    scales = torch.ones(40, -(-k // 32))
    kept = QuantizedWeight(data, scales, 32, bits, 3, layout=blocks.layout(name, 40, k))
    plain = QuantizedWeight(codes, scales, 32, bits, 3)
    packed = [native.pack_weight([part], dtype=torch.float32) for part in (kept, plain)]
    assert same(*packed)
    assert torch.equal(kept.unpacked().codes, codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_columns_in_an_order_are_gathered_as_words_are_read(bits: int) -> None:
    kept, plain = weights("WORDS", 40, bits, is_permuted=True)
    packed = [native.pack_weight([part], dtype=torch.float32) for part in (kept, plain)]
    assert same(*packed)
    assert torch.equal(dequantize(kept), dequantize(plain))


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_parts_are_stacked_and_cut(name: str, bits: int) -> None:
    """Neighbours of a layout, and one beside codes a byte; what ranks take of a weight."""
    kept, plain = weights(name, 64, bits)
    whole = native.pack_weight([plain, plain], dtype=torch.float32)
    assert same(native.pack_weight([kept, kept], dtype=torch.float32), whole)
    assert same(native.pack_weight([kept, plain], dtype=torch.float32), whole)
    for part in (rows_of(kept, 8, 24), columns_of(kept, 64, 128)):
        assert isinstance(part, QuantizedWeight)
        assert part.layout is None
        assert math.prod(part.shape) == part.codes.numel()
    assert torch.equal(dequantize(rows_of(kept, 8, 24)), dequantize(plain)[8:24])
    assert torch.equal(dequantize(columns_of(kept, 64, 128)), dequantize(plain)[:, 64:128])


@pytest.mark.parametrize("n", [64, 24, 40])
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_gates_and_ups_are_packed_from_where_they_are(name: str, bits: int, n: int) -> None:
    gates, ups = (weights(name, n, bits) for _ in range(2))
    pair = native.pack_weight([gates[0], ups[0]], None, "silu", dtype=torch.float32)
    whole = dataclasses.replace(
        gates[1],
        codes=torch.cat([gates[1].codes, ups[1].codes]),
        scales=torch.cat([gates[1].scales, ups[1].scales]),
    )
    assert same(pair, native.pack_weight([whole], None, "silu", dtype=torch.float32))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("k", [K, 700, 20, 520, 1000])
def test_float8_becomes_the_same_integers_in_panels(
    k: int, group: int, activation: str | None
) -> None:
    """Also in rows that end within a group, a vector, and what is read at once."""
    random = torch.Generator().manual_seed(k)
    codes = torch.randn(40, k, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(40, -(-k // (group or k)), generator=random) + 1
    weight = QuantizedWeight(codes, scales, group or k, 8)
    integers = quantized_linear.as_integers(weight).unpacked()
    packed = [
        native.pack_weight([part], None, activation, dtype=torch.float32)
        for part in (weight, integers)
    ]
    assert same(*packed)
    size = integers.group
    values = torch.nn.functional.pad(codes.double(), (0, -k % size)).view(40, -1, size)
    largest = values.abs().amax(-1, keepdim=True)
    levels = torch.where(largest > 0, 127 * values / largest, 0).round() + 128
    assert torch.equal(integers.codes, levels.flatten(1)[:, :k].to(torch.uint8))
    dense, got = dequantize(weight), dequantize(integers)
    steps = (largest / 127).expand_as(values).flatten(1)[:, :k]
    steps = steps * scales.repeat_interleave(group or k, 1)[:, :k]
    rounded = dense.abs() * 2**-11  # by the scale, as float16
    assert bool(((got - dense).abs() <= steps * 0.501 + rounded).all())


@pytest.mark.parametrize("name", blocks.FORMATS)
def test_panels_of_ggufs_blocks_are_those_of_bytes(name: str) -> None:
    from streamer.model.gguf.blocks import LAYOUTS, unpack

    each = LAYOUTS[name]
    raw = torch.randint(0x20, 0x40, (56, K // each.weights * each.bytes), dtype=torch.uint8)
    kept = unpack(name, raw)
    assert kept.layout is not None
    packed = [
        native.pack_weight([part], None, "silu", dtype=torch.float32)
        for part in (kept, kept.unpacked())
    ]
    assert same(*packed)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "MXFP4"])
def test_a_single_group_is_followed_by_zeros(name: str) -> None:
    """Codes of 32 columns are packed as a block of 128."""
    from streamer.model.gguf.blocks import LAYOUTS, unpack

    kept = unpack(name, torch.randint(0x20, 0x40, (40, LAYOUTS[name].bytes), dtype=torch.uint8))
    packed = [native.pack_weight([part], dtype=torch.float32) for part in (kept, kept.unpacked())]
    assert same(*packed)


@pytest.mark.parametrize("exponent", [248, 253, 255])
def test_exponents_whose_weights_may_be_infinite_are_refused(exponent: int) -> None:
    """MXFP4's scale itself is a number: half of 2 ** (exponent - 127)."""
    from streamer.model.gguf.blocks import unpack

    raw = torch.full((40, 17), 0x77, dtype=torch.uint8)
    raw[:, 0] = 247
    native.pack_weight([unpack("MXFP4", raw)], dtype=torch.float32)
    raw[3, 0] = exponent
    with pytest.raises(NotFinite):
        native.pack_weight([unpack("MXFP4", raw)], dtype=torch.float32)


@pytest.mark.parametrize("is_first", [True, False])
def test_blocks_that_are_no_numbers_are_refused_beside_dense_gates(is_first: bool) -> None:
    """Both are packed dense then."""
    from streamer.model.gguf.blocks import unpack

    raw = torch.full((40, 144), 0x20, dtype=torch.uint8)
    raw[3, :2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    parts = [unpack("Q4_K", raw), torch.ones(40, 256)]
    with pytest.raises(NotFinite):
        native.pack_weight(parts if is_first else parts[::-1], None, "silu", dtype=torch.float32)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 31, 500, 511, 512, 575, 580])
@pytest.mark.parametrize("per", [16, 64, 588])
def test_float8_codes_that_are_no_numbers_are_refused(code: int, column: int, per: int) -> None:
    """Wherever they stand: in groups that are compared together, among the last ones, in a group
    that is not whole; beside the largest numbers, alone or stacked with others, or dense."""
    codes = torch.full((40, 588), 0x7E, dtype=torch.uint8)
    codes[1::2] = 0xFE
    scales = torch.ones(40, -(-588 // per))

    def weight() -> QuantizedWeight:
        return QuantizedWeight(codes.view(torch.float8_e4m3fn), scales, per, 8)

    native.pack_weight([weight()], dtype=torch.float32)
    codes[33, column] = code
    for parts in ([weight()], [weight(), torch.ones(40, 588)]):
        with pytest.raises(NotFinite):
            native.pack_weight(parts, dtype=torch.float32)
    with pytest.raises(NotFinite):
        native.pack_weight([weight(), weight()], None, "silu", dtype=torch.float32)
    with pytest.raises(NotFinite):
        reference.pack_weight([weight()], dtype=torch.float32)


@pytest.mark.parametrize("kernels", [native, reference], ids=lambda kernels: kernels.__name__)
@pytest.mark.parametrize("beside", [0, 1])
def test_what_is_infinite_in_bfloat16_alone_is_refused(kernels: ModuleType, beside: int) -> None:
    """A weight of 3.4e38, dense or among dense ones."""
    codes = torch.full((64, 64), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts = [QuantizedWeight(codes, torch.full((64, 1), 7.59e35), 64, 8)]
    dense = [torch.ones(64, 64)] * beside
    assert dequantize(parts[0]).isfinite().all()
    with pytest.raises(NotFinite):
        kernels.pack_weight(
            [*parts, *dense], None, "silu" if beside else None, dtype=torch.bfloat16
        )

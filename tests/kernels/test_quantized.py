"""K and V in INT8 and FP8: errors of a code, bit equality of backends, attention over the codes."""

from __future__ import annotations

import math

import pytest
import torch

from streamer.kernels import ops, quantized, reference
from tests.kernels.oracle import Case, rand

DTYPES = [torch.int8, torch.float8_e4m3fn]
MIXED = [(1, 1), (1, 15), (7, 7), (1, 16), (5, 21), (1, 17), (1, 33), (11, 40), (3, 35), (20, 70)]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
OPTIONS = [{}, {"sliding_window": 9}, {"softcap": 2.0}, {"sliding_window": 20, "softcap": 0.7}]


def quantized_case(rows: list[tuple[int, int]], dtype: torch.dtype, **shape: int) -> Case:
    """A case whose stored K and V are codes, and whose `k` and `v` are the values of these codes.

    K and V that the step itself stores are left as they are, for the store to quantize.
    """
    case = Case(rows, **shape)  # type: ignore[arg-type]
    blocks, layers, _, heads, block, dim = case.pool.shape
    pool = reference.new_pool(blocks, layers, block, heads, dim, dtype, "cpu")
    pool.view(torch.int8).fill_(-1)  # NaN as FP8, and as a scale
    layer, old = ops.layer_view(pool, case.layer), ops.layer_view(case.pool, case.layer)
    codes, scales = quantized.quantize(old, dtype)
    # What a case has not stored is NaN; as a code it is whatever the conversion makes of NaN.
    layer.view(torch.int8)[:, :, :, :block] = codes.view(torch.int8)
    quantized.scales_of(layer, block).copy_(scales)
    case.pool = pool
    return case


def read_back(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x after a store and a load, in float64."""
    codes, scales = quantized.quantize(x, dtype)
    return codes.float().double() * scales.double().unsqueeze(-1)


def as_stored(case: Case, dtype: torch.dtype) -> None:
    """Replace the case's K and V by the values of their codes."""
    case.k, case.v = ([read_back(x, dtype) for x in side] for side in (case.k, case.v))


def off_by(backend: str, dtype: torch.dtype) -> float:
    """The allowed difference of codes: a GPU that fuses operations may round to the next one."""
    if backend != "cuda":
        return 0.0
    return 1.0 if dtype is torch.int8 else 32.0


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_of_a_code_is_bounded(dtype: torch.dtype, spread: float) -> None:
    """By half a step of INT8; by 2**-4 of the element, or 2**-10 of the scale, of e4m3."""
    x = rand(500, 64) * torch.logspace(-3, 3, 500)[:, None] * spread
    x[7] = 0.0
    x[8] *= torch.logspace(-6, 0, 64)
    _, scales = quantized.quantize(x, dtype)
    error = (read_back(x, dtype) - x.double()).abs()
    steps = scales.double().unsqueeze(-1).expand_as(x)
    if dtype is torch.int8:
        bound = steps / 2
    else:
        bound = torch.maximum(x.double().abs() / 16, steps * 2**-10)
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert float((error / bound.clamp(min=1e-30)).max()) > 0.9  # the bound is nearly reached
    assert not read_back(x, dtype)[7].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_that_is_not_finite_stays_so(
    kernels: ops.Backend, dtype: torch.dtype, bad: float, backend: str
) -> None:
    case = quantized_case([(3, 3)], dtype, heads=2, kv_heads=2, dim=16, block=4)
    case.k[0][1, 0, 3] = bad
    layer = ops.layer_view(case.pool, case.layer)
    kernels.store_kv(case.new_k(), case.new_v(), layer, case.batch())
    scales = quantized.scales_of(layer, 4)[case.slots // 4, 0, :, case.slots % 4]
    assert scales.isfinite().tolist() == [[True, True], [False, True], [True, True]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_contiguous_and_holds_its_scales(
    kernels: ops.Backend, dtype: torch.dtype, backend: str
) -> None:
    pool = kernels.new_pool(5, 3, 16, 2, 8, dtype)
    assert pool.shape == (5, 3, 2, 2, 16 + 8, 8)  # 16 scales of 4 bytes in rows of 8
    assert pool[4].is_contiguous()
    assert pool[0].nbytes == ops.block_bytes(3, 16, 2, 8, dtype)
    view = quantized.scales_of(ops.layer_view(pool, 1), 16)
    assert view.shape == (5, 2, 2, 16)
    view[3, 1, 0, 15] = 2.5
    rows = pool[3, 1, 1, 0, 16:]
    written = rows.view(torch.int8).count_nonzero()
    assert pool.view(torch.int8).count_nonzero() == written > 0
    assert float(rows.reshape(-1).view(torch.float32)[15]) == 2.5


@pytest.mark.parametrize("dim", [6, 30])
def test_heads_without_room_for_whole_scales_are_refused(
    kernels: ops.Backend, dim: int, backend: str
) -> None:
    with pytest.raises(ValueError, match=f"head_dim {dim} must be a multiple of 4"):
        kernels.new_pool(2, 1, 16, 1, dim, torch.int8)


def test_a_block_takes_little_more_than_half_of_bfloat16s() -> None:
    half = ops.block_bytes(32, 16, 8, 128, torch.bfloat16)
    assert half == 2_097_152
    assert ops.block_bytes(32, 16, 8, 128, torch.int8) / half == 17 / 32


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_codes_are_the_references(
    kernels: ops.Backend, dtype: torch.dtype, source: torch.dtype, backend: str
) -> None:
    """Equal, ties and subnormal codes included; a GPU that fuses operations may be a step off."""
    k = rand(60, 3, 64) * torch.logspace(-4, 4, 60)[:, None, None]
    k[3, 1] = torch.arange(64) / 2 - 16  # ties
    k[3, 1, 0] = 127.0 if dtype is torch.int8 else 448.0
    k[4] *= torch.logspace(-8, 0, 64)
    k[5, 2] = 0.0
    k, v = k.to(source), (rand(60, 3, 64, seed=1) * 3).to(source)
    slots = torch.randperm(72, generator=torch.Generator().manual_seed(0))[:60]
    codes, scales = [], []
    for store in (reference.store_kv, kernels.store_kv):
        pool = kernels.new_pool(9, 2, 8, 3, 64, dtype)
        batch = ops.AttentionBatch(
            query_lens=[60],
            context_lens=[60],
            block_tables=torch.zeros(1, 8, dtype=torch.int64),
            slots=slots,
            block_size=8,
        )
        store(k, v, ops.layer_view(pool, 1), batch)
        assert not pool[:, 0].view(torch.int8).any()
        codes.append(pool[:, 1, :, :, :8].float())
        scales.append(quantized.scales_of(ops.layer_view(pool, 1), 8))
    assert torch.equal(*scales)
    assert scales[0].count_nonzero() == 2 * 3 * 60 - 1
    assert float((codes[0] - codes[1]).abs().max()) <= off_by(backend, dtype)
    assert int(codes[0].count_nonzero()) > 20_000


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_stores_what_store_kv_does(
    kernels: ops.Backend, dtype: torch.dtype, has_norms: bool, backend: str
) -> None:
    """k to float32 rounding of this backend, v to the bit."""
    tables = kernels.rope_tables(rand(20, 16) * 5, torch.float32)
    positions, slots = torch.tensor([3, 19, 0]), torch.tensor([7, 2, 16])
    qkv = rand(3, 6 * 64)
    norms = (rand(64, seed=1), rand(64, seed=2)) if has_norms else None
    pools, outs = [], []
    for kind in (torch.float32, dtype):
        pool = kernels.new_pool(5, 2, 4, 2, 64, kind)
        batch = ops.AttentionBatch(
            query_lens=[3],
            context_lens=[3],
            block_tables=torch.zeros(1, 1, dtype=torch.int64),
            slots=slots,
            block_size=4,
        )
        layer = ops.layer_view(pool, 1)
        outs.append(
            kernels.rope_and_store(qkv, tables, positions, layer, batch, norms=norms, eps=1e-5)
        )
        pools.append(layer)
    assert torch.equal(*outs)
    stored = pools[0][slots // 4, :, :, slots % 4]
    scales = quantized.scales_of(pools[1], 4)[slots // 4, :, :, slots % 4]
    codes = pools[1].view(torch.int8)[slots // 4, :, :, slots % 4].view(dtype)
    want, want_scales = quantized.quantize(stored, dtype)
    assert torch.equal(scales, want_scales)
    assert float((codes.float() - want.float()).abs().max()) <= off_by(backend, dtype)
    assert int(pools[1][0].view(torch.int8).count_nonzero()) > 0  # slot 2 alone
    assert not pools[1][2:4].view(torch.int8).any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_codes(
    kernels: ops.Backend, dtype: torch.dtype, options: dict[str, float], backend: str
) -> None:
    """As near to float64 on what the codes stand for as float32 attention is on its values."""
    heads, kv_heads, dim = (3, 3, 80) if "softcap" in options else (4, 2, 64)
    case = quantized_case(MIXED, dtype, heads=heads, kv_heads=kv_heads, dim=dim, block=16)
    out = case.run(kernels, dim**-0.5, **options)
    as_stored(case, dtype)
    want = case.expected(dim**-0.5, **options)
    torch.testing.assert_close(out.double(), want, **CLOSE[torch.float32])


@pytest.mark.parametrize("dim", [4, 36, 96, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_codes_of_other_heads(
    kernels: ops.Backend, dtype: torch.dtype, dim: int, backend: str
) -> None:
    """Heads that are no multiple of a vector, blocks that are none of a tile, sinks."""
    if backend == "triton":
        pytest.skip("its tiles have one width; tests/kernels/gpu has its shapes")
    case = quantized_case([(1, 1), (5, 40), (1, 33)], dtype, heads=6, kv_heads=2, dim=dim, block=5)
    sinks = torch.linspace(-3.0, 3.0, 6)
    out = case.run(kernels, dim**-0.5, sinks=sinks)
    as_stored(case, dtype)
    want = case.expected(dim**-0.5, sinks=sinks)
    torch.testing.assert_close(out.double(), want, **CLOSE[torch.float32])


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_codes_in_bfloat16(
    kernels: ops.Backend, dtype: torch.dtype, dim: int, backend: str
) -> None:
    if backend == "triton" and dim != 64:
        pytest.skip("interpreted: slow")
    case = quantized_case(MIXED, dtype, heads=4, kv_heads=2, dim=dim, block=16)
    for tensors in (case.q, case.k, case.v):
        tensors[:] = [t.bfloat16() for t in tensors]
    layer, batch = ops.layer_view(case.pool, case.layer), case.batch()
    kernels.store_kv(case.new_k(), case.new_v(), layer, batch)
    stored = [(t, r) for t in (case.k, case.v) for r in range(len(MIXED))]
    for tensors, r in stored:  # earlier K and V came from float32
        before = MIXED[r][1] - MIXED[r][0]
        side = 0 if tensors is case.k else 1
        at = torch.arange(before)
        blocks = case.tables[r][at // 16]
        codes = layer.view(torch.int8)[blocks, side, :, at % 16].view(dtype).float()
        scales = quantized.scales_of(layer, 16)[blocks, side, :, at % 16]
        old, new = codes * scales.unsqueeze(-1), read_back(tensors[r][before:], dtype).float()
        tensors[r] = torch.cat([old, new])
    out = kernels.paged_attention(torch.cat(case.q), layer, batch, 0.125)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected(0.125), **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_moves_little_when_its_cache_is_quantized(
    kernels: ops.Backend, dtype: torch.dtype, backend: str
) -> None:
    """The error from 8 bits, for random heads, against no quantization. INT8 has less of it."""
    case = quantized_case(MIXED, dtype, heads=4, kv_heads=2, dim=64, block=16)
    exact = case.expected(0.125)
    error = (case.run(kernels, 0.125).double() - exact).pow(2).mean().sqrt() / exact.pow(
        2
    ).mean().sqrt()
    low, high = (0.002, 0.015) if dtype is torch.int8 else (0.01, 0.05)
    assert low < float(error) < high


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bit_equal_alone_and_in_a_batch(
    kernels: ops.Backend, dtype: torch.dtype, source: torch.dtype, backend: str
) -> None:
    rows = [(1, context) for context in (1, 16, 17, 40, 130, 300)]
    case = quantized_case(rows, dtype, heads=4, kv_heads=2, dim=64, block=16)
    for tensors in (case.q, case.k, case.v):
        tensors[:] = [t.to(source) for t in tensors]
    together = case.run(kernels, 0.1)
    layer = ops.layer_view(case.pool, case.layer)
    for r, (_, context) in enumerate(rows):
        batch = ops.AttentionBatch(
            query_lens=[1],
            context_lens=[context],
            block_tables=case.tables[r : r + 1],
            slots=case.slots[r : r + 1],
            block_size=16,
        )
        assert torch.equal(kernels.paged_attention(case.q[r], layer, batch, 0.1)[0], together[r])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("source", "dim"), [(torch.float32, 32), (torch.bfloat16, 64)], ids=str)
def test_a_poisoned_row_stays_alone(
    kernels: ops.Backend, dtype: torch.dtype, source: torch.dtype, dim: int
) -> None:
    """Beyond a row's context blocks and scales are NaN in every case here; so is a neighbour."""
    cases = []
    for _ in range(2):
        shape = {"heads": 4, "kv_heads": 2, "dim": dim, "block": 16}
        cases.append(quantized_case([(1, 20), (1, 21), (3, 22)], dtype, **shape))
        for tensors in (cases[-1].q, cases[-1].k, cases[-1].v):
            tensors[:] = [t.to(source) for t in tensors]
    clean = cases[0].run(kernels, 0.2)
    assert clean.isfinite().all()
    cases[1].v[1][20, :, 5] = torch.inf
    out = cases[1].run(kernels, 0.2)
    keep = [0, 2, 3, 4]
    assert torch.equal(out[keep], clean[keep])
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_travel_with_their_block(
    kernels: ops.Backend, dtype: torch.dtype, backend: str
) -> None:
    """Copied within the pool, and swapped to another and back, attention gives the same bits."""
    case = quantized_case([(1, 40)], dtype, heads=2, kv_heads=1, dim=16, block=16)
    whole = case.run(kernels, 0.2)
    old = case.tables[0].clone()
    pool, count = case.pool, case.pool.shape[0]
    host = kernels.new_pool(4, pool.shape[1], 16, 1, 16, dtype)
    table = old.tolist()
    kernels.swap_blocks(pool, host, list(zip(table, (2, 0, 1), strict=True)))
    pool.view(torch.int8)[old] = -1
    fresh = [b for b in range(count) if b not in table][:3]
    kernels.swap_blocks(host, pool, list(zip((2, 0, 1), fresh, strict=True)))
    kernels.copy_blocks(pool, torch.tensor(fresh), old)
    layer = ops.layer_view(pool, case.layer)
    again = kernels.paged_attention(torch.cat(case.q), layer, case.batch(), 0.2)
    assert torch.equal(again, whole)


# Heads, KV heads, D, tokens of a block, options: what attention_codes.c multiplies as integers.
WHOLE: list[tuple[int, int, int, int, dict[str, float]]] = [
    (2, 2, 64, 16, {}),
    (4, 2, 128, 16, {"sliding_window": 9}),
    (6, 2, 64, 5, {"softcap": 2.0}),
    (8, 2, 128, 8, {"sliding_window": 40, "softcap": 0.7}),
    (7, 1, 192, 16, {}),
    (2, 1, 512, 32, {}),
]


def chunk_of(case: Case, first: int, last: int) -> ops.AttentionBatch:
    """Tokens `first` to `last` of a case's only row."""
    return ops.AttentionBatch(
        query_lens=[last - first],
        context_lens=[last],
        block_tables=case.tables,
        slots=case.slots[first:last],
        block_size=case.block,
    )


def bfloat16_row(count: int, *, heads: int, kv_heads: int, dim: int, block: int) -> Case:
    """A row of `count` new tokens of a model in bfloat16, for a pool of INT8."""
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block": block}
    case = quantized_case([(count, count)], torch.int8, **shape)
    for tensors in (case.q, case.k, case.v):
        tensors[:] = [t.bfloat16() for t in tensors]
    return case


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block", "options"), WHOLE, ids=str)
def test_attention_in_integers(
    kernels: ops.Backend,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    options: dict[str, float],
) -> None:
    """Near the definition, with the same bits in any chunk; values and keys may be zeros."""
    case = bfloat16_row(70, heads=heads, kv_heads=kv_heads, dim=dim, block=block)
    case.k[0][5] = case.v[0][7] = 0
    case.v[0][:32, 0] = 0
    sinks = torch.linspace(-3.0, 3.0, heads) if block == 16 else None
    whole = case.run(kernels, dim**-0.5, sinks=sinks, **options)
    layer = ops.layer_view(case.pool, case.layer)
    for first, last in ((0, 1), (0, 33), (31, 70), (69, 70), (16, 49), (64, 66)):
        part = kernels.paged_attention(
            case.q[0][first:last],
            layer,
            chunk_of(case, first, last),
            dim**-0.5,
            sinks=sinks,
            **options,  # type: ignore[arg-type]
        )
        assert torch.equal(part, whole[first:last]), (first, last)
    as_stored(case, torch.int8)
    want = case.expected(dim**-0.5, sinks=sinks, **options)
    torch.testing.assert_close(whole.double(), want, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_many_small_weights_beside_a_large_one_are_not_lost(kernels: ops.Backend) -> None:
    """Integers of the weights are of their tile's maximum: one of all tokens would round these to
    zero."""
    case = bfloat16_row(400, heads=2, kv_heads=1, dim=64, block=16)
    case.q[0][:], case.k[0][:] = 1, 0
    case.k[0][0], case.v[0][:32] = 14 / 8, 0  # in its own tile some are lost
    case.v[0][32:] += 1
    case.run(kernels, 0.125)
    layer = ops.layer_view(case.pool, case.layer)
    last = kernels.paged_attention(case.q[0][399:], layer, chunk_of(case, 399, 400), 0.125)
    as_stored(case, torch.int8)
    want = case.v[0][32:].sum(0) / math.exp(14)
    torch.testing.assert_close(last[0].double(), want.expand(2, -1), rtol=2e-2, atol=0)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_a_value_with_a_large_scale_and_no_weight_costs_the_others_nothing(
    kernels: ops.Backend,
) -> None:
    """Integers of the weights are of their tile's largest product of a weight and a scale."""
    case = bfloat16_row(64, heads=2, kv_heads=1, dim=64, block=16)
    case.q[0][:], case.k[0][:] = 1, 0
    case.k[0][3], case.v[0][3] = -30 / 8, 10_000
    case.run(kernels, 0.125)
    layer = ops.layer_view(case.pool, case.layer)
    for first in (63, 60):  # few queries, then many
        chunk = chunk_of(case, first, 64)
        out = kernels.paged_attention(case.q[0][first:], layer, chunk, 0.125)[-1]
        others = torch.cat([case.v[0][:3], case.v[0][4:]])
        want = read_back(others, torch.int8).mean(0).expand(2, -1)
        assert float((out - want).norm() / want.norm()) < 2**-8

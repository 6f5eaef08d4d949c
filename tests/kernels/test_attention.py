"""paged_attention and store_kv against the oracle, at shapes that are no multiple of any tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamer.kernels import ops, reference_attention
from streamer.kernels.cpu import native
from tests.kernels.oracle import Case

pytestmark = pytest.mark.usefixtures("backend")

MIXED = [(1, 1), (1, 15), (7, 7), (1, 16), (5, 21), (1, 17), (1, 33), (11, 40), (1, 48), (3, 35)]
OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 9},
    {"sliding_window": 16},
    {"softcap": 2.0},
    {"sliding_window": 20, "softcap": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 80), (6, 1, 128)])
def test_mixed_rows(
    kernels: ops.Backend, heads: int, kv_heads: int, dim: int, options: dict[str, float]
) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, block=16)
    out = case.run(kernels, dim**-0.5, **options)
    assert out.shape == (sum(n for n, _ in MIXED), heads, dim)
    torch.testing.assert_close(
        out.double(), case.expected(dim**-0.5, **options), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("block", [1, 5, 16, 32])
def test_block_sizes_and_block_borders(kernels: ops.Backend, block: int) -> None:
    rows = [(1, block), (1, block + 1), (2, 2 * block), (1, max(1, 2 * block - 1)), (9, 9 + block)]
    case = Case(rows, heads=4, kv_heads=2, dim=24, block=block)
    torch.testing.assert_close(
        case.run(kernels, 0.2).double(), case.expected(0.2), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("options", [{}, {"sliding_window": 11}, {"softcap": 1.5}], ids=str)
def test_long_rows_go_in_tiles(
    kernels: ops.Backend, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    monkeypatch.setattr(reference_attention, "QUERY_TILE", 13)
    monkeypatch.setattr(native, "TILE_QUERIES", 13)
    case = Case([(40, 40), (1, 30), (27, 61), (14, 15)], heads=2, kv_heads=1, dim=16, block=16)
    torch.testing.assert_close(
        case.run(kernels, 0.25, **options).double(),
        case.expected(0.25, **options),
        rtol=1e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"softcap": 1.5}], ids=str)
def test_sinks(kernels: ops.Backend, options: dict[str, float]) -> None:
    case = Case([(1, 19), (12, 20), (3, 3)], heads=4, kv_heads=2, dim=32, block=16)
    sinks = torch.tensor([-30.0, 0.3, 2.0, 5.0])
    out = case.run(kernels, 0.2, sinks=sinks, **options)
    torch.testing.assert_close(
        out.double(), case.expected(0.2, sinks=sinks, **options), rtol=1e-5, atol=2e-6
    )


def test_bfloat16_is_near(kernels: ops.Backend) -> None:
    case = Case(MIXED, heads=4, kv_heads=2, dim=64, block=16, dtype=torch.bfloat16)
    out = case.run(kernels, 0.125)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected(0.125), rtol=2e-2, atol=2e-2)


def test_a_row_reads_what_another_stores_in_the_same_step(kernels: ops.Backend) -> None:
    """Row 1 shares row 0's first block, which is filled in this very step."""
    case = Case([(16, 16), (2, 18)], heads=2, kv_heads=1, dim=16, block=16)
    case.tables[1, 0] = case.tables[0, 0]
    case.k[1][:16], case.v[1][:16] = case.k[0], case.v[0]
    torch.testing.assert_close(
        case.run(kernels, 0.25).double(), case.expected(0.25), rtol=1e-5, atol=2e-6
    )


def test_decode_rows_are_bit_equal_alone_and_in_a_batch(kernels: ops.Backend, backend: str) -> None:
    rows = [(1, context) for context in (1, 5, 16, 17, 40, 130, 200, 215, 216, 255, 257, 300)]
    shapes = [(14, 2, 64), (4, 2, 64), (4, 4, 64), (16, 8, 128), (8, 1, 96)]
    for heads, kv_heads, dim in shapes[: 1 if backend == "triton" else None]:  # interpreted: slow
        case = Case(rows, heads=heads, kv_heads=kv_heads, dim=dim, block=16)
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
            alone = kernels.paged_attention(case.q[r], layer, batch, 0.1)
            assert torch.equal(alone[0], together[r]), (heads, context)


def test_a_prompt_in_chunks_equals_itself_whole(kernels: ops.Backend, backend: str) -> None:
    """With native kernels bit for bit, wherever it is cut, and beside other rows."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([(70, 70)], heads=6, kv_heads=2, dim=32, block=16, dtype=dtype)
        whole = case.run(kernels, 0.2)
        layer = ops.layer_view(case.pool, case.layer)
        for first, last in ((0, 1), (0, 33), (31, 70), (69, 70), (16, 49)):
            batch = ops.AttentionBatch(
                query_lens=[last - first],
                context_lens=[last],
                block_tables=case.tables,
                slots=case.slots[first:last],
                block_size=16,
            )
            part = kernels.paged_attention(case.q[0][first:last], layer, batch, 0.2)
            if backend == "native":
                assert torch.equal(part, whole[first:last]), (dtype, first, last)
            else:
                torch.testing.assert_close(part, whole[first:last], rtol=2e-2, atol=2e-2)


MANY_OPTIONS = [
    {},
    {"sliding_window": 75},
    {"softcap": 2.0},
    {"sinks": torch.tensor([-3.0, 0.3, 2.0, 5.0, 0.0, 1.0])},
]


@pytest.mark.parametrize("options", MANY_OPTIONS, ids=["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_many_queries_in_bfloat16_have_the_bits_of_one_alone(
    kernels: ops.Backend, backend: str, kv_heads: int, options: dict[str, Any]
) -> None:
    """Taken across the vectors; the maxima of tiles of keys fall and then rise."""
    if backend != "native":
        pytest.skip("other backends promise no bits across numbers of queries")
    case = Case([(200, 200)], heads=6, kv_heads=kv_heads, dim=64, block=16, dtype=torch.bfloat16)
    case.k[0] *= (torch.arange(200).sub(120).abs() / 20 - 2).exp().view(-1, 1, 1).bfloat16()
    case.v[0][:, :, :32] *= 1e-38  # sums and results are denormal
    out, layer = case.run(kernels, 0.2, **options), ops.layer_view(case.pool, case.layer)
    torch.testing.assert_close(out.double(), case.expected(0.2, **options), rtol=3e-2, atol=3e-2)
    for at in (0, 1, 31, 32, 77, 78, 109, 110, 199):
        batch = ops.AttentionBatch(
            query_lens=[1],
            context_lens=[at + 1],
            block_tables=case.tables,
            slots=case.slots[at : at + 1],
            block_size=16,
        )
        alone = kernels.paged_attention(case.q[0][at : at + 1], layer, batch, 0.2, **options)
        assert torch.equal(alone[0], out[at]), at


def test_a_poisoned_row_stays_alone(kernels: ops.Backend) -> None:
    """The unused part of a block may hold another sequence's NaN; so may another row."""
    case = Case([(1, 20), (1, 21), (3, 22), (12, 40)], heads=4, kv_heads=2, dim=32, block=16)
    clean = case.run(kernels, 0.2)
    case.k[1][4] = torch.nan
    case.v[1][20] = torch.inf
    case.q[1][:] = torch.nan
    poisoned = Case([(1, 20), (1, 21), (3, 22), (12, 40)], heads=4, kv_heads=2, dim=32, block=16)
    poisoned.k, poisoned.v, poisoned.q = case.k, case.v, case.q
    out = poisoned.run(kernels, 0.2)
    keep = [0, *range(2, 17)]
    assert torch.equal(out[keep], clean[keep])
    assert not out[1].isfinite().any()


NAN_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 60},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([9.0] * 4)},
}


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # numpy, where it interprets
@pytest.mark.parametrize(
    ("bad", "options"),
    [
        *((torch.nan, options) for options in NAN_OPTIONS.values()),
        (torch.inf, NAN_OPTIONS["plain"]),
        (torch.inf, NAN_OPTIONS["softcap"]),
    ],
    ids=[*NAN_OPTIONS, "inf", "softcap of inf"],
)
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_nan_in_q_k_or_v_is_nan_in_every_output_that_sees_it(
    kernels: ops.Backend, place: str, options: dict[str, Any], bad: float, backend: str
) -> None:
    """In the first, a middle or the last tile of keys; with native kernels for any payload."""
    places = ((12, torch.float32), (40, torch.bfloat16), (69, torch.float32))
    for at, dtype in places[-1 if backend == "triton" else 0 :]:  # interpreted: slow
        case = Case([(70, 70)], heads=4, kv_heads=2, dim=32, block=16, dtype=dtype)
        clean, of_head_0 = case.run(kernels, 0.2, **options), slice(0, 2 if place == "q" else 1)
        getattr(case, place)[0][at, of_head_0] = bad
        if bad is torch.nan and dtype is torch.float32:  # a shift by 23 drops the payload's bits
            getattr(case, place)[0].view(torch.int32)[at, of_head_0] = 0x7F800001
        if bad == torch.inf and place == "k":
            case.q[0].abs_()  # scores of inf, and inf - inf is NaN, not of -inf, which is no weight
        out = case.run(kernels, 0.2, **options)
        sees = slice(at, at + 1 if place == "q" else at + options.get("sliding_window", 70))
        if bad is torch.nan or "softcap" not in options or place == "v":
            assert not out[sees, :2].isfinite().any(), (at, dtype)
        if backend != "torch" and bad is torch.nan and place != "v":  # torch adds -inf to mask
            hidden = torch.ones(70, dtype=torch.bool)
            hidden[sees] = False
            assert torch.equal(out[hidden, :2], clean[hidden, :2]), (at, dtype)


def test_strided_inputs_and_a_batch_used_by_two_layers(kernels: ops.Backend) -> None:
    case = Case([(1, 18), (4, 9)], heads=4, kv_heads=2, dim=16, block=16)
    batch, tokens = case.batch(), 5
    qkv = torch.cat([torch.cat(case.q), case.new_k(), case.new_v()], 1)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    assert not k.is_contiguous()
    outs = []
    for layer in (case.layer, 2):
        view = ops.layer_view(case.pool, layer)
        if layer == 2:
            case.pool[:, 2] = case.pool[:, case.layer]
        kernels.store_kv(k, v, view, batch)
        outs.append(kernels.paged_attention(q, view, batch, 0.25))
    assert outs[0].shape == (tokens, 4, 16)
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[0].double(), case.expected(0.25), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "slots", "message"),
    [
        ([1], [1, 2], 1, "2 context_lens"),
        ([1, 1], [1, 2], 3, "3 slots for 2"),
        ([2, 1], [1, 2], 3, "row 0: query_len 2 <= context_len 1"),
        ([1, 1], [1, 33], 2, "context_len 33 <= 32"),
        ([1, 0], [1, 3], 1, "row 1"),
    ],
)
def test_a_batch_that_does_not_add_up_is_refused(
    query_lens: list[int], context_lens: list[int], slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.AttentionBatch(
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=torch.zeros(2, 2, dtype=torch.int64),
            slots=torch.zeros(slots, dtype=torch.int64),
            block_size=16,
        )

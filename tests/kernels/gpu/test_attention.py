"""What only the GPU's attention has: split decodes, tiles of two sizes, padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamer.kernels import ops
from tests.kernels.oracle import Case

pytest.importorskip("triton")

LONG = [(1, 150), (1, 31), (5, 97), (1, 64), (2, 129), (20, 70), (1, 1)]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def run(case: Case, device: str, batch: ops.AttentionBatch, **options: object) -> torch.Tensor:
    """The GPU's kernel on one case, everything moved to the device and the output back."""
    from streamer.kernels.gpu import backend

    pool = case.pool.to(device)
    layer = ops.layer_view(pool, case.layer)
    backend.store_kv(case.new_k().to(device), case.new_v().to(device), layer, batch)
    settings = {"sliding_window": None, "softcap": None, "sinks": None, **options}
    q = torch.cat(case.q).to(device)
    return backend.paged_attention(q, layer, batch, 0.2, **settings).cpu()  # type: ignore[arg-type]


def batch_of(case: Case, device: str) -> ops.AttentionBatch:
    """The case's batch on the device."""
    return ops.AttentionBatch(
        query_lens=case.query_lens,
        context_lens=case.context_lens,
        block_tables=case.tables.to(device),
        slots=case.slots.to(device),
        block_size=case.block,
    )


@pytest.mark.parametrize(
    ("options", "has_sinks"),
    [({}, False), ({}, True), ({"sliding_window": 70}, True), ({"softcap": 1.5}, False)],
    ids=str,
)
def test_split_decodes(
    device: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, float], has_sinks: bool
) -> None:
    """Rows in one to four parts beside prefill, of one token or a few."""
    from streamer.kernels.gpu.attention import items, paged

    monkeypatch.setattr(items, "MIN_SPLIT", 32)
    monkeypatch.setattr(items, "MAX_SPLITS", 4)
    monkeypatch.setitem(paged.KEY_ELEMENTS, 4, 16 * 32)  # 16 keys a tile
    rows = [(1, 150), (5, 97), (2, 33), (12, 40), (1, 1)]
    case = Case(rows, heads=6, kv_heads=2, dim=20, block=16)
    everything = dict(options)
    if has_sinks:
        everything["sinks"] = torch.tensor([-30.0, 0.3, 2.0, 5.0, 0.0, 1.0]).to(device)  # type: ignore[assignment]
    out = run(case, device, batch_of(case, device), **everything)
    torch.testing.assert_close(
        out.double(), case.expected(0.2, **everything), **CLOSE[torch.float32]
    )


def test_a_split_decode_is_bit_equal_alone_and_beside_prefill(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamer.kernels.gpu.attention import items

    monkeypatch.setattr(items, "MIN_SPLIT", 64)
    case = Case(LONG, heads=4, kv_heads=2, dim=64, block=16)
    together = run(case, device, batch_of(case, device))
    for r, token in ((0, 0), (1, 1), (3, 7)):
        alone = Case(LONG, heads=4, kv_heads=2, dim=64, block=16)
        only = ops.AttentionBatch(
            query_lens=[1],
            context_lens=[case.context_lens[r]],
            block_tables=case.tables[r : r + 1].to(device),
            slots=case.slots[token : token + 1].to(device),
            block_size=16,
        )
        alone.q, alone.k, alone.v = [case.q[r]], [case.k[r]], [case.v[r]]
        alone.query_lens = [1]
        assert torch.equal(run(alone, device, only)[0], together[token]), r


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "chunk"), [(7, 1, 24, 18), (40, 2, 64, 5), (2, 2, 160, 34)]
)
def test_dtypes_and_odd_heads(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, chunk: int
) -> None:
    """Groups of 7, groups of more heads than a narrow tile has rows, and heads beyond 128."""
    rows = [(1, 20), (3, 9), (chunk, chunk + 6)]
    case = Case(rows, heads=heads, kv_heads=kv_heads, dim=dim, block=8)
    case.pool = case.pool.to(dtype)
    for tensors in (case.q, case.k, case.v):
        tensors[:] = [t.to(dtype) for t in tensors]
    out = run(case, device, batch_of(case, device))
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), case.expected(0.2), **CLOSE[dtype])


def test_few_programs_share_many_items(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what a program an item computes."""
    from streamer.kernels.gpu.attention import items, paged

    monkeypatch.setattr(items, "MIN_SPLIT", 64)
    case = Case(LONG, heads=4, kv_heads=2, dim=64, block=16)
    whole = run(case, device, batch_of(case, device))
    monkeypatch.setattr(paged, "PROGRAMS", 3)
    assert torch.equal(run(case, device, batch_of(case, device)), whole)


@pytest.mark.parametrize("window", [0, 300])
def test_the_items_are_the_splits_that_rows_use(device: str, window: int) -> None:
    """Of narrow tiles alone, in order; none of padding, and none that no keys are left for."""
    from streamer.kernels.gpu.attention.items import BLOCK, MAX_SPLITS
    from streamer.kernels.gpu.attention.rows import Rows

    contexts = [0, 830, 4096, 1, 257, 100_000, *[3] * BLOCK, 600]
    count = len(contexts)
    rows = Rows(
        starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
        tiles=torch.tensor([[i, 0, i, i] for i in (0, 0, *range(count))]).int().to(device),
        tables=torch.empty(0),
        num_wide=2,
        num_parts=count,
        spans=np.array([100_000]),
    )
    expected = [
        tile * MAX_SPLITS + split
        for tile, context in enumerate(contexts)
        for split in range(splits_used(context, window, 64) if context else 0)
    ]
    items = rows.items(1, window, 64)
    assert items[: 1 + len(expected)].tolist() == [len(expected), *expected]
    assert rows.items(1, window, 64) is items
    rows.changed()
    assert rows.items(1, window, 64) is not items


def test_any_strides_of_q(device: str) -> None:
    from streamer.kernels.gpu import backend

    case = Case([(2, 18), (1, 5)], heads=4, kv_heads=2, dim=16, block=16)
    layer, batch = ops.layer_view(case.pool.to(device), case.layer), batch_of(case, device)
    backend.store_kv(case.new_k().to(device), case.new_v().to(device), layer, batch)
    q = torch.cat(case.q).to(device)
    turned = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    options = {"sliding_window": None, "softcap": None, "sinks": None}
    whole = backend.paged_attention(q, layer, batch, 0.2, **options)
    assert torch.equal(backend.paged_attention(turned, layer, batch, 0.2, **options), whole)


@pytest.mark.parametrize("window", [0, 1, 100, 300])
def test_the_host_launches_as_many_splits_as_rows_use(window: int) -> None:
    from streamer.kernels.gpu.attention.rows import num_splits

    for contexts in ([1], [257, 3], [100_000], [4097, 8192], []):
        for keys in (16, 64):
            rows = rows_of(contexts, np.ones(len(contexts), np.int64))
            max_splits = max([1, *(splits_used(context, window, keys) for context in contexts)])
            assert max_splits <= num_splits(rows, window, keys) < 2 * max_splits


@pytest.mark.parametrize("window", [0, 100, 1024, 3000])
@pytest.mark.parametrize("longest", [1, 300, 1040, 4097, 9000])
def test_rows_that_only_the_device_knows_have_as_many_splits_as_any_uses(
    window: int, longest: int
) -> None:
    """For all contexts up to the longest; a window may need fewer."""
    from streamer.kernels.gpu.attention.rows import num_splits

    for keys in (16, 32, 64):
        max_splits = max(splits_used(n, window, keys) for n in range(1, longest + 1))
        launched = num_splits(rows_of([longest], None), window, keys)
        assert max_splits <= launched
        assert launched < 2 * max_splits or window


def splits_used(context: int, window: int, keys: int) -> int:
    """Number of programs that share a decode, by the kernel's own rule, written again."""
    from streamer.kernels.gpu.attention.items import MAX_SPLITS, MIN_SPLIT

    begin = max(0, context - window) // keys * keys if window else 0
    tiles = -(-(context - begin) // keys)
    used = -(-tiles // max(MIN_SPLIT // keys, -(-tiles // MAX_SPLITS)))
    assert used <= MAX_SPLITS
    return -(-tiles // -(-tiles // used))


def rows_of(spans: list[int], queries: Any) -> Any:
    """Narrow rows of which only spans and queries are known."""
    from streamer.kernels.gpu.attention.rows import Rows

    nothing: Any = torch.empty(0)
    return Rows(
        starts=nothing,
        contexts=nothing,
        tiles=nothing,
        tables=nothing,
        num_wide=0,
        num_parts=0,
        spans=np.array(spans, np.int64),
        queries=queries,
    )

"""Steps with chunks padded to a fixed size: what attention computes and stores of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from streamer.kernels import ops
from tests.kernels.oracle import Case

pytest.importorskip("triton")

HEADS, KV_HEADS, DIM, BLOCK, SIZE = 4, 2, 16, 8, 32
SLOTS = [3, 0, 4, 1, 2]  # of the rows
# (query, context) of the rows of steps that follow each other: of chunks, one decode alone, as many
# rows and tokens as there is room for, and rows in several parts.
STEPS = [
    [(1, 40), (9, 9), (1, 3), (20, 37)],
    [(1, 41)],
    [(9, 12), (9, 9), (9, 30), (4, 5), (1, 1)],
    [(3, 48), (1, 48), (8, 40)],
]


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 16 keys are split, and 16 are read at a time."""
    from streamer.kernels.gpu.attention import items, paged

    monkeypatch.setattr(items, "MIN_SPLIT", 16)
    monkeypatch.setitem(paged.KEY_ELEMENTS, 4, 16 * DIM)


def new_step(device: str) -> Any:
    """A step of SIZE tokens over a state of five rows."""
    from streamer.kernels.gpu.attention.paged import tile_tokens
    from streamer.kernels.gpu.fixed_step import RowState
    from streamer.kernels.gpu.mixed_step import MixedStep

    tiles = tile_tokens(HEADS, KV_HEADS, DIM, torch.float32)
    return MixedStep(RowState(5, 6, BLOCK, device), SIZE, tiles)


def send(step: Any, case: Case) -> None:
    """The case's step, from the host to the device."""
    owners = np.array(SLOTS[: len(case.query_lens)])
    for slot, table in zip(owners, case.tables, strict=True):
        step.state.tables[slot, : len(table)] = table.to(step.state.tables.device)
    tokens = np.arange(len(case.slots))
    sent = step.pack(tokens, tokens, case.batch(), owners)
    step.sent.copy_(torch.from_numpy(sent))


def new_case(rows: list[tuple[int, int]]) -> Case:
    """Rows of (query, context) with this file's heads and blocks."""
    return Case(rows, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, block=BLOCK)


def batch_of(case: Case, device: str) -> ops.AttentionBatch:
    """The case's own batch, on the device."""
    return ops.AttentionBatch(
        query_lens=case.query_lens,
        context_lens=case.context_lens,
        block_tables=case.tables.to(device),
        slots=case.slots.to(device),
        block_size=BLOCK,
    )


class Inputs:
    """A case's K, V and q, padded with NaN to SIZE tokens."""

    def __init__(self, case: Case, device: str) -> None:
        room = SIZE - len(case.slots)
        self.k, self.v, self.q = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, room), value=torch.nan).to(device)
            for x in (case.new_k(), case.new_v(), torch.cat(case.q))
        )

    def run(
        self, case: Case, pool: torch.Tensor, batch: ops.AttentionBatch, count: int, **options: Any
    ) -> torch.Tensor:
        """The output of the first `count` tokens, after they are stored in the pool."""
        from streamer.kernels.gpu import backend

        layer = ops.layer_view(pool, case.layer)
        backend.store_kv(self.k[:count], self.v[:count], layer, batch)
        return backend.paged_attention(self.q[:count], layer, batch, 0.2, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 18}], ids=str)
def test_a_padded_step_computes_what_its_rows_do_alone(
    device: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    """Bit for bit, through the same tensors in every step; padding stores nothing."""
    small_tiles(monkeypatch)
    step = new_step(device)
    for rows in STEPS:
        case = new_case(rows)
        count, inputs = len(case.slots), Inputs(case, device)
        send(step, case)
        step.prepare()
        pools = [case.pool.clone().to(device) for _ in range(2)]
        expected = inputs.run(case, pools[0], batch_of(case, device), count, **options)
        out = inputs.run(case, pools[1], step.batch, SIZE, **options)
        assert torch.equal(out[:count], expected)
        assert torch.equal(pools[1].nan_to_num(7.0), pools[0].nan_to_num(7.0))


def test_tokens_that_only_the_device_has(device: str) -> None:
    """Each is its row's latest; padding reads token 0 and is stored nowhere."""
    step = new_step(device)
    case = new_case([(1, 9), (3, 3)])
    step.state.latest[SLOTS[0]] = 77
    tokens, positions = np.array([-1, 5, 6, 7]), np.array([8, 0, 1, 2])
    sent = step.pack(tokens, positions, case.batch(), np.array(SLOTS[:2]))
    step.sent.copy_(torch.from_numpy(sent))
    step.prepare()
    assert step.tokens.tolist() == [77, 5, 6, 7] + [0] * (SIZE - 4)
    assert step.positions.tolist() == [8, 0, 1, 2] + [0] * (SIZE - 4)
    assert step.batch.slots.tolist() == case.slots.tolist() + [-1] * (SIZE - 4)


@pytest.mark.parametrize(("narrow", "wide"), [(1, 1), (1, 3), (4, 16), (16, 64)])
def test_no_step_has_more_wide_tiles_than_there_is_room_for(narrow: int, wide: int) -> None:
    """Rows of random lengths, many of them just beyond those of a tile."""
    from streamer.kernels.gpu.attention.rows import cut, most_wide

    source = random.Random(0)
    for max_rows, size in ((1, 32), (5, 64), (64, 64), (40, 1024)):
        room = most_wide(max_rows, size, narrow, wide)
        for _ in range(300):
            usual = source.choice([1, narrow, narrow + 1, wide + 1, size])
            lens: list[int] = []
            while len(lens) < max_rows and (left := size - sum(lens)):
                lens.append(min(left, source.choice([usual, source.randint(1, left)])))
            large, small = cut(np.array(lens), np.array(lens), narrow, wide)
            assert len(large) <= room
            assert len(small) <= min(max_rows, size)

"""Decode steps made on the device from the last step's results, against the host's own."""

from __future__ import annotations

import pytest
import torch

from streamer.kernels import ops, reference

pytest.importorskip("triton")

VOCAB, HEADS, KV_HEADS, DIM, BLOCK = 11, 4, 2, 16, 4


class Model:
    """One layer of attention between an embedding and logits, by the ops of a backend."""

    def __init__(self, device: str, backend: ops.Backend) -> None:
        rng = torch.Generator().manual_seed(0)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.ops = backend
        self.table = torch.randn(VOCAB, width, generator=rng).to(device)
        self.head = torch.randn(VOCAB, HEADS * DIM, generator=rng).to(device)
        angles = torch.arange(40.0)[:, None] / torch.arange(1, DIM // 2 + 1)
        cos, sin = backend.rope_tables(angles, torch.float32)
        self.rope = cos.to(device), sin.to(device)
        self.pool = torch.zeros(40, 1, 2, KV_HEADS, BLOCK, DIM, device=device)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: ops.AttentionBatch
    ) -> torch.Tensor:
        """Logits [T, VOCAB]."""
        layer = ops.layer_view(self.pool, 0)
        qkv = self.ops.embedding(tokens, self.table)
        q = self.ops.rope_and_store(qkv, self.rope, positions, layer, batch)
        y = self.ops.paged_attention(
            q, layer, batch, 0.25, sliding_window=None, softcap=None, sinks=None
        )
        return self.ops.pack_weight([self.head])(y.flatten(1))


def batch_of(table: torch.Tensor, count: int) -> ops.AttentionBatch:
    """`count` tokens of one sequence, from its first on."""
    positions = torch.arange(count, device=table.device)
    return ops.AttentionBatch(
        query_lens=[count],
        context_lens=[count],
        block_tables=table[None],
        slots=table[positions // BLOCK] * BLOCK + positions % BLOCK,
        block_size=BLOCK,
    )


def greedy_by_the_host(tables: torch.Tensor, known: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy tokens by plain torch, every sequence computed whole again for every token."""
    model, out = Model("cpu", reference), [list(tokens) for tokens in known]
    for _ in range(steps):
        for table, tokens in zip(tables, out, strict=True):
            batch = batch_of(table, len(tokens))
            logits = model(torch.tensor(tokens), torch.arange(len(tokens)), batch)
            tokens.append(int(logits[-1].argmax()))
    return [tokens[-steps:] for tokens in out]


def test_steps_need_no_host_data(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one to three parts in scattered slots, beside padding, across block borders."""
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.attention import items, paged
    from streamer.kernels.gpu.decode_step import DecodeStep
    from streamer.kernels.gpu.fixed_step import RowState

    monkeypatch.setattr(items, "MIN_SPLIT", 16)
    monkeypatch.setitem(paged.KEY_ELEMENTS, 4, 16 * DIM)  # 16 keys a tile
    known, slots = [[*range(1, 11)] * 3, [7], [3, 3, 9, 10]], [5, 0, 2]
    tables = torch.randperm(36, generator=torch.Generator().manual_seed(1)).view(3, 12)
    expected = greedy_by_the_host(tables, known, 6)
    model, state = Model(device, backend), RowState(6, 12, BLOCK, device)
    for table, tokens, slot in zip(tables.to(device), known, slots, strict=True):
        done = len(tokens) - 1
        if done:
            there = torch.tensor(tokens[:-1], device=device)
            model(there, torch.arange(done, device=device), batch_of(table, done))
        state.tables[slot], state.latest[slot], state.computed[slot] = table, tokens[-1], done
    step = DecodeStep(state, 5)
    step.chosen.copy_(torch.tensor([5, -1, 0, 2, -1]))
    order = [0, 2, 3]  # positions of the rows in the step
    drawn = []
    for n in range(6):
        step.prepare()
        logits = model(step.tokens, step.positions, step.batch)
        assert step.drawn_at[order].tolist() == [len(tokens) + n for tokens in known]
        _, ids = backend.best(logits)
        step.commit(ids)
        drawn.append(ids[order].tolist())
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == expected
    assert state.computed.tolist() == [6, 0, 9, 0, 0, 35]
    assert int((model.pool != 0).any(-1).any(1).any(1).any(1).sum()) == 35 + 6 + 9


def test_a_failed_row_leaves_a_token_that_can_be_read(device: str) -> None:
    from streamer.kernels.gpu.decode_step import DecodeStep
    from streamer.kernels.gpu.fixed_step import RowState

    state = RowState(201, 2, BLOCK, device)
    step = DecodeStep(state, 200)  # more than one program
    state.latest.fill_(9)
    state.chosen[199] = 1
    step.commit(torch.full((200,), -1, dtype=torch.int64, device=device))
    assert state.latest.tolist() == [9, 0, *[9] * 199]
    assert state.computed.tolist() == [0, 1, *[0] * 199]

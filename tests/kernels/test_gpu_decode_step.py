"""Decode steps made on the device from what the last one left there, against the host's own."""

from __future__ import annotations

import pytest
import torch

from streamer.kernels import ops

pytest.importorskip("triton")

VOCAB, HEADS, KV_HEADS, DIM, BLOCK = 11, 4, 2, 16, 4


class Model:
    """One layer of attention between an embedding and logits, by the GPU's ops."""

    def __init__(self, device: str) -> None:
        from streamer.kernels.gpu import backend

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
        q = self.ops.rope_and_store(qkv, self.rope, positions, layer, batch, None, 0.0)
        y = self.ops.paged_attention(
            q, layer, batch, 0.25, sliding_window=None, softcap=None, sinks=None
        )
        return self.ops.linear(y.flatten(1), self.ops.pack_weight(self.head, None, None), None)


def greedy_by_the_host(
    device: str, tables: torch.Tensor, known: list[list[int]], steps: int
) -> list[list[int]]:
    """Every sequence computed whole again for every token."""
    model, out = Model(device), [list(tokens) for tokens in known]
    for _ in range(steps):
        for r, tokens in enumerate(out):
            positions = torch.arange(len(tokens), device=device)
            slots = tables[r].to(device)[positions // BLOCK] * BLOCK + positions % BLOCK
            batch = ops.AttentionBatch(
                query_lens=[len(tokens)],
                context_lens=[len(tokens)],
                block_tables=tables[r : r + 1].to(device),
                slots=slots,
                block_size=BLOCK,
            )
            logits = model(torch.tensor(tokens, device=device), positions, batch)
            tokens.append(int(logits[-1].argmax()))
    return out


def test_steps_need_no_host_data(device: str) -> None:
    """Three rows of different lengths in scattered slots, beside padding, across block borders."""
    from streamer.kernels.gpu.best import best
    from streamer.kernels.gpu.decode_step import DecodeStep, RowState

    known, slots = [[1, 2, 3, 4, 5], [7], [3, 3, 9, 10]], [5, 0, 2]
    tables = torch.randperm(36, generator=torch.Generator().manual_seed(1)).view(3, 12)
    expected = greedy_by_the_host(device, tables, known, 6)
    model, state = Model(device), RowState(6, 12, BLOCK, device)
    step = DecodeStep(state, 5)
    for r, slot in enumerate(slots):
        state.tables[slot] = tables[r].to(device)
    step.chosen.copy_(torch.tensor([5, -1, 0, 2, -1]))
    order = [0, 2, 3]  # places of the rows in the step
    # Prompts go token by token here; a runner would prefill them.
    drawn: list[list[int]] = [[], [], []]
    for n in range(6 + 4):
        for r, slot in enumerate(slots):
            if n < len(known[r]):
                state.latest[slot] = known[r][n]
        step.prepare()
        logits = model(step.tokens, step.positions, step.batch)
        assert step.drawn_at[order].tolist() == [n + 1] * 3
        _, ids = best(logits)
        step.commit(ids)
        for r, place in enumerate(order):
            if n + 1 >= len(known[r]):
                drawn[r].append(int(ids[place]))
    for r, tokens in enumerate(expected):
        assert drawn[r][:6] == tokens[len(known[r]) :]
    assert state.computed.tolist() == [10, 0, 10, 0, 0, 10]
    assert int((model.pool != 0).any(-1).any(1).any(1).any(1).sum()) == 3 * 10


def test_a_failed_row_leaves_a_token_that_can_be_read(device: str) -> None:
    from streamer.kernels.gpu.decode_step import DecodeStep, RowState

    state = RowState(201, 2, BLOCK, device)
    step = DecodeStep(state, 200)  # more than one program
    state.latest.fill_(9)
    state.chosen[199] = 1
    step.commit(torch.full((200,), -1, dtype=torch.int64, device=device))
    assert state.latest.tolist() == [9, 0, *[9] * 199]
    assert state.computed.tolist() == [0, 1, *[0] * 199]

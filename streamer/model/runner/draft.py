"""Drafter: a small model that proposes the next tokens of the runner's rows.

Owns the draft model's KV pool, whose blocks have the ids of the runner's pool, and how far each is
filled; what is not filled is computed when a row drafts. Its draws have the row's parameters and
noise. It never decides which tokens are known. Called by runner/cpu.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from streamer.core.plan import Plan, RowJoin, StepResult
from streamer.kernels import ops
from streamer.model.runner.costs import Costs
from streamer.model.runner.inputs import Ints, Rows
from streamer.model.runner.interface import CausalModel, RunnerSizes
from streamer.model.sampling.host import Sampler
from streamer.model.sampling.runs import FAILED

NOTED = 64  # steps whose written slots are kept, at most


class DraftModel(NamedTuple):
    """A loaded draft model.

    max_len  tokens of its context
    max_drafted  tokens that it proposes at once, at most
    """

    model: CausalModel
    max_len: int
    max_drafted: int


class _Part(NamedTuple):
    """Tokens [start, end) of a row that are to be computed, after which `wanted` are drafted."""

    row: int
    start: int
    end: int
    wanted: int


class Drafter:
    """Proposals for the resident rows; the runner passes on all that happens to them.

    Drafted tokens that do not fit into the block of the row's newest token are stored in spare
    blocks, a few for each row: no block is taken for tokens that may be wrong.
    """

    def __init__(
        self, kernels: ops.CpuBackend, draft: DraftModel, sizes: RunnerSizes, rows: Rows,
        sampler: Sampler, costs: Costs,
    ) -> None:  # fmt: skip
        model, size = draft.model, sizes.block_size
        self._kernels = kernels
        self._draft = draft
        self._rows = rows
        self._costs = costs
        self._sampler = sampler.sharing()
        self._vocab_size = sampler.vocab_size
        self._size = size
        self._max_tokens = sizes.max_num_batched_tokens
        self._spares = spare_blocks(draft.max_drafted, size)
        self._num_blocks = sizes.num_blocks
        num_spares = sizes.max_num_seqs * self._spares
        shape = model.num_layers, size, model.num_kv_heads, model.head_dim, model.dtype
        self._pool = kernels.new_pool(sizes.num_blocks + num_spares, *shape)
        self._filled: Ints = np.zeros(sizes.num_blocks, np.int64)  # tokens from a block's start on
        self._written: list[Ints] = []  # slots that steps wrote since that was seen to
        self._tokens: dict[int, list[int]] = {}  # known ones, of rows that may speculate
        self._forked: frozenset[int] = frozenset()  # rows of this plan that share a block's rest
        model.prepare(sizes.limits)
        costs.saw_draft(min(self._probe_s() for _ in range(4)))

    def update(self, plan: Plan) -> None:
        """The plan's leaves, joins and copies. Swapped blocks are not filled here."""
        for row in plan.leaves:
            self._tokens.pop(row, None)
        for join in plan.joins:
            if join.params.speculation:
                self._tokens[join.row] = list(join.tokens)
        self._forked = _forked(plan.joins)
        if plan.copies or plan.swap_in:
            self._note()
        if plan.copies:
            source, target = np.array(plan.copies).T
            self._kernels.copy_blocks(self._pool, *map(torch.from_numpy, (source, target)))
            self._filled[target] = self._filled[source]
        if plan.swap_in:
            self._filled[[block for _, block in plan.swap_in]] = 0

    def follow(self, slots: torch.Tensor) -> None:
        """The runner computes tokens at these slots: what was here before is no more. Seen to when
        it matters: looking at each step's slots would cost steps without drafts some us."""
        self._written.append(slots.numpy().copy())
        if len(self._written) == NOTED:
            self._note()

    def _note(self) -> None:
        if not self._written:
            return
        block, offset = np.divmod(np.concatenate(self._written), self._size)
        self._written.clear()
        np.minimum.at(self._filled, block, offset)

    def extend(self, result: StepResult) -> None:
        """These tokens are known."""
        for row, token in zip(result.rows, result.tokens, strict=True):
            if row in self._tokens:
                self._tokens[row].append(token)

    def propose(self, drafts: Sequence[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
        """For each (row, number of tokens): what this model draws after the known ones, or less:
        nothing for a row that has more tokens left to compute than fit into a step."""
        self._note()
        proposals: dict[int, tuple[int, ...]] = dict.fromkeys((row for row, _ in drafts), ())
        parts, room = [], self._max_tokens
        for row, asked in sorted(drafts):
            known = len(self._tokens[row])
            wanted = min(asked, self._draft.max_drafted, self._draft.max_len - known)
            if wanted < 1 or not room or row in self._forked:
                continue
            start = min(self._progress(row, known), known - 1)
            end = min(known, start + room)
            room -= end - start
            parts.append(_Part(row, start, end, wanted if end == known else 0))
        if not parts:
            return proposals
        began, num_late = time.perf_counter(), sum(part.end - part.start for part in parts)
        is_usual = num_late <= len(parts) * (self._draft.max_drafted + 1)  # none is of a prompt
        logits, parts = self._compute(parts), [part for part in parts if part.wanted]
        drawn: dict[int, list[int]] = {part.row: [] for part in parts}
        while parts:
            rows = tuple(part.row for part in parts)
            before = [drawn[row] for row in rows]
            at = [part.end + len(drawn[part.row]) for part in parts]
            tokens = self._sampler.propose(self._widen(logits), rows, at, before)
            for row, token in zip(rows, tokens, strict=True):
                drawn[row].append(token)
            parts = [
                part
                for part, token in zip(parts, tokens, strict=True)
                if token != FAILED and len(drawn[part.row]) < part.wanted
            ]
            if parts:
                logits = self._decode(parts, drawn)
        if is_usual and drawn:
            steps = max(map(len, drawn.values()))
            self._costs.saw_draft((time.perf_counter() - began) / steps)
        return proposals | {
            row: tuple(token for token in tokens if token != FAILED)
            for row, tokens in drawn.items()
        }

    # ------------------------------------------------------------ the model

    @torch.inference_mode()
    def _probe_s(self) -> float:
        """Seconds of one token, in a spare block; the first one makes the model's graph."""
        blocks, began = torch.tensor([self._num_blocks]), time.perf_counter()
        batch = ops.AttentionBatch.of_row(blocks, 0, 1, self._size)
        zero = torch.zeros(1, dtype=torch.int64)
        self._draft.model.forward(zero, zero, batch, self._pool, None)
        return time.perf_counter() - began

    def _progress(self, row: int, upto: int) -> int:
        """Tokens of the row, of the first `upto`, that have K and V here."""
        filled = self._filled[self._rows.table(row, 0)[: -(-upto // self._size)]]
        short = np.flatnonzero(filled < self._size)
        if not len(short):
            return min(upto, len(filled) * self._size)
        return min(upto, int(short[0]) * self._size + int(filled[short[0]]))

    def _compute(self, parts: list[_Part]) -> torch.Tensor:
        """Logits after each part that tokens are wanted of."""
        tokens = [self._tokens[part.row][part.start : part.end] for part in parts]
        last = np.cumsum([len(part) for part in tokens]) - 1
        logits = self._forward(parts, tokens, last[[part.wanted > 0 for part in parts]])
        for part in parts:
            table = self._table(part.row, part.end)
            for index in range(part.start // self._size, -(-part.end // self._size)):
                if table[index] < self._num_blocks:
                    self._filled[table[index]] = min(self._size, part.end - index * self._size)
        return logits

    def _decode(self, parts: list[_Part], drawn: dict[int, list[int]]) -> torch.Tensor:
        """Logits after the newest drafted token of each part."""
        at = [part.end + len(drawn[part.row]) - 1 for part in parts]
        ones = [_Part(part.row, a, a + 1, 1) for part, a in zip(parts, at, strict=True)]
        return self._forward(ones, [drawn[part.row][-1:] for part in parts], None)

    def _forward(
        self, parts: list[_Part], tokens: list[list[int]], last: Ints | None
    ) -> torch.Tensor:
        counts = np.array([len(part) for part in tokens], np.int64)
        ends = np.array([part.end for part in parts], np.int64)
        tables = np.zeros((len(parts), -(-int(ends.max()) // self._size)), np.int64)
        for table, part in zip(tables, parts, strict=True):
            blocks = self._table(part.row, part.end)
            table[: len(blocks)] = blocks
        first = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(ends - counts - first, counts)
        index, offset = np.divmod(positions, self._size)
        slots = tables[np.repeat(np.arange(len(parts)), counts), index] * self._size + offset
        batch = ops.AttentionBatch(
            query_lens=counts,
            context_lens=ends,
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            block_size=self._size,
        )
        # The vocabularies may be padded to different widths; what no text has may be any token.
        flat = torch.tensor([token for part in tokens for token in part])
        flat[flat >= self._draft.model.vocab_size] = 0
        return self._draft.model.forward(
            flat,
            torch.from_numpy(positions),
            batch,
            self._pool,
            None if last is None else torch.from_numpy(last),
        )

    def _table(self, row: int, end: int) -> Ints:
        """Blocks of the row's first `end` tokens: its own up to that of its newest known token,
        which the runner writes next, then spare ones."""
        size = self._size
        known = -(-min(end, len(self._tokens[row])) // size)
        own = self._rows.table(row, 0)[:known]
        spare = self._num_blocks + row * self._spares
        return np.append(own, spare + np.arange(-(-end // size) - len(own)))

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, at least as wide as the runner's vocabulary."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


def spare_blocks(max_drafted: int, block_size: int) -> int:
    """Spare blocks of a row: its newest token may need a new block, those drafted after it more."""
    return -(-max_drafted // block_size) + 1


def _forked(joins: Sequence[RowJoin]) -> frozenset[int]:
    """Rows that draw from one prompt's logits in this plan: they write its last block only when
    each has its own, in the next plan."""
    pairs = [(join.row, join.logits_of) for join in joins if join.logits_of >= 0]
    return frozenset(row for pair in pairs for row in pair)

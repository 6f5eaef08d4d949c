"""Hand: plans written by hand, step by step, for a CpuRunner; a scheduler without any policy.

Blocks come from a shuffled list, so that no block table is in order. Every step says what each row
does; rows that are not named decode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from streamer.config import Config
from streamer.core.plan import Chunk, Plan, RowJoin, StepResult, TableUpdate
from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from streamer.kernels.ops import AttentionBatch
from streamer.model.runner.cpu import CpuRunner
from streamer.model.runner.interface import CausalModel
from streamer.model.runner.load import load_runner
from tests.model.where import Where

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1024)


class Row:
    """A sequence as a scheduler sees it."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.tokens = list(tokens)
        self.num_prompt = num_prompt
        self.computed = 0
        self.blocks: list[int] = []

    @property
    def output(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tokens[self.num_prompt :]


class _Join(NamedTuple):
    row: int
    sequence: Row
    params: SamplingParams
    choice: int
    parent: int = -1

    def value(self) -> RowJoin:
        """The RowJoin of the sequence, with the blocks it has by now."""
        s = self.sequence
        return RowJoin(
            row=self.row,
            request_id=f"r{self.row}",
            choice=self.choice,
            tokens=tuple(s.tokens),
            num_prompt=s.num_prompt,
            num_computed=s.computed,
            blocks=tuple(s.blocks),
            params=self.params,
            logits_of=self.parent,
        )


class Hand:
    """Drives one runner; `rows` holds the resident sequences."""

    def __init__(self, runner: CpuRunner, num_blocks: int, seed: int = 0) -> None:
        self.runner = runner
        self.rows: dict[int, Row] = {}
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.number = 0
        self._joins: list[_Join] = []
        self._leaves: list[int] = []
        self._tables: list[TableUpdate] = []

    def join(
        self, row: int, tokens: Sequence[int], params: SamplingParams = GREEDY, choice: int = 0
    ) -> Row:
        """A new sequence, from the next step on."""
        self.rows[row] = Row(tokens, len(tokens))
        self._joins.append(_Join(row, self.rows[row], params, choice))
        return self.rows[row]

    def rejoin(self, row: int, sequence: Row) -> None:
        """A preempted sequence comes back with its blocks."""
        self.rows[row] = sequence
        self._joins.append(_Join(row, sequence, GREEDY, 0))

    def fork(self, row: int, parent: int, choice: int, params: SamplingParams) -> Row:
        """A fork of the parent's prompt that shares its blocks; the tail must be copied."""
        origin = self.rows[parent]
        child = Row(origin.tokens[: origin.num_prompt], origin.num_prompt)
        child.computed = origin.num_prompt
        self.rows[row] = child
        self._joins.append(_Join(row, child, params, choice, parent))
        return child

    def leave(self, row: int) -> Row:
        """The row is free from the next step on; its blocks are not given back."""
        self._leaves.append(row)
        return self.rows.pop(row)

    def own_tail(self, row: int) -> tuple[int, int]:
        """Give a fork its own block for the shared tail; returns the copy that must go with it."""
        seq = self.rows[row]
        last, fresh = seq.num_prompt // BLOCK, self.free.pop()
        shared, seq.blocks[last] = seq.blocks[last], fresh
        self._tables.append(TableUpdate(row, last, (fresh,)))
        return shared, fresh

    def plan(
        self,
        chunks: dict[int, int] | None = None,
        verify: dict[int, tuple[int, ...]] | None = None,
        **moves: Any,
    ) -> Plan:
        """The next step's plan: row -> tokens of a chunk (0: sits out), row -> provisional tokens;
        the others decode."""
        chunks = dict(chunks or {})
        chunks |= {row: 1 + len(tokens) for row, tokens in (verify or {}).items()}
        forks = {join.row: join for join in self._joins if join.parent >= 0}
        fresh = {join.row for join in self._joins}
        parts, tokens, samples = [], 0, len(forks)
        for row, seq in sorted(self.rows.items()):
            if row in forks:
                continue
            count, had = chunks.get(row, 1), len(seq.blocks)
            while len(seq.blocks) * BLOCK < seq.computed + count:
                seq.blocks.append(self.free.pop())
            if row not in fresh and len(seq.blocks) > had:
                self._tables.append(TableUpdate(row, had, tuple(seq.blocks[had:])))
            draws = int(count > 0 and seq.computed + count == len(seq.tokens))
            if row in (verify or {}):
                given, draws = (seq.tokens[-1], *(verify or {})[row]), count
                parts.append(Chunk(row, seq.computed, count, count, tokens=given))
            elif row in chunks and count:
                parts.append(Chunk(row, seq.computed, count, draws))
            tokens, samples = tokens + count, samples + draws
        for row, join in forks.items():
            shared = self.rows[join.parent].blocks[: -(-self.rows[row].num_prompt // BLOCK)]
            self.rows[row].blocks = list(shared)
        self.number += 1
        plan = Plan(
            number=self.number,
            leaves=tuple(self._leaves),
            joins=tuple(join.value() for join in self._joins),
            tables=tuple(self._tables),
            chunks=tuple(parts),
            idle=tuple(row for row, count in chunks.items() if not count),
            num_rows=len(self.rows),
            num_tokens=tokens,
            num_samples=samples,
            **moves,
        )
        for row, seq in self.rows.items():
            seq.computed += 0 if row in forks else chunks.get(row, 1)
        return plan

    def step(self, chunks: dict[int, int] | None = None, **moves: Any) -> StepResult:
        """Launch the next plan and append what it drew."""
        plan = self.plan(chunks, **moves)
        self._joins, self._leaves, self._tables = [], [], []
        result = self.runner.launch(plan).collect()
        for row, token in zip(result.rows, result.tokens, strict=True):
            self.rows[row].tokens.append(token)
        for row in moves.get("verify", {}):
            self.rows[row].computed = len(self.rows[row].tokens) - 1
        return result

    def run(self, num_steps: int) -> None:
        """Steps in which every row decodes."""
        for _ in range(num_steps):
            self.step()


def make_runner(folder: Any, **settings: Any) -> CpuRunner:
    """A small runner of the checkpoint, in its own dtype."""
    defaults = {
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        "swap_space": 0.001,
        "device": "cpu",
    }
    config = Config(model=str(folder), load_progress=False, **{**defaults, **settings})
    runner, _ = load_runner(config, Where.make())
    return runner  # type: ignore[return-value]  # of the same doors


@torch.inference_mode()
def paged_logits(
    model: CausalModel,
    tokens: list[int],
    cuts: Sequence[int] = (),
    kv_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[len(tokens), V] of one sequence, computed in chunks that end at `cuts`."""
    blocks = -(-len(tokens) // BLOCK)
    table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(1))[None, :blocks]
    shape = (blocks + 3, model.num_layers, BLOCK, model.num_kv_heads, model.head_dim)
    pool = ops.for_cpu().new_pool(*shape, kv_dtype or model.dtype)
    out, start = [], 0
    for end in [*cuts, len(tokens)]:
        positions = torch.arange(start, end)
        batch = AttentionBatch(
            query_lens=[end - start],
            context_lens=[end],
            block_tables=table,
            slots=table[0][positions // BLOCK] * BLOCK + positions % BLOCK,
            block_size=BLOCK,
        )
        out.append(model.forward(torch.tensor(tokens[start:end]), positions, batch, pool, None))
        start = end
    return torch.cat(out)

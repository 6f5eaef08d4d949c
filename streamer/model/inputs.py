"""Rows: the resident sequences as arrays, and a Plan turned into packed inputs.

Owns each row's tokens, block table and progress on the host; checks every plan against them and
raises InvariantViolated where a sum does not hold. Computes nothing; called by runner.py alone.
A steady decode step touches only arrays, never a row by itself.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamer.core.plan import Chunk, Plan, RowJoin, TableUpdate
from streamer.errors import InvariantViolated
from streamer.kernels.ops import AttentionBatch

Ints = npt.NDArray[np.int64]


class StepInputs(msgspec.Struct, frozen=True):
    """One plan's forward. T packed tokens, S of them drawn from, F forks that only draw.

    tokens, positions  [T]; None with batch where nothing is computed
    last               [S] packed index of each drawing row's last token; None: S = T, in order
    rows               the S drawing rows, then the F forks
    draw_at            position of the token each of `rows` draws
    parents            F indices into the S rows: whose logits the forks draw from
    """

    tokens: torch.Tensor | None
    positions: torch.Tensor | None
    batch: AttentionBatch | None
    last: torch.Tensor | None
    rows: list[int]
    draw_at: list[int]
    parents: list[int]
    num_tokens: int
    num_chunk_tokens: int

    @property
    def is_steady(self) -> bool:
        """Every row decodes: `rows` ascend."""
        return self.last is None and not self.parents


class _Row:
    """What only joins and chunks need of a row."""

    __slots__ = ("num_prompt", "tokens")

    def __init__(self, join: RowJoin) -> None:
        self.tokens = list(join.tokens)
        self.num_prompt = join.num_prompt


class Rows:
    """Up to `max_rows` resident rows with tables of up to `width` blocks out of `num_blocks`."""

    def __init__(self, max_rows: int, width: int, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._tables: Ints = np.zeros((max_rows, width), np.int64)
        self._table_lens: Ints = np.zeros(max_rows, np.int64)
        self._known: Ints = np.zeros(max_rows, np.int64)  # tokens known
        self._computed: Ints = np.zeros(max_rows, np.int64)  # of them with KV
        self._latest: Ints = np.zeros(max_rows, np.int64)  # the last known token
        self._resident: Ints = np.zeros(0, np.int64)  # ascending, as of the latest step
        self._has_moved = False  # somebody joined or left since

    def leave(self, row: int) -> None:
        """The row is empty again."""
        if self._rows.pop(row, None) is None:
            raise InvariantViolated(f"row {row} leaves, but nobody is there")
        self._has_moved = True

    def join(self, join: RowJoin) -> None:
        """The row holds this sequence from now on."""
        row, known = join.row, len(join.tokens)
        if not 0 <= row < len(self._known):
            raise InvariantViolated(f"row {row} is beyond the {len(self._known)} row slots")
        if row in self._rows:
            raise InvariantViolated(f"row {row} is taken, {join.request_id} can't join it")
        if not 0 < join.num_prompt <= known or not 0 <= join.num_computed <= known:
            raise InvariantViolated(
                f"row {row} joins with {known} tokens, {join.num_prompt} of them prompt, "
                f"{join.num_computed} computed"
            )
        self._rows[row] = _Row(join)
        self._has_moved = True
        self._known[row] = known
        self._computed[row] = join.num_computed
        self._latest[row] = join.tokens[-1]
        self._table_lens[row] = 0
        self.update_table(TableUpdate(row, 0, join.blocks))
        if join.num_computed > len(join.blocks) * self._block_size:
            raise InvariantViolated(
                f"row {row} joins with {join.num_computed} computed tokens in "
                f"{len(join.blocks)} blocks of {self._block_size}"
            )

    def update_table(self, update: TableUpdate) -> None:
        """Write blocks into a row's table."""
        row, start, end = update.row, update.start, update.start + len(update.blocks)
        if row not in self._rows:
            raise InvariantViolated(f"table of row {row}: nobody is there")
        if not 0 <= start <= self._table_lens[row] or end > self._tables.shape[1]:
            raise InvariantViolated(
                f"table of row {row}: blocks {start} to {end}, it has {self._table_lens[row]} of "
                f"at most {self._tables.shape[1]}"
            )
        if any(not 0 <= block < self._num_blocks for block in update.blocks):
            raise InvariantViolated(
                f"table of row {row}: a block of {update.blocks} is not below {self._num_blocks}"
            )
        self._tables[row, start:end] = update.blocks
        self._table_lens[row] = max(end, int(self._table_lens[row]))

    def inputs(self, plan: Plan) -> StepInputs:
        """The forward of this plan, after its leaves, joins and tables; advances `computed`."""
        forks = [(j.row, j.logits_of) for j in plan.joins if j.logits_of >= 0]
        busy = {row for row, _ in forks}
        for chunk in plan.chunks:
            self._check_chunk(chunk, busy)
            busy.add(chunk.row)
        if self._has_moved:
            self._resident = np.array(sorted(self._rows), np.int64)
            self._has_moved = False
        decoding = self._resident
        if busy:
            decoding = decoding[~np.isin(decoding, list(busy))]
        chunks = [c for c in plan.chunks if c.count]
        counts = np.array([c.count for c in chunks], np.int64)
        rows = np.concatenate([decoding, np.array([c.row for c in chunks], np.int64)])
        counts = np.concatenate([np.ones(len(decoding), np.int64), counts])
        self._check_decoding(decoding)
        drawing = decoding.tolist() + [c.row for c in chunks if c.sample]
        self._check_sums(plan, int(counts.sum()), len(drawing) + len(forks))
        tokens = positions = batch = None
        if len(rows):
            tokens, positions, batch = self._pack(decoding, chunks, rows, counts)
        last = None
        if chunks:
            draws = np.array([True] * len(decoding) + [c.sample for c in chunks], bool)
            last = torch.from_numpy((np.cumsum(counts) - 1)[draws])
        parents = [_index_of(drawing, parent) for _, parent in forks]
        self._computed[rows] += counts
        drawing += [row for row, _ in forks]
        return StepInputs(
            tokens=tokens,
            positions=positions,
            batch=batch,
            last=last,
            rows=drawing,
            draw_at=self._known[drawing].tolist(),
            parents=parents,
            num_tokens=int(counts.sum()),
            num_chunk_tokens=int(counts[len(decoding) :].sum()),
        )

    def append(self, rows: list[int], tokens: list[int]) -> None:
        """These rows drew these tokens."""
        self._latest[rows] = tokens
        self._known[rows] += 1
        for row, token in zip(rows, tokens, strict=True):
            self._rows[row].tokens.append(token)

    def _pack(
        self, decoding: Ints, chunks: list[Chunk], rows: Ints, counts: Ints
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        block = self._block_size
        starts = self._computed[rows]
        contexts = starts + counts
        short = contexts > self._table_lens[rows] * block
        if short.any():
            row, need = int(rows[short][0]), int(contexts[short][0])
            raise InvariantViolated(
                f"row {row} computes up to {need} tokens, its {self._table_lens[row]} blocks of "
                f"{block} do not cover them"
            )
        tables = self._tables[rows, : -(-int(contexts.max()) // block)]
        if chunks:
            tokens = np.concatenate([self._latest[decoding], *map(self._chunk_tokens, chunks)])
            first = np.cumsum(counts) - counts
            positions = np.arange(len(tokens)) + np.repeat(starts - first, counts)
            owner = np.repeat(np.arange(len(rows)), counts)
        else:
            tokens, positions, owner = self._latest[rows], starts, np.arange(len(rows))
        slots = tables[owner, positions // block] * block + positions % block
        batch = AttentionBatch(
            query_lens=counts.tolist(),
            context_lens=contexts.tolist(),
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            block_size=block,
        )
        return torch.from_numpy(tokens), torch.from_numpy(positions), batch

    def _chunk_tokens(self, chunk: Chunk) -> Ints:
        return np.array(
            self._rows[chunk.row].tokens[chunk.start : chunk.start + chunk.count], np.int64
        )

    def _check_chunk(self, chunk: Chunk, busy: set[int]) -> None:
        row = chunk.row
        if row not in self._rows or row in busy:
            raise InvariantViolated(f"chunk of row {row}: nobody is there, or it is named twice")
        known, computed = int(self._known[row]), int(self._computed[row])
        end = chunk.start + chunk.count
        is_right = chunk.count >= 0 and chunk.start == computed and end <= known
        if chunk.count == 0:
            is_right = not chunk.sample
        elif chunk.sample:
            is_right = is_right and end == known
        if not is_right:
            raise InvariantViolated(
                f"chunk of row {row}: {chunk.count} tokens from {chunk.start}, sample "
                f"{chunk.sample}; {computed} of {known} known tokens are computed"
            )

    def _check_decoding(self, decoding: Ints) -> None:
        wrong = self._known[decoding] - self._computed[decoding] != 1
        if wrong.any():
            row = int(decoding[wrong][0])
            raise InvariantViolated(
                f"row {row} is to decode, but {self._computed[row]} of its {self._known[row]} "
                "tokens are computed"
            )

    def _check_sums(self, plan: Plan, num_tokens: int, num_samples: int) -> None:
        for name, ours, theirs in (
            ("num_rows", len(self._rows), plan.num_rows),
            ("num_tokens", num_tokens, plan.num_tokens),
            ("num_samples", num_samples, plan.num_samples),
        ):
            if ours != theirs:
                raise InvariantViolated(
                    f"plan {plan.number}: {name} is {theirs}, the rows say {ours}"
                )


def _index_of(drawing: list[int], parent: int) -> int:
    if parent not in drawing:
        raise InvariantViolated(f"a fork of row {parent}, which draws nothing in this plan")
    return drawing.index(parent)

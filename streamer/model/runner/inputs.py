"""Rows: the resident sequences as arrays, and a Plan turned into packed inputs.

Owns each row's tokens, block table and progress on the host; checks every plan against them and
raises InvariantViolated where a sum does not hold. Computes nothing; called by runner/cpu.py and
runner/cuda.py. A steady decode step works on whole arrays, not row by row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamer.core.plan import (
    NOT_FINITE,
    Chunk,
    Plan,
    RowJoin,
    StepResult,
    TableUpdate,
    TokenLogprob,
)
from streamer.errors import InvariantViolated
from streamer.kernels.ops import AttentionBatch
from streamer.model.runner.scoring import Scored
from streamer.model.sampling.host import SampleOutput
from streamer.model.sampling.runs import FAILED, Run

Ints = npt.NDArray[np.int64]

NO_ROWS: Mapping[int, int] = {}
UNKNOWN = -1  # in place of a drawn token that the host has not received yet


class StepInputs(msgspec.Struct, frozen=True):
    """One plan's forward. T packed tokens, S of them drawn from, F forks that only draw.

    tokens, positions  [T]; None, as is batch, where nothing is computed; a token that only the
               device has is UNKNOWN
    computing          [R] the rows that compute, in the batch's order
    last               [S] packed index of each drawing row's last token, then [P] those of prompt
               tokens that are scored; None: S = T, in order, and no P
    rows               the S drawing rows, one for each draw, then the F forks; the same object
                       until they change
    runs               those of rows that verify, in `rows`
    hidden             indices into `rows` of draws that report their hidden state
    at                 [S + F] the same as an array
    num_chunk_tokens   of the T, those of chunks that verify nothing
    draw_at            [S + F] position of the token each of `rows` draws
    parents            F indices into the S rows whose logits the forks draw from
    """

    tokens: torch.Tensor | None
    positions: torch.Tensor | None
    batch: AttentionBatch | None
    computing: Ints
    last: torch.Tensor | None
    rows: tuple[int, ...]
    at: Ints
    draw_at: Ints
    parents: list[int]
    num_tokens: int
    num_chunk_tokens: int
    scored: Scored | None = None
    runs: tuple[Run, ...] = ()
    hidden: tuple[int, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Every row decodes: `rows` ascend."""
        return self.last is None and not self.parents and not self.hidden

    @property
    def is_all_drawing(self) -> bool:
        """Whether every row that computes draws."""
        drawing = len(set(self.rows)) - len(self.parents)
        return self.last is None or drawing == len(self.computing)

    def hidden_of(self, states: torch.Tensor) -> torch.Tensor:
        """The hidden states [len(hidden), H] in fp32, out of those [S + P, H] of a step."""
        num_drawing = len(self.rows) - len(self.parents)
        at = [i if i < num_drawing else self.parents[i - num_drawing] for i in self.hidden]
        return states[at].float()


class _Steady:
    """The inputs of a step in which every row decodes: the next one's are one token on, until a row
    comes to the end of a block. Of one row to make them anew took 58 us between two steps of 4.9
    ms, with cold caches (2 cores of an EPYC Zen 5, 2026-11-23).

    left  steps for which that holds
    is_ahead  it has advanced for a step that has no plan yet
    """

    __slots__ = (
        "_ones",
        "_positions",
        "_slots",
        "_tokens",
        "batch",
        "is_ahead",
        "left",
        "positions",
        "tokens",
    )

    def __init__(self, positions: Ints, slots: Ints, batch: AttentionBatch) -> None:
        self._ones = np.ones_like(positions)
        self._tokens, self._positions, self._slots = np.zeros_like(positions), positions, slots
        self.tokens = torch.from_numpy(self._tokens)
        self.positions = torch.from_numpy(positions)
        self.batch = batch
        self.left = batch.block_size - 1 - int((positions % batch.block_size).max())
        self.is_ahead = False

    def advance(self) -> None:
        """Every row goes on by a token, in the same memory."""
        self.left -= 1
        self._positions += self._ones
        self._slots += self._ones
        self.batch.advance()

    def take(self, latest: Ints, rows: Ints) -> None:
        """The tokens, out of the latest one of every row."""
        self._tokens[:] = latest.take(rows)


class Rows:
    """Up to `max_rows` resident rows with tables of up to `width` blocks out of `num_blocks`.

    is_ahead  a plan comes before the last one's tokens are known: they stay on the device, as do
              the inputs of a steady step, which then has neither tokens nor batch here
    """

    def __init__(
        self, max_rows: int, width: int, num_blocks: int, block_size: int, *, is_ahead: bool = False
    ) -> None:
        self._is_ahead = is_ahead
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._joined: dict[int, tuple[int, ...]] = {}  # row -> the tokens it joined with
        self._scoring: dict[int, tuple[int, int]] = {}  # row -> (alternatives, prompt tokens)
        self._reporting: set[int] = set()  # rows whose draws report their hidden state
        self._tables: Ints = np.zeros((max_rows, width), np.int64)
        self._table_lens: Ints = np.zeros(max_rows, np.int64)
        self._capacity: Ints = np.zeros(max_rows, np.int64)  # tokens that the table has room for
        self._known: Ints = np.zeros(max_rows, np.int64)  # tokens of prompt and output
        self._computed: Ints = np.zeros(max_rows, np.int64)  # of them with KV
        self._latest: Ints = np.zeros(max_rows, np.int64)  # the last known token
        self._unsettled: dict[int, Run] = {}  # row -> its run, whose tokens the host awaits
        self._ones: Ints = np.ones(max_rows, np.int64)
        self._is_free = np.ones(max_rows, bool)  # but in `_mixed`, which names the others
        # The rows that are not idle, ascending, as of the latest step: as an array and a tuple.
        self._active: Ints = np.zeros(0, np.int64)
        self._names: tuple[int, ...] = ()
        self._idle: tuple[int, ...] = ()  # and as of it: rows that are not among them
        self._has_moved = False  # a row joined or left since
        self._last: _Steady | None = None  # the latest step, if the next may be one token on

    def leave(self, row: int) -> None:
        """The row is empty again."""
        if self._joined.pop(row, None) is None:
            raise InvariantViolated(f"row {row} leaves, but is empty")
        self._scoring.pop(row, None)
        self._reporting.discard(row)
        self._unsettled.pop(row, None)
        self._has_moved, self._last = True, None

    def join(self, join: RowJoin) -> None:
        """The row holds this sequence from now on."""
        row, known = join.row, len(join.tokens)
        if not 0 <= row < len(self._known):
            raise InvariantViolated(f"row {row} is beyond the {len(self._known)} row slots")
        if row in self._joined:
            raise InvariantViolated(f"row {row} is taken, {join.request_id} can't join it")
        if not 0 < join.num_prompt <= known or not 0 <= join.num_computed <= known:
            raise InvariantViolated(
                f"row {row} joins with {known} tokens, {join.num_prompt} of them prompt, "
                f"{join.num_computed} computed"
            )
        self._joined[row] = join.tokens
        if join.params.prompt_logprobs is not None:
            self._scoring[row] = join.params.prompt_logprobs, join.num_prompt
        if join.params.hidden_states:
            self._reporting.add(row)
        self._has_moved, self._last = True, None
        self._known[row] = known
        self._computed[row] = join.num_computed
        self._latest[row] = join.tokens[-1]
        self._table_lens[row] = self._capacity[row] = 0
        self.update_table(TableUpdate(row, 0, join.blocks))
        if join.num_computed > len(join.blocks) * self._block_size:
            raise InvariantViolated(
                f"row {row} joins with {join.num_computed} computed tokens in "
                f"{len(join.blocks)} blocks of {self._block_size}"
            )

    def update_table(self, update: TableUpdate) -> None:
        """Write blocks into a row's table, which ends with them."""
        row, start, blocks = update.row, update.start, update.blocks
        if row not in self._joined:
            raise InvariantViolated(f"table of row {row}: the row is empty")
        held, end = int(self._table_lens[row]), start + len(blocks)
        if not 0 <= start <= held or end > self._tables.shape[1]:
            raise InvariantViolated(
                f"table of row {row}: blocks {start} to {end}, it has {held} of "
                f"at most {self._tables.shape[1]}"
            )
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise InvariantViolated(
                f"table of row {row}: a block of {blocks} is not below {self._num_blocks}"
            )
        if len(blocks) == 1:
            self._tables[row, start] = blocks[0]
        else:
            self._tables[row, start:end] = blocks
        self._table_lens[row], self._capacity[row] = end, end * self._block_size
        self._last = None

    def table(self, row: int, start: int) -> Ints:
        """The row's blocks from logical block `start` on; a view."""
        return self._tables[row, start : self._table_lens[row]]

    def computed(self, rows: Ints) -> Ints:
        """Tokens of these rows that have K and V, after the latest step."""
        return self._computed[rows]

    def inputs(self, plan: Plan) -> StepInputs:
        """The forward of this plan, after its leaves, joins and tables; advances `computed`."""
        if self._has_moved or plan.idle != self._idle:
            self._see_moves(plan.idle)
        forks = [(j.row, j.logits_of) for j in plan.joins if j.logits_of >= 0]
        if plan.chunks or forks or self._reporting:
            return self._mixed(plan, forks)
        return self._steady(plan)

    def _see_moves(self, idle: tuple[int, ...]) -> None:
        active = self._joined.keys() - set(idle)
        if len(self._joined) - len(active) != len(idle):
            raise InvariantViolated(f"idle rows {idle}: one is empty, or named twice")
        self._names = tuple(sorted(active))
        self._active = np.array(self._names, np.int64)
        self._idle, self._has_moved, self._last = idle, False, None

    def _steady(self, plan: Plan) -> StepInputs:
        """Every row decodes: operations on whole arrays only."""
        rows, count = self._active, len(self._active)
        self._check_sums(plan, count, count)
        last = self._last
        if last is not None and (last.is_ahead or last.left):
            if not last.is_ahead:
                last.advance()
            last.is_ahead = False
            contexts = last.batch.context_lens.copy()
        else:
            self._check_decoding(rows)
            starts = self._computed.take(rows)
            contexts = starts + 1
            self._check_room(rows, contexts)
            last = None
            if count and not self._is_ahead:
                slots, tables = self._place(rows, rows, starts, contexts)
                batch = self._batch(self._ones[:count], contexts.copy(), tables, slots)
                last = _Steady(starts, slots, batch)
            self._last = last
        if last is not None:
            last.take(self._latest, rows)
        self._computed[rows] = contexts
        self._known[rows] = contexts + 1
        if self._is_ahead:
            self._latest[rows] = UNKNOWN
        return StepInputs(
            tokens=None if last is None else last.tokens,
            positions=None if last is None else last.positions,
            batch=None if last is None else last.batch,
            computing=rows,
            last=None,
            rows=self._names,
            at=rows,
            draw_at=contexts,
            parents=[],
            num_tokens=count,
            num_chunk_tokens=0,
        )

    def next_steady(self) -> _Steady | None:
        """The inputs of the step after a steady one whose tokens are known, if it is one token on
        for every row: it may begin before its plan is there. `inputs` then has them again."""
        last = self._last
        if last is None or not last.left:
            return None
        last.advance()
        last.take(self._latest, self._active)
        last.is_ahead = True
        return last

    def _mixed(self, plan: Plan, forks: list[tuple[int, int]]) -> StepInputs:
        """Decoding rows first, then chunks; forks only draw."""
        self._last = None
        busy = {row for row, _ in forks}.union(plan.idle)
        for chunk in plan.chunks:
            self._check_chunk(chunk, busy)
            busy.add(chunk.row)
        is_free = self._is_free
        is_free[list(busy)] = False
        decoding = self._active[is_free.take(self._active)]
        is_free[list(busy)] = True
        chunks = plan.chunks
        counts = np.array([c.count for c in chunks], np.int64)
        rows = np.concatenate([decoding, np.array([c.row for c in chunks], np.int64)])
        counts = np.concatenate([self._ones[: len(decoding)], counts])
        self._check_decoding(decoding)
        draws = np.array([1] * len(decoding) + [c.num_draws for c in chunks], np.int64)
        num_tokens, num_draws = int(counts.sum()), int(draws.sum())
        self._check_sums(plan, num_tokens, num_draws + len(forks))
        tokens = positions = batch = None
        if len(rows):
            tokens, positions, batch = self._pack(decoding, chunks, rows, counts)
        # Each draw's distance from the first of its row.
        steps = np.arange(num_draws) - np.repeat(np.cumsum(draws) - draws, draws)
        last = scored = None
        if chunks:
            ends = np.cumsum(counts)
            at_last = np.repeat(ends - draws, draws) + steps
            if any(c.score for c in chunks):
                scored, where = self._score(chunks, ends[len(decoding) :])
                at_last = np.concatenate([at_last, where])
            last = torch.from_numpy(at_last)
        self._computed[rows] += counts
        drawing = np.repeat(rows, draws).tolist()
        parents = [_index_of(drawing, parent) for _, parent in forks]
        at = np.array(drawing + [row for row, _ in forks], np.int64)
        first_at = self._computed[rows] - draws + 1
        draw_at = np.concatenate([np.repeat(first_at, draws) + steps, self._known[at[num_draws:]]])
        self._known[at] = draw_at + 1
        if self._is_ahead:
            self._latest[at] = UNKNOWN
        verified = [c for c in chunks if c.tokens]
        drawn = enumerate(at.tolist() if self._reporting else ())
        return StepInputs(
            tokens=tokens,
            positions=positions,
            batch=batch,
            computing=rows,
            last=last,
            rows=tuple(at.tolist()),
            at=at,
            draw_at=draw_at,
            parents=parents,
            num_tokens=num_tokens,
            num_chunk_tokens=num_tokens - len(decoding) - sum(c.count for c in verified),
            scored=scored,
            runs=self._runs(verified, drawing) if verified else (),
            hidden=tuple(i for i, row in drawn if row in self._reporting),
        )

    def _runs(self, verified: list[Chunk], drawing: list[int]) -> tuple[Run, ...]:
        """Those of chunks that verify provisional tokens; until `drew` has their tokens the rows
        can do nothing."""
        runs = []
        for chunk in verified:
            if chunk.num_draws > 1:
                run = Run(drawing.index(chunk.row), chunk.tokens[1 - chunk.num_draws :])
                runs.append(run)
                self._unsettled[chunk.row] = run
        return tuple(runs)

    def _score(self, chunks: tuple[Chunk, ...], ends: Ints) -> tuple[Scored, Ints]:
        """What the chunks score, and its packed indices; `ends`: index after each chunk."""
        rows: list[tuple[int, int]] = []
        targets: list[int] = []
        num_top, where = [], []
        for chunk, end in zip(chunks, ends.tolist(), strict=True):
            if not chunk.score:
                continue
            top, num_prompt = self._scoring.get(chunk.row, (0, 0))
            upto = chunk.start + chunk.count - chunk.num_draws  # position of its last target
            if not 0 < chunk.score <= chunk.count - chunk.num_draws or upto >= num_prompt:
                raise InvariantViolated(
                    f"chunk of row {chunk.row}: {chunk.score} tokens up to {upto} are scored, of "
                    f"{chunk.count} from {chunk.start} and {num_prompt} of a prompt that asked"
                )
            rows.append((chunk.row, chunk.score))
            num_top.append(top)
            targets += self._joined[chunk.row][upto - chunk.score + 1 : upto + 1]
            end -= chunk.num_draws
            where.append(np.arange(end - chunk.score, end))
        scored = Scored(tuple(rows), tuple(num_top), np.array(targets, np.int64))
        return scored, np.concatenate(where)

    def drew(
        self, inputs: StepInputs, tokens: list[int], late: Mapping[int, int] = NO_ROWS
    ) -> dict[int, int]:
        """The step drew these tokens, parallel to inputs.rows (a failed row's is not used); the
        newest token of each row that verified or was late, where it did not leave meanwhile.

        late  row that drew nothing -> its newest token, to be computed again
        """
        if not self._is_ahead:
            self._latest[inputs.at] = tokens
        settled = {}
        for run in inputs.runs:
            row = inputs.rows[run.first]
            drawn = [token for token in tokens[run.first : run.end] if token >= 0]
            if self._unsettled.get(row) is not run or not drawn:
                continue
            del self._unsettled[row]
            self._last = None
            settled[row] = self._latest[row] = drawn[-1]
            self._known[row] = known = int(inputs.draw_at[run.first]) + len(drawn)
            self._computed[row] = known - 1
        for row, newest in late.items():
            if row not in self._joined:
                continue
            self._unsettled.pop(row, None)
            self._last = None
            self._latest[row] = settled[row] = newest
            known = int(inputs.draw_at[inputs.rows.index(row)])
            if known < self._known[row]:  # in a plan launched since, it was later still
                self._known[row], self._computed[row] = known, known - 1
        return settled

    def _pack(
        self, decoding: Ints, chunks: tuple[Chunk, ...], rows: Ints, counts: Ints
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        starts = self._computed[rows]
        contexts = starts + counts
        self._check_room(rows, contexts)
        if chunks:
            tokens = np.concatenate([self._latest[decoding], *map(self._chunk_tokens, chunks)])
            first = np.cumsum(counts) - counts
            positions = np.arange(len(tokens)) + np.repeat(starts - first, counts)
            owner = np.repeat(rows, counts)
        else:
            tokens, positions, owner = self._latest[rows], starts, rows
        slots, tables = self._place(rows, owner, positions, contexts)
        batch = self._batch(counts, contexts, tables, slots)
        return torch.from_numpy(tokens), torch.from_numpy(positions), batch

    def _place(self, rows: Ints, owner: Ints, positions: Ints, contexts: Ints) -> tuple[Ints, Ints]:
        """The slot of each token, at a position of the row that owns it, and the rows' tables."""
        block = self._block_size
        index, offset = np.divmod(positions, block)
        slots = self._tables[owner, index] * block + offset
        width = -(-int(contexts.max()) // block)
        is_whole = rows is self._active and int(rows[-1]) == len(rows) - 1
        # Without gaps among the rows their tables are a slice: nothing to copy.
        tables = self._tables[: len(rows), :width] if is_whole else self._tables[rows, :width]
        return slots, tables

    def _batch(self, counts: Ints, contexts: Ints, tables: Ints, slots: Ints) -> AttentionBatch:
        return AttentionBatch(
            query_lens=counts,
            context_lens=contexts,
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            block_size=self._block_size,
        )

    def _chunk_tokens(self, chunk: Chunk) -> Ints:
        """The chunk's own, else the row's tokens from its join, or its last drawn token, the only
        one not computed."""
        if chunk.tokens:
            return np.array(chunk.tokens, np.int64)
        joined = self._joined[chunk.row]
        if chunk.start >= len(joined):
            return self._latest[chunk.row : chunk.row + 1]
        return np.array(joined[chunk.start : chunk.start + chunk.count], np.int64)

    def _check_chunk(self, chunk: Chunk, busy: set[int]) -> None:
        row = chunk.row
        if row not in self._joined or row in busy:
            raise InvariantViolated(f"chunk of row {row}: the row is empty, or named twice")
        known, computed = int(self._known[row]), int(self._computed[row])
        end = chunk.start + chunk.count
        is_right = chunk.count > 0 and chunk.start == computed and row not in self._unsettled
        if chunk.tokens:
            is_right = is_right and len(chunk.tokens) == chunk.count >= chunk.num_draws
        elif chunk.num_draws:
            is_right = is_right and end == known and chunk.num_draws == 1
        if not is_right or (end > known and not chunk.tokens):
            raise InvariantViolated(
                f"chunk of row {row}: {chunk.count} tokens from {chunk.start}, {chunk.num_draws} "
                f"draws, {len(chunk.tokens)} tokens given; {computed} of {known} known tokens are "
                f"computed{', and a run is awaited' if row in self._unsettled else ''}"
            )

    def _check_room(self, rows: Ints, contexts: Ints) -> None:
        short = contexts > self._capacity.take(rows)
        if short.any():
            row, need = int(rows[short][0]), int(contexts[short][0])
            raise InvariantViolated(
                f"row {row} computes up to {need} tokens, its {self._table_lens[row]} blocks of "
                f"{self._block_size} do not cover them"
            )

    def _check_decoding(self, decoding: Ints) -> None:
        wrong = self._known.take(decoding) - self._computed.take(decoding) != 1
        if self._unsettled and not wrong.any():
            wrong = np.isin(decoding, list(self._unsettled))
        if wrong.any():
            row = int(decoding[wrong][0])
            raise InvariantViolated(
                f"row {row} is to decode, but {self._computed[row]} of its {self._known[row]} "
                "tokens are computed"
            )

    def _check_sums(self, plan: Plan, num_tokens: int, num_samples: int) -> None:
        for name, ours, theirs in (
            ("num_rows", len(self._joined), plan.num_rows),
            ("num_tokens", num_tokens, plan.num_tokens),
            ("num_samples", num_samples, plan.num_samples),
        ):
            if ours != theirs:
                raise InvariantViolated(
                    f"plan {plan.number}: {name} is {theirs}, the rows say {ours}"
                )


def step_result(
    number: int,
    inputs: StepInputs,
    drawn: SampleOutput,
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]],
    hidden: torch.Tensor | None = None,
) -> StepResult:
    """The result of what inputs.rows drew: rows ascending, each row's tokens in order, without
    failed ones and those beyond the ends of runs.

    hidden  of inputs.hidden, on the host
    """
    if hidden is not None:
        drawn = _with_hidden(drawn, inputs.hidden, hidden)
    if inputs.is_steady and min(drawn.tokens, default=0) >= 0:
        return StepResult(
            number, inputs.rows, tuple(drawn.tokens), drawn.logprobs, forced=drawn.forced
        )
    found = np.array(drawn.tokens, np.int64)
    order = inputs.at.argsort(kind="stable")
    order = order[found[order] >= 0]
    failed = {
        inputs.rows[i]: drawn.errors.get(i, NOT_FINITE)
        for i in np.flatnonzero(found == FAILED).tolist()
    }
    logprobs = {
        n: drawn.logprobs[i] for n, i in enumerate(order.tolist()) if i in drawn.logprobs
    }  # fmt: skip
    return StepResult(
        number,
        tuple(inputs.at[order].tolist()),
        tuple(found[order].tolist()),
        logprobs,
        failed,
        prompt_logprobs,
        forced=drawn.forced,
        candidates={inputs.rows[i]: found for i, found in drawn.candidates.items()},
        late=tuple(sorted(drawn.late)),
    )


def _with_hidden(drawn: SampleOutput, at: tuple[int, ...], hidden: torch.Tensor) -> SampleOutput:
    logprobs = dict(drawn.logprobs)
    for i, state in zip(at, hidden, strict=True):
        if drawn.tokens[i] < 0:
            continue
        found = logprobs.get(i) or TokenLogprob(drawn.tokens[i], math.nan)
        logprobs[i] = msgspec.structs.replace(found, hidden=state.numpy().tobytes())
    return msgspec.structs.replace(drawn, logprobs=logprobs)


def _index_of(drawing: list[int], parent: int) -> int:
    if parent not in drawing:
        raise InvariantViolated(f"a fork of row {parent}, which draws nothing in this plan")
    return drawing.index(parent)

"""A simulated device: executes Plans on memory that remembers what was written where.

Each KV cell holds the hash of the whole token prefix up to its position, so a read of a wrong,
stale or overwritten block is seen at once. Drawn tokens depend on everything before them, so a
wrong prefix shows in the output.

As on a GPU, `launch` only queues: plans compute in order, when they are collected. Swap copies are
on streams of their own. A swap-in waits for no other work: it may run before plans that were
launched earlier have computed. A swap-out waits for the plans before its own, whose blocks it
reads. Both may be done long after their plan is collected. The copies of one plan run in any order.

Work that may run at the same time must therefore touch different blocks, in whatever order the
hardware runs it: `launch` and every store check that, beyond this one run's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from msgspec.structs import replace

from streamer.core.beams.search import BeamSearch, Ended, num_candidates
from streamer.core.plan import (
    Add,
    Candidates,
    Chunk,
    Plan,
    RowJoin,
    StepResult,
    TokenLogprob,
    accepted,
)

VOCAB = 97
ROOT = 1
BAD = -1  # a cell whose K or V is not finite
LOST = -2  # one of a token that was not drawn


def extend(chain: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return (chain * 1_000_003 + token * 97 + 12345) % (1 << 61)


def chain_of(tokens: list[int]) -> list[int]:
    """The hash of the prefix after each token."""
    chains, chain = [], ROOT
    for token in tokens:
        chain = extend(chain, token)
        chains.append(chain)
    return chains


def draw(chain: int, choice: int) -> int:
    """The next token after a prefix, for one of the n choices."""
    return (chain // 7 + choice * 31) % VOCAB


def best(chain: int, count: int) -> Candidates:
    """The best tokens after a prefix, with log probabilities that are nowhere equal."""
    scored = [(-0.1 - (chain // 7 + 31 * t * t) % 1009 / 250 - t * 1e-5, t) for t in range(VOCAB)]
    scored.sort(reverse=True)
    return Candidates([token for _, token in scored[:count]], [lp for lp, _ in scored[:count]])


def beam_oracle(add: Add, beams: BeamSearch, token_bytes: Seq[bytes]) -> list[Ended]:
    """What a search outputs, however it was scheduled."""
    wanted = num_candidates(add.params, len(add.stop_ids))
    known = [list(add.prompt)]
    while not beams.is_done:
        candidates = [best(chain_of(tokens)[-1], wanted) for tokens in known]
        going_on = beams.advance(known, candidates, token_bytes)
        known = [[*known[parent], token] for parent, token in going_on]
    return beams.ended


def score(prompt: tuple[int, ...]) -> list[TokenLogprob]:
    """Log probabilities of all tokens of a prompt but the first."""
    chains = chain_of(list(prompt))
    return [TokenLogprob(prompt[i + 1], -1.0 - chains[i] % 1009) for i in range(len(prompt) - 1)]


def oracle(prompt: tuple[int, ...], choice: int, count: int) -> list[int]:
    """What a request's choice must output, however it was scheduled."""
    return continuation(list(prompt), choice, count)


def continuation(tokens: list[int], choice: int, count: int) -> list[int]:
    """The next tokens of a choice that has these, its prompt's among them."""
    chain = chain_of(tokens)[-1]
    output = []
    for _ in range(count):
        output.append(draw(chain, choice))
        chain = extend(chain, output[-1])
    return output


@dataclass
class Row:
    """The runner's record of a sequence.

    lost_until  up to this plan it goes on from a token that it did not draw
    """

    join: RowJoin
    tokens: list[int]
    computed: int
    table: list[int] = field(default_factory=list)
    lost_until: int = 0


class Device:
    """Memory and rows. `launch` queues a plan, `run` computes it, `flush` ends its swap copies."""

    def __init__(self, num_blocks: int, num_host: int, block_size: int) -> None:
        self.size = block_size
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_host)]
        self.rows: dict[int, Row] = {}
        self.prefixes: dict[int | None, list[int]] = {}  # by the hash that a cell holds
        self.launched: deque[Plan] = deque()
        self.early: set[int] = set()  # plans whose swap copies run as soon as they may
        self.copying: deque[Plan] = deque()  # plans whose swap copies may still be under way
        self.copies_done = 0
        self.tables: dict[int, list[int]] = {}  # tables of the rows, as of the plan launched last
        self.touched: dict[int, set[int]] = {}  # launched plan -> what its step reads or writes

    def launch(self, plan: Plan, is_early: bool = False) -> None:
        """Queue the plan; `is_early`: its swap copies run as soon as they may."""
        self._update_tables(plan)
        self._check_moves(plan)
        self.launched.append(plan)
        self.copying.append(plan)
        if is_early:
            self.early.add(plan.number)
            self._swap_in(plan)

    def _update_tables(self, plan: Plan) -> None:
        for row in plan.leaves:
            del self.tables[row]
        for join in plan.joins:
            self.tables[join.row] = list(join.blocks)
        for update in plan.tables:
            self.tables[update.row][update.start :] = update.blocks
        held = {b for row, table in self.tables.items() if row not in plan.idle for b in table}
        self.touched[plan.number] = held.union(*plan.copies)

    def _check_moves(self, plan: Plan) -> None:
        """Work that may run at the same time touches different blocks."""
        into = [block for _, block in (*plan.copies, *plan.swap_in)]
        into_host = [block for _, block in plan.swap_out]
        came = {block for _, block in plan.swap_in}
        assert len(set(into)) == len(into), "two copies touch the same block"
        assert len(set(into_host)) == len(into_host), "two copies touch the same block of the host"
        for source, _ in (*plan.copies, *plan.swap_out):
            assert source not in into, f"two copies of plan {plan.number} touch the same block"
        for number, touched in self.touched.items():
            assert touched.isdisjoint(came) or number == plan.number, (
                f"a swap-in of plan {plan.number} and plan {number} touch the same block"
            )
        for other in (*self.copying, plan):
            read = {block for block, _ in other.swap_in}
            assert read.isdisjoint(into_host), "two swaps touch the same block of the host"
        for other in self.copying:
            self._check_store(into, other)
            written = {block for _, block in other.swap_out}
            assert written.isdisjoint(into_host), "two swaps touch the same block of the host"

    def _check_store(self, blocks: list[int], plan: Plan) -> None:
        """Swap copies of `plan`, which may still run, touch none of these blocks."""
        busy = {block for block, _ in plan.swap_out} | {block for _, block in plan.swap_in}
        assert busy.isdisjoint(blocks), (
            f"a step and swaps of plan {plan.number} touch the same block"
        )

    def run(self, number: int) -> StepResult:
        """Compute the oldest launched plan, with its effects in order."""
        plan = self.launched.popleft()
        assert plan.number == number, f"plan {number} collected before {plan.number}"
        for row in plan.leaves:
            del self.rows[row]
        for join in plan.joins:
            assert join.row not in self.rows, f"row {join.row} joined twice"
            self.rows[join.row] = Row(join, list(join.tokens), join.num_computed, list(join.blocks))
        for update in plan.tables:
            table = self.rows[update.row].table
            assert update.start <= len(table), "a hole in a block table"
            table[update.start :] = update.blocks
        if plan.number in self.early:
            self._swap_out(plan)
        for source, destination in plan.copies:
            self.memory[destination] = list(self.memory[source])
        assert len(self.rows) == plan.num_rows
        del self.touched[number]
        return self._compute(plan)

    def flush(self, upto: int) -> None:
        """End the swap copies of plans up to `upto`."""
        while self.copying and self.copying[0].number <= upto:
            plan = self.copying.popleft()
            if plan.number not in self.early:
                self._swap_out(plan)
                self._swap_in(plan)
            self.copies_done = plan.number

    def _swap_out(self, plan: Plan) -> None:
        for source, destination in plan.swap_out:
            self.host[destination] = list(self.memory[source])

    def _swap_in(self, plan: Plan) -> None:
        for source, destination in plan.swap_in:
            self.memory[destination] = list(self.host[source])

    def _work(self, plan: Plan) -> list[tuple[Row, Chunk]]:
        """What each row computes in this plan; a row that decodes as a chunk of one token."""
        chunks = {c.row: c for c in plan.chunks}
        forks = {join.row for join in plan.joins if join.logits_of >= 0}
        named = [*chunks, *plan.idle, *forks]
        assert len(set(named)) == len(plan.chunks) + len(plan.idle) + len(forks)
        assert self.rows.keys() >= set(named)
        work: list[tuple[Row, Chunk]] = []
        for number, row in sorted(self.rows.items()):
            if number in plan.idle or number in forks:
                continue
            chunk = chunks.get(number, Chunk(number, row.computed, 1, num_draws=1))
            assert chunk.start == row.computed
            assert chunk.count > 0
            if row.join.params.use_beam_search:
                assert chunk.num_draws < 2
                assert len(chunk.tokens) in (0, chunk.count)
                if chunk.tokens and number not in {join.row for join in plan.joins}:
                    row.tokens = [*self._before(row, chunk.start), *chunk.tokens]
            elif chunk.tokens:
                assert chunk.count == chunk.num_draws == len(chunk.tokens)
                assert row.tokens[row.computed :] == [chunk.tokens[0]], "verifies another token"
                row.tokens += chunk.tokens[1:]
            elif chunk.num_draws:
                assert chunk.num_draws == 1
                assert row.computed + chunk.count == len(row.tokens), "draws before its last token"
            work.append((row, chunk))
        assert sum(chunk.count for _, chunk in work) == plan.num_tokens
        assert sum(chunk.num_draws for _, chunk in work) + len(forks) == plan.num_samples
        return work

    def _compute(self, plan: Plan) -> StepResult:
        scores = self._scores(plan)
        work = self._work(plan)
        forks = [join for join in plan.joins if join.logits_of >= 0]
        stored: list[int] = []
        late = [row.join.row for row, _ in work if plan.number <= row.lost_until]
        for row, chunk in work:  # every store before any read
            if row.join.row in late:
                block, offset = divmod(len(row.tokens), self.size)
                self.memory[row.table[block]][offset] = LOST
                stored.append(row.table[block])
                continue
            chains = chain_of(row.tokens)
            for position in range(row.computed, row.computed + chunk.count):
                block, offset = divmod(position, self.size)
                self.memory[row.table[block]][offset] = chains[position]
                self.prefixes[chains[position]] = row.tokens[: position + 1]
                stored.append(row.table[block])
            row.computed += chunk.count
        for other in self.copying:
            if other.number <= plan.number:  # a later swap-out waits for this step
                self._check_store(stored, other)
        drawn: dict[int, list[int]] = {}
        candidates: dict[int, Candidates] = {}
        failed: dict[int, str] = {}
        for row, chunk in work:
            number = row.join.row
            if number in late:
                continue
            is_well = self._read(row)
            if chunk.num_draws and is_well and row.join.params.use_beam_search:
                wanted = num_candidates(row.join.params, len(row.join.stop_ids))
                candidates[number] = best(chain_of(row.tokens)[-1], wanted)
            elif chunk.num_draws and is_well:
                drawn[number] = self._draw(row, chunk)
            elif chunk.num_draws:
                failed[number] = "not finite"
        for join in forks:
            child, parent = self.rows[join.row], self.rows[join.logits_of]
            assert child.tokens == parent.tokens
            assert child.computed == len(child.tokens)
            if not self._read(child) or parent.join.row in failed:
                failed[child.join.row] = "not finite"
                continue
            drawn[child.join.row] = [draw(chain_of(child.tokens)[-1], child.join.choice)]
        for number, run in [*drawn.items(), *((row, [0]) for row in failed)]:
            self.rows[number].tokens += run  # a failed row's 0 is never used
        rows = tuple(number for number in sorted(drawn) for _ in drawn[number])
        tokens = tuple(token for number in sorted(drawn) for token in drawn[number])
        return StepResult(
            plan.number,
            rows,
            tokens,
            failed=failed,
            prompt_logprobs=scores,
            proposals={row: self._propose(self.rows[row], n) for row, n in plan.drafts},
            candidates=candidates,
            late=tuple(late),
        )

    def _before(self, row: Row, end: int) -> list[int]:
        """The tokens whose KV is before `end` in the row's table, which may be another's now."""
        block, offset = divmod(end - 1, self.size)
        cell = self.memory[row.table[block]][offset] if end else None
        return self.prefixes.get(cell, row.tokens[:end])

    def _propose(self, row: Row, count: int) -> tuple[int, ...]:
        """What the row's draft model proposes: it is wrong about every fifth prefix."""
        tokens = continuation(row.tokens, row.join.choice, count)
        return tuple((t + 1) % VOCAB if sum(row.tokens) % 5 == 0 else t for t in tokens)

    def _draw(self, row: Row, chunk: Chunk) -> list[int]:
        """What the row draws; of provisional tokens it keeps those that are drawn as well."""
        chains = chain_of(row.tokens)[-chunk.num_draws :]
        run = [draw(chain, row.join.choice) for chain in chains]
        del run[accepted(chunk.tokens[1:], run) + 1 :]
        if chunk.tokens:
            del row.tokens[chunk.start + 1 :]
            row.computed = chunk.start + len(run)
        return run

    def _scores(self, plan: Plan) -> dict[int, tuple[TokenLogprob, ...]]:
        scores = {}
        for chunk in plan.chunks:
            join = self.rows[chunk.row].join
            assert chunk.score == 0 or join.params.prompt_logprobs is not None
            upto = chunk.start + chunk.count - chunk.num_draws
            assert 0 <= chunk.score <= upto - chunk.start
            assert chunk.score == 0 or upto < join.num_prompt
            if chunk.score:
                found = score(join.tokens[: join.num_prompt])
                scores[chunk.row] = tuple(found[upto - chunk.score : upto])
        return scores

    def delay(self, plan: Plan, result: StepResult, numbers: set[int]) -> StepResult:
        """These rows, which drew, did not: the masks of what they may draw were not there."""
        for number in numbers:
            row = self.rows[number]
            del row.tokens[-result.rows.count(number) :]
            row.computed = len(row.tokens) - 1
            row.lost_until = max([plan.number, *(other.number for other in self.launched)])
        drawn = zip(result.rows, result.tokens, strict=True)
        kept = [(row, token) for row, token in drawn if row not in numbers]
        late = numbers.union(result.late)
        return replace(
            result,
            rows=tuple(row for row, _ in kept),
            tokens=tuple(token for _, token in kept),
            proposals={row: each for row, each in result.proposals.items() if row not in late},
            late=tuple(sorted(late)),
        )

    def poison(self, plan: Plan, result: StepResult) -> StepResult:
        """Let the first row that drew fail, at the last token of its run, and mark what it wrote
        from there on as not finite."""
        candidates = dict(result.candidates)
        number = result.rows[0] if result.rows else min(candidates)
        row = self.rows[number]
        length = result.rows.count(number)
        if candidates.pop(number, None) is None:
            row.tokens[-1] = 0  # the drawn token is never used
        chunk = next((c for c in plan.chunks if c.row == number), None)
        first = row.computed - 1 if chunk is None or chunk.tokens else chunk.start
        for position in range(first, row.computed):
            block, offset = divmod(position, self.size)
            self.memory[row.table[block]][offset] = BAD
        return StepResult(
            plan.number,
            (*result.rows[: max(0, length - 1)], *result.rows[length:]),
            (*result.tokens[: max(0, length - 1)], *result.tokens[length:]),
            failed={**result.failed, number: "not finite"},
            prompt_logprobs=result.prompt_logprobs,
            candidates=candidates,
            late=result.late,
        )

    def _read(self, row: Row) -> bool:
        """Whether all that the row reads is finite; finite cells must be the row's own prefix."""
        is_well = True
        chains = chain_of(row.tokens)
        for position in range(row.computed):
            block, offset = divmod(position, self.size)
            cell = self.memory[row.table[block]][offset]
            if cell == BAD:
                is_well = False
                continue
            assert cell == chains[position], (
                f"{row.join.request_id}: position {position} reads another prefix"
            )
        return is_well

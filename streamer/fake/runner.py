"""FakeRunner: executes Plans without a model, and checks every one against the rows it holds.

Computes nothing and stores no KV; a plan that does not fit raises InvariantViolated. A plan takes
a few hundred nanoseconds a row, so that measurements are of everything but a model. Runs on the GPU
thread; made by fake/model.py.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from streamer.core.beams.search import num_candidates
from streamer.core.plan import (
    Candidates,
    Chunk,
    Facts,
    Plan,
    RowJoin,
    StepResult,
    TokenLogprob,
    accepted,
    check_moves,
)
from streamer.errors import InvariantViolated
from streamer.fake.script import Script
from streamer.fake.tokenizer import (
    END,
    FIRST_NUMBER,
    SINGLES,
    USER,
    VOCAB_SIZE,
    expected_tokens,
    num_tokens_to,
    token_at,
)

NEVER = 1 << 62
NO_SCRIPT = Script()
IMPOSSIBLE = -9999.0  # log probability of what is never drawn, as OpenAI writes it
COUNT_TO = re.compile(rb"count to (\d{1,9})", re.IGNORECASE)


class _Row:
    """What the runner keeps of a sequence.

    known, computed  tokens of prompt and output; tokens whose KV would be stored
    capacity         tokens that its block table has room for
    first            known tokens when the output begins
    plain            output tokens that are one number each, before its end
    end              output tokens before its end token
    said             its output by a script; None: it counts
    num_candidates   of a beam's row, which draws nothing; 0: it draws
    """

    __slots__ = (
        "capacity",
        "computed",
        "end",
        "first",
        "hidden",
        "known",
        "logprobs",
        "num_blocks",
        "num_candidates",
        "plain",
        "prompt",
        "prompt_end",
        "prompt_logprobs",
        "request_id",
        "said",
    )

    def __init__(self, join: RowJoin, block_size: int, length: int, script: Script) -> None:
        self.request_id = join.request_id
        self.computed = join.num_computed
        self.known = len(join.tokens)
        self.prompt_end = join.tokens[join.num_prompt - 1]
        self.first = join.num_prompt
        self.num_blocks = len(join.blocks)
        self.capacity = self.num_blocks * block_size
        self.said = script.answer_to(join.tokens[: self.first]) if script.lines else None
        self.end = _end_of(join, length)
        self.plain = min(self.end, SINGLES)
        if self.said is not None:
            is_endless = join.params.ignore_eos
            self.end = NEVER if is_endless else max(len(self.said), join.params.min_tokens)
            self.plain = 0
        self.logprobs = join.params.logprobs
        self.hidden = hidden_of(join.tokens[: self.first]) if join.params.hidden_states else b""
        is_beam = join.params.use_beam_search
        self.num_candidates = num_candidates(join.params, len(join.stop_ids)) if is_beam else 0
        self.prompt_logprobs = join.params.prompt_logprobs
        self.prompt = () if self.prompt_logprobs is None else join.tokens[: self.first]

    def draw(self) -> int:
        """The next output token, known from now on."""
        index = self.known - self.first
        self.known += 1
        return FIRST_NUMBER + index if index < self.plain else self.late(index)

    def candidates(self) -> Candidates:
        """What it would draw, far before other numbers: the later, the less far, so that the best
        hypotheses of a search are those that differ last."""
        index = self.known - self.first
        token = FIRST_NUMBER + index if index < self.plain else self.late(index)
        others = range(FIRST_NUMBER, VOCAB_SIZE)
        rest = [other for other in others[: self.num_candidates] if other != token]
        far = -5.0 + min(index, 400) / 100
        values = [-0.1, *(far - n / 1000 for n in range(len(rest)))]
        return Candidates([token, *rest][: self.num_candidates], values[: self.num_candidates])

    def newest(self) -> int:
        """The last known token."""
        index = self.known - 1 - self.first
        if index < 0:
            return self.prompt_end
        return FIRST_NUMBER + index if index < self.plain else self.late(index)

    def verify(self, tokens: tuple[int, ...]) -> list[int]:
        """The run after the newest token and these provisional ones."""
        known = self.known
        drawn = [self.draw() for _ in tokens]
        run = drawn[: accepted(tokens[1:], drawn) + 1]
        self.known = known + len(run)
        self.computed = self.known - 1
        return run

    def score(self, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        """The chunk's scores of prompt tokens: log probability 0 for each."""
        upto = chunk.start + chunk.count - chunk.num_draws + 1
        tokens = self.prompt[upto - chunk.score : upto]
        return tuple(certain_logprob(token, self.prompt_logprobs or 0) for token in tokens)

    def expected(self, count: int) -> tuple[int, ...]:
        """Its first output tokens."""
        if self.said is None:
            return tuple(expected_tokens(0, count))
        return tuple(map(self.late, range(count)))

    def late(self, index: int) -> int:
        """The output token at an index that is not below `plain`."""
        if index >= self.end:
            return END
        return token_at(index) if self.said is None else self.said[index % len(self.said)]


def hidden_of(prompt: tuple[int, ...]) -> bytes:
    """Eight float32 from -1 to 1 that depend on all of the prompt, in place of a hidden state."""
    digest = blake2b(repr(prompt).encode(), digest_size=8).digest()
    return array("f", (byte / 127.5 - 1.0 for byte in digest)).tobytes()


def certain_logprob(token: int, num_top: int) -> TokenLogprob:
    """The token with log probability 0 and impossible alternatives, `num_top` in all."""
    others = ((token + i) % VOCAB_SIZE for i in range(1, num_top))
    top = ((token, 0.0), *((other, IMPOSSIBLE) for other in others))[:num_top]
    return TokenLogprob(token, 0.0, top)


def _end_of(join: RowJoin, length: int) -> int:
    """Output tokens before the end token: what the prompt asks for, else `length`, 0 for never."""
    if join.params.ignore_eos:
        return NEVER
    prompt = join.tokens[: join.num_prompt]
    if USER in prompt:  # earlier turns do not count
        prompt = prompt[len(prompt) - 1 - prompt[::-1].index(USER) :]
    counts = COUNT_TO.findall(bytes(token for token in prompt if token < 256))
    end = num_tokens_to(int(counts[-1])) if counts else length or NEVER
    return max(end, join.params.min_tokens)


class FakeRunner:
    """Executes plans without a model; see engine/core.py, Runner. Used by one thread."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        depth: int = 0,
        tokens_per_s: float = 0.0,
        length: int = 0,
    ) -> None:
        """`tokens_per_s`: of each stream, 0: as fast as it goes; `length`: see FakeOptions."""
        self.depth = depth
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._length = length
        self.script = NO_SCRIPT  # what it answers instead of counting
        self._period_s = 1.0 / tokens_per_s if tokens_per_s else 0.0
        self._due_s = 0.0
        self._rows: dict[int, _Row] = {}
        self._order: tuple[tuple[int, _Row], ...] = ()
        self._numbers: tuple[int, ...] = ()
        self._has_logprobs = False
        self._facts = Facts()

    def constrain(self, grammars: object) -> None:
        """Its answers are fixed: they follow no grammar."""

    def reset(self, launched: int) -> None:
        """Forget all rows, and the plans up to this number."""
        self._rows, self._order, self._numbers = {}, (), ()
        self._facts = Facts(copies_done=launched)

    def launch(self, plan: Plan) -> FakeInFlight:
        """Take the plan's effects and draw; raises InvariantViolated if the plan does not fit."""
        if plan.number != self._facts.copies_done + 1:
            raise InvariantViolated(f"plan {plan.number} after plan {self._facts.copies_done}")
        if plan.leaves or plan.joins:
            self._change_rows(plan)
        if plan.tables:
            self._write_tables(plan)
        if plan.copies or plan.swap_out or plan.swap_in:
            check_moves(plan, self._num_blocks, self._num_host_blocks)
        _equal(plan, "rows", plan.num_rows, len(self._order))
        if plan.chunks or plan.idle or any(join.logits_of >= 0 for join in plan.joins):
            result = self._mixed_step(plan)
        else:
            result = self._decode_step(plan)
        self._facts = Facts(copies_done=plan.number)  # there is nothing to copy
        return FakeInFlight(result, self._due(plan))

    def facts(self) -> Facts:
        """Copies take no time; costs are the defaults."""
        return self._facts

    def close(self) -> None:
        self._rows.clear()
        self._order = ()

    def _decode_step(self, plan: Plan) -> StepResult:
        """Every row computes the token it drew last, and draws one."""
        tokens = []
        for number, row in self._order:
            computed = row.computed + 1
            if computed != row.known or computed > row.capacity:
                raise _misfit(plan, number, row, 1)
            row.computed = computed
            index = computed - row.first
            row.known = computed + 1
            tokens.append(FIRST_NUMBER + index if index < row.plain else row.late(index))
        _equal(plan, "computed tokens", plan.num_tokens, len(tokens))
        _equal(plan, "samples", plan.num_samples, len(tokens))
        return self._result(plan, self._numbers, tokens, {})

    def _mixed_step(self, plan: Plan) -> StepResult:
        """A step in which some rows prefill, are idle, or begin from another row's logits."""
        chunks = {chunk.row: chunk for chunk in plan.chunks}
        idle = set(plan.idle)
        if len(chunks.keys() | idle) != len(plan.chunks) + len(plan.idle):
            raise InvariantViolated(f"plan {plan.number} names a row twice in chunks and idle")
        forks = {join.row: join for join in plan.joins if join.logits_of >= 0}
        num_tokens, num_draws, rows, tokens, candidates = 0, 0, [], [], {}
        at_end: set[int] = set()  # rows whose last prompt token has its logits in this plan
        scores = {}
        for number, row in self._order:
            if number in forks:
                continue
            if number in idle:
                idle.remove(number)
                continue
            chunk = chunks.pop(number, None)
            count, is_drawing = (1, True) if chunk is None else (chunk.count, chunk.num_draws > 0)
            if chunk is not None and chunk.tokens and row.num_candidates:
                row.known = chunk.start + chunk.count
            elif chunk is not None and chunk.tokens:
                drawn = self._verify(plan, chunk, row)
                rows += [number] * len(drawn)
                tokens += drawn
                num_tokens += chunk.count
                num_draws += chunk.num_draws
                continue
            start = row.computed if chunk is None else chunk.start
            row.computed += count
            is_last = row.computed == row.known
            fits = start + count == row.computed <= min(row.known, row.capacity)
            if not fits or count < 1 or (is_drawing and not is_last):
                raise _misfit(plan, number, row, count)
            num_tokens += count
            if chunk is not None and chunk.score:
                scores[number] = found = row.score(chunk)
                _equal(plan, "scored tokens", chunk.score, len(found))
            num_draws += is_drawing
            if is_drawing and row.num_candidates:
                candidates[number] = row.candidates()
            elif is_drawing:
                if row.computed == row.first:
                    at_end.add(number)
                rows.append(number)
                tokens.append(row.draw())
        if chunks or idle:
            unknown = [*chunks, *idle]
            raise InvariantViolated(f"plan {plan.number}: no sequence has the rows {unknown}")
        for number, join in forks.items():
            rows.append(number)
            tokens.append(self._fork(plan, join, at_end))
        _equal(plan, "computed tokens", plan.num_tokens, num_tokens)
        _equal(plan, "samples", plan.num_samples, num_draws + len(forks))
        order = sorted(range(len(rows)), key=rows.__getitem__)  # stable: a run stays in order
        drawn = [tokens[i] for i in order]
        result = self._result(plan, tuple(rows[i] for i in order), drawn, scores)
        return msgspec.structs.replace(result, candidates=candidates) if candidates else result

    def _fork(self, plan: Plan, join: RowJoin, at_end: set[int]) -> int:
        """The first token of a row that draws from another's logits."""
        row = self._rows[join.row]
        is_whole = row.computed == row.known == row.first <= row.capacity
        if join.logits_of not in at_end or not is_whole:
            raise InvariantViolated(
                f"plan {plan.number}: row {join.row} draws from the logits of row "
                f"{join.logits_of}, with {row.computed} of {row.known} tokens computed"
            )
        return row.draw()

    def _verify(self, plan: Plan, chunk: Chunk, row: _Row) -> list[int]:
        """The run of a chunk with provisional tokens."""
        is_next = chunk.start == row.computed == row.known - 1
        is_drawn = chunk.count == chunk.num_draws == len(chunk.tokens)
        fits = chunk.start + chunk.count <= row.capacity
        if not (is_next and is_drawn and fits) or chunk.tokens[0] != row.newest():
            raise _misfit(plan, chunk.row, row, chunk.count)
        return row.verify(chunk.tokens)

    def _result(
        self, plan: Plan, rows: tuple[int, ...], tokens: list[int],
        scores: dict[int, tuple[TokenLogprob, ...]],
    ) -> StepResult:  # fmt: skip
        if not self._has_logprobs:
            return StepResult(plan.number, rows, tuple(tokens), prompt_logprobs=scores)
        logprobs = {}
        for index, (number, token) in enumerate(zip(rows, tokens, strict=True)):
            num_top = self._rows[number].logprobs
            if num_top is not None:
                found = certain_logprob(token, num_top)
                hidden = self._rows[number].hidden
                logprobs[index] = msgspec.structs.replace(found, hidden=hidden) if hidden else found
        return StepResult(plan.number, rows, tuple(tokens), logprobs, prompt_logprobs=scores)

    def _due(self, plan: Plan) -> float:
        """When this plan's tokens are due (monotonic seconds), 0 for at once."""
        if not self._period_s or not plan.num_tokens:
            return 0.0
        now = time.monotonic()
        # Late by less than a step: the next one catches up, so that the rate holds on average.
        begin = self._due_s if now - self._due_s < self._period_s else now
        self._due_s = begin + self._period_s
        return self._due_s

    def _change_rows(self, plan: Plan) -> None:
        rows = self._rows
        for number in plan.leaves:
            if rows.pop(number, None) is None:
                raise InvariantViolated(
                    f"plan {plan.number}: row {number} leaves, but is not in the batch"
                )
        for join in plan.joins:
            if join.row in rows or join.row < 0:
                raise InvariantViolated(f"plan {plan.number}: row {join.row} joins twice")
            self._check_blocks(plan, join.blocks)
            row = rows[join.row] = _Row(join, self._block_size, self._length, self.script)
            if not (0 < row.first <= row.known and 0 <= row.computed <= row.known):
                raise _misfit(plan, join.row, row, 0)
            if row.computed > row.capacity:
                raise _misfit(plan, join.row, row, 0)
            output = join.tokens[join.num_prompt :]
            if not row.num_candidates and output != row.expected(len(output)):
                raise InvariantViolated(
                    f"plan {plan.number}: {join.request_id} came back with other output tokens"
                )
        self._order = tuple(sorted(rows.items()))
        self._numbers = tuple(number for number, _ in self._order)
        self._has_logprobs = any(row.logprobs is not None for row in rows.values())

    def _write_tables(self, plan: Plan) -> None:
        for update in plan.tables:
            row = self._rows.get(update.row)
            if row is None or not 0 <= update.start <= row.num_blocks:
                raise InvariantViolated(
                    f"plan {plan.number}: blocks for row {update.row} from {update.start} on, "
                    f"but it {'has ' + str(row.num_blocks) if row else 'is not in the batch'}"
                )
            self._check_blocks(plan, update.blocks)
            row.num_blocks = update.start + len(update.blocks)
            row.capacity = row.num_blocks * self._block_size
            if row.computed > row.capacity:
                raise _misfit(plan, update.row, row, 0)

    def _check_blocks(self, plan: Plan, blocks: Sequence[int]) -> None:
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise InvariantViolated(
                f"plan {plan.number}: blocks {min(blocks)} to {max(blocks)} of {self._num_blocks}"
            )
        if len(set(blocks)) != len(blocks):
            raise InvariantViolated(f"plan {plan.number}: a block twice in one table: {blocks}")


class FakeInFlight:
    """A launched plan of the fake runner; `collect` sleeps until its tokens are due."""

    __slots__ = ("_due_s", "_result")

    def __init__(self, result: StepResult, due_s: float) -> None:
        self._result = result
        self._due_s = due_s

    def collect(self) -> StepResult:
        if self._due_s:
            time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._result


def _equal(plan: Plan, what: str, planned: int, found: int) -> None:
    if planned != found:
        raise InvariantViolated(f"plan {plan.number}: {planned} {what} planned, {found} found")


def _misfit(plan: Plan, number: int, row: _Row, count: int) -> InvariantViolated:
    return InvariantViolated(
        f"plan {plan.number}: row {number} of {row.request_id}: {count} tokens to compute, "
        f"{row.computed} of {row.known} computed, room for {row.capacity}, prompt {row.first}"
    )

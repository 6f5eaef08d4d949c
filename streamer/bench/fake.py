"""The fake model: a runner without torch that counts, and checks every Plan it is given.

The token drawn for position p of a sequence is the number p, so an answer spells the numbers from
the prompt's length on and proves itself. Each KV cell remembers the position written to it: a row
that joins with the wrong blocks, a lost swap or a forgotten copy is an InvariantViolated. Runs on
the GPU thread like any runner; `streamer serve fake` serves it.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

import msgspec

from streamer.bench.fake_tokenizer import END_ID, FIRST_NUMBER, NUM_NUMBERS, VOCAB_SIZE
from streamer.core.model_info import ModelInfo
from streamer.core.plan import Chunk, Facts, Plan, RowJoin, StepResult, TokenLogprob
from streamer.errors import ConfigError, InvariantViolated

if TYPE_CHECKING:
    from streamer.config import Config

DEFAULT_BLOCKS = 1 << 18  # 4 million tokens at 16 a block
BYTES_PER_TOKEN = 1024  # so that swaps have a price
GIB = 1 << 30


def token_at(position: int) -> int:
    """The token drawn for a position of a sequence (its prompt counted)."""
    return FIRST_NUMBER + position % NUM_NUMBERS


def expected_text(num_prompt: int, num_output: int) -> str:
    """What an answer of so many tokens to a prompt of so many says."""
    return "".join(f" {p % NUM_NUMBERS}" for p in range(num_prompt, num_prompt + num_output))


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's name may say: `fake:tokens_per_s=100,depth=1`.

    tokens_per_s  steps a second, hence tokens a second of each sequence; 0: as fast as it goes
    depth         plans launched ahead, as on CUDA (0 or 1)
    length        output tokens after which it ends by itself (unless ignore_eos); 0: never
    """

    tokens_per_s: float = 0.0
    depth: int = 0
    length: int = 0


class _Row:
    """What is known of a resident sequence; its tokens are its positions."""

    __slots__ = ("computed", "join", "length", "number", "table")

    def __init__(self, join: RowJoin) -> None:
        self.join = join
        self.number = join.row
        self.length = len(join.tokens)
        self.computed = join.num_computed
        self.table = list(join.blocks)


class FakeInFlight:
    """A launched plan; `collect` takes as long as the rate says."""

    __slots__ = ("_due", "_result", "_runner")

    def __init__(self, runner: FakeRunner, result: StepResult, due: float) -> None:
        self._runner = runner
        self._result = result
        self._due = due

    def collect(self) -> StepResult:
        """Wait as a device would."""
        rest_s = self._due - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        self._runner.copies_done = self._result.number
        return self._result


class FakeRunner:
    """Rows, tables and cells of both pools; raises InvariantViolated on any mistake in a plan."""

    def __init__(
        self, *, num_blocks: int, num_host_blocks: int, block_size: int, options: FakeOptions
    ) -> None:
        self.depth = options.depth
        self.copies_done = 0
        self.rows: dict[int, _Row] = {}
        self._size = block_size
        self._cells = array("q", [-1]) * (num_blocks * block_size)
        self._host_cells = array("q", [-1]) * (num_host_blocks * block_size)
        self._step_s = 1.0 / options.tokens_per_s if options.tokens_per_s else 0.0
        self._length = options.length
        self._due = 0.0
        self._last_plan = 0

    def launch(self, plan: Plan) -> FakeInFlight:
        """Apply the plan in its order of effects; the result is known at once."""
        if plan.number != self._last_plan + 1:
            raise InvariantViolated(f"plan {plan.number} came after plan {self._last_plan}")
        self._last_plan = plan.number
        joined = self._update_rows(plan)
        self._move_blocks(plan)
        result = self._compute(plan, joined)
        self._due = max(self._due, time.perf_counter()) + self._step_s
        return FakeInFlight(self, result, self._due)

    def facts(self) -> Facts:
        """Swapping 16 tokens costs about a tenth of computing them."""
        return Facts(self.copies_done, prefill_s=1e-5, swap_bytes_per_s=1e9, swap_fixed_s=1e-5)

    def close(self) -> None:
        """Nothing outlives it."""
        self.rows.clear()

    # ------------------------------------------------------------ the plan's effects, in order

    def _update_rows(self, plan: Plan) -> list[_Row]:
        for number in plan.leaves:
            if self.rows.pop(number, None) is None:
                raise InvariantViolated(f"plan {plan.number}: row {number} leaves, but is not here")
        joined = []
        for join in plan.joins:
            if join.row in self.rows:
                raise InvariantViolated(f"plan {plan.number}: row {join.row} joins twice")
            for i in range(join.num_prompt, len(join.tokens)):
                if join.tokens[i] not in (token_at(i), END_ID):
                    raise InvariantViolated(
                        f"{join.request_id}: token {i} came back as {join.tokens[i]}"
                    )
            self.rows[join.row] = _Row(join)
            joined.append(self.rows[join.row])
        for update in plan.tables:
            table = self._row(plan, update.row).table
            if update.start > len(table):
                raise InvariantViolated(
                    f"plan {plan.number}: row {update.row}'s table has {len(table)} blocks, "
                    f"the update starts at {update.start}"
                )
            table[update.start :] = update.blocks
        return joined

    def _move_blocks(self, plan: Plan) -> None:
        for source, destination in plan.swap_out:
            self._move(self._cells, source, self._host_cells, destination)
        for source, destination in plan.copies:
            self._move(self._cells, source, self._cells, destination)
        for source, destination in plan.swap_in:
            self._move(self._host_cells, source, self._cells, destination)

    def _move(self, source: array[int], a: int, destination: array[int], b: int) -> None:
        size = self._size
        if not (0 <= a * size < len(source) and 0 <= b * size < len(destination)):
            raise InvariantViolated(f"a copy of block {a} to {b} is beyond the pools")
        destination[b * size : (b + 1) * size] = source[a * size : (a + 1) * size]

    def _compute(self, plan: Plan, joined: list[_Row]) -> StepResult:
        """Every store, then every read, then every draw."""
        chunks = {c.row: c for c in plan.chunks}
        draws: list[_Row] = []
        written: set[int] = set()
        num_tokens = 0
        for row in self.rows.values():
            chunk = chunks.pop(row.number, None) if chunks else None
            if row.join.logits_of >= 0 and row.computed == row.length and chunk is None:
                self._check_fork(plan, row)
                draws.append(row)
                continue
            num_tokens += self._store(row, chunk, written)
            if chunk is None or chunk.sample:
                self._check_all_computed(row)
                draws.append(row)
        self._check_sums(plan, chunks, num_tokens, len(draws))
        for row in joined:
            self._check_cells(row)
        draws.sort(key=lambda r: r.number)
        tokens = tuple(self._draw(row) for row in draws)
        logprobs = {
            row.number: _logprob(token, row.join.params.logprobs)
            for row, token in zip(draws, tokens, strict=True)
            if row.join.params.logprobs is not None
        }
        return StepResult(plan.number, tuple(r.number for r in draws), tokens, logprobs)

    def _store(self, row: _Row, chunk: Chunk | None, written: set[int]) -> int:
        """Compute a row's next positions into its blocks; how many."""
        count = 1 if chunk is None else chunk.count
        start, end = row.computed, row.computed + count
        if chunk is not None and chunk.start != start:
            raise InvariantViolated(
                f"{row.join.request_id}: a chunk starts at {chunk.start}, {start} are computed"
            )
        if end > row.length or end > len(row.table) * self._size:
            raise InvariantViolated(
                f"{row.join.request_id}: computes up to {end} of {row.length} tokens in "
                f"{len(row.table)} blocks of {self._size}"
            )
        size, cells = self._size, self._cells
        while start < end:
            block, offset = row.table[start // size], start % size
            stop = min(end, start - offset + size)
            if block in written:
                raise InvariantViolated(f"{row.join.request_id}: block {block} is written twice")
            written.add(block)
            at = block * size + offset
            if stop - start == 1:
                cells[at] = start
            else:
                cells[at : at + stop - start] = array("q", range(start, stop))
            start = stop
        row.computed = end
        return count

    def _draw(self, row: _Row) -> int:
        position = row.length
        row.length += 1
        num_output = row.length - row.join.num_prompt
        is_end = self._length and num_output > self._length and not row.join.params.ignore_eos
        return END_ID if is_end else token_at(position)

    # ------------------------------------------------------------ checks

    def _row(self, plan: Plan, number: int) -> _Row:
        row = self.rows.get(number)
        if row is None:
            raise InvariantViolated(f"plan {plan.number} names row {number}, which is not here")
        return row

    def _check_fork(self, plan: Plan, row: _Row) -> None:
        parent = self._row(plan, row.join.logits_of)
        if parent.join.request_id != row.join.request_id or row.length != row.join.num_prompt:
            raise InvariantViolated(
                f"{row.join.request_id}: row {row.number} forks row {parent.number} at {row.length}"
            )

    def _check_all_computed(self, row: _Row) -> None:
        if row.computed != row.length:
            raise InvariantViolated(
                f"{row.join.request_id}: draws with {row.computed} of {row.length} computed"
            )

    def _check_sums(
        self, plan: Plan, unknown: dict[int, Chunk], num_tokens: int, num_samples: int
    ) -> None:
        if unknown:
            raise InvariantViolated(f"plan {plan.number}: chunks of rows {sorted(unknown)}")
        mine = (len(self.rows), num_tokens, num_samples)
        if mine != (plan.num_rows, plan.num_tokens, plan.num_samples):
            raise InvariantViolated(
                f"plan {plan.number} says {plan.num_rows} rows, {plan.num_tokens} tokens, "
                f"{plan.num_samples} samples; the rows say {mine}"
            )

    def _check_cells(self, row: _Row) -> None:
        """What the row will attend to holds the right positions."""
        size = self._size
        for start in range(0, row.computed, size):
            at = row.table[start // size] * size
            count = min(size, row.computed - start)
            if self._cells[at : at + count] != array("q", range(start, start + count)):
                raise InvariantViolated(
                    f"{row.join.request_id}: block {at // size} does not hold positions {start} to "
                    f"{start + count - 1}"
                )


def _logprob(token: int, num_top: int | None) -> TokenLogprob:
    """Made up, but the same every time: each next number is half as likely."""
    first = token - FIRST_NUMBER if token >= FIRST_NUMBER else 0
    top = [(token, -0.693)] + [
        (FIRST_NUMBER + (first + i) % NUM_NUMBERS, -0.693 * (i + 1)) for i in range(1, num_top or 0)
    ]
    return TokenLogprob(token, -0.693, tuple(top[:num_top]))


def is_fake(model: str | None) -> bool:
    """Whether a model's name means the fake."""
    return model is not None and (model == "fake" or model.startswith("fake:"))


def parse_name(model: str) -> FakeOptions:
    """The options in a name such as `fake:tokens_per_s=100`; ConfigError names a bad one."""
    text = model.partition(":")[2]
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        options = msgspec.convert(given, FakeOptions, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"model {model}: {e}", param="model") from None
    if options.depth not in (0, 1) or options.tokens_per_s < 0 or options.length < 0:
        raise ConfigError(f"model {model}: a value is out of bounds", param="model")
    return options


def load_fake(config: Config, options: FakeOptions | None = None) -> tuple[FakeRunner, ModelInfo]:
    """The fake model of a Config; its context is what its pool holds."""
    if options is None:
        options = parse_name(config.model or "fake")
    size = config.block_size
    num_blocks = config.num_gpu_blocks_override or DEFAULT_BLOCKS
    block_bytes = size * BYTES_PER_TOKEN
    num_host_blocks = min(num_blocks, int(config.swap_space * GIB) // block_bytes)
    runner = FakeRunner(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=size, options=options
    )
    info = ModelInfo(
        name=config.served_model_name or "fake",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or num_blocks * size,
        eos_token_ids=(END_ID,),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=size,
        block_bytes=block_bytes,
        num_parameters=0,
        generation_defaults={},
        device="cpu",
    )
    return runner, info

"""Drives the real scheduler over the simulated device, and checks everything a user relies on.

Used by the state machine, the replay test and the scheduler's unit tests. Every request must end
exactly once a choice, with the tokens the oracle gives, and leave nothing behind.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable

from msgspec.structs import replace

from streamer.core.admission import blocks_needed
from streamer.core.beams.search import BeamSearch, Ended
from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    OUT_OF_MEMORY,
    STEP_FAILED,
    Add,
    Cancel,
    Command,
    Drawn,
    Facts,
    Finish,
    FinishReason,
    Pause,
    Plan,
    Resume,
    StepOutput,
    StepResult,
    TokenLogprob,
)
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.request import Request, Status
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, SchedulerConfig
from streamer.core.stopping.strings import Stop
from streamer.core.tokens import prefill_beside_decodes
from tests.core.device import Device, beam_oracle, oracle, score
from tests.core.scripted import Scripted

SWAP = {"prefill_s": 1.0, "swap_bytes_per_s": 1e12, "swap_fixed_s": 0.0}
RECOMPUTE = {"prefill_s": 1e-12, "swap_bytes_per_s": 1.0, "swap_fixed_s": 1.0}

Entry = tuple[str, Command | Facts | StepResult | Fault]
# Whether a plan fails in which these requests compute: None: it does not.
Faulty = Callable[[Plan, set[str]], Fault | None]


def make_config(**overrides: int | bool | tuple[bytes, ...]) -> SchedulerConfig:
    """A small scheduler: blocks of 4 tokens."""
    settings: dict[str, int | bool | tuple[bytes, ...]] = {
        "block_size": 4,
        "num_blocks": 24,
        "num_host_blocks": 24,
        "block_bytes": 1000,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(settings | overrides))  # type: ignore[arg-type]


class Driver:
    """One engine without threads. `depth` plans may be launched before the previous is applied."""

    def __init__(
        self, config: SchedulerConfig, *, depth: int = 0, costs: dict[str, float] | None = None,
        speculation: Scripted | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.depth = depth
        self.costs = costs or {}
        self.hasher = BlockHasher(config.block_size, b"s" * 32)
        self.speculation = speculation
        self.scheduler = Scheduler(config, self.hasher, speculation)
        self.device = Device(config.num_blocks, config.num_host_blocks, config.block_size)
        self.inflight: deque[Plan] = deque()
        self.adds: dict[str, Add] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.scores: defaultdict[str, list[TokenLogprob]] = defaultdict(list)  # of prompts
        self.logprobs: defaultdict[tuple[str, int], list[TokenLogprob | None]] = defaultdict(list)
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.searched: dict[str, list[Ended]] = {}  # what beam searches must find
        self.outputs: list[StepOutput] = []
        self.plans: list[Plan] = []
        self.resident: dict[int, set[str]] = {}  # plan -> requests that had a row in it
        self.log: list[Entry] = []
        self.held: set[str] = set()
        self.steps = 0
        self.fail_next = False  # let a row of the next collected plan that draws fail
        self.sick: set[str] = set()
        self.first_plan: dict[str, int] = {}
        self.last_bad_plan = 0  # requests that began later did not read a bad block
        self.over: set[tuple[str, int]] = set()  # choices that ended in an engine before this one
        self.faulty: Faulty | None = None
        self.fails_late = False  # whether plans fail when they are collected
        self.lost: dict[int, Fault] = {}  # plans that will fail then
        self.verdicts: list[Verdict] = []
        self.blamed: set[str] = set()
        self.flush_copies = True  # whether swap copies end when their plan is collected
        self.early_copies = False  # whether swap copies run as soon as they may
        self.slow: random.Random | None = None  # whose masks are late, and for how long
        self.late: set[int] = set()  # rows that wait for their masks
        self.num_late = 0

    # ------------------------------------------------------------ commands

    def add(
        self, prompt: list[int], *, request_id: str | None = None, n: int = 1, max_tokens: int = 8,
        priority: int = 0, stop_ids: frozenset[int] = frozenset(), share_with: str | None = None,
        tenant: str = "", salt: bytes = b"", stop: tuple[str, ...] = (), **params: object,
    ) -> str:  # fmt: skip
        """Submit, with hashes as the engine does; the id is r0, r1 ... unless given."""
        request_id = request_id or f"r{len(self.adds)}"
        add = Add(
            request_id,
            tuple(prompt),
            SamplingParams(n=n, max_tokens=max_tokens, seed=1, stop=stop, **params),  # type: ignore[arg-type]
            stop_ids=stop_ids,
            stop=tuple(each.encode() for each in stop),
            block_hashes=self.hasher.hash_blocks(prompt, salt),
            salt=salt,
            priority=priority,
            tenant=tenant,
            share_with=share_with,
        )
        self.command(add)
        self.adds[request_id] = add
        for choice in range(n):
            self.tokens[request_id, choice] = []
        return request_id

    def cancel(self, request_id: str) -> None:
        self.command(Cancel(request_id))

    def pause(self, request_id: str) -> None:
        self.held.add(request_id)
        self.command(Pause(request_id))

    def resume(self, request_id: str) -> None:
        self.held.discard(request_id)
        self.command(Resume(request_id))

    def command(self, command: Command) -> None:
        self.log.append(("command", command))
        self.scheduler.command(command)
        self.scheduler.check()

    def restart(self) -> None:
        """Lose scheduler and device; a new engine gets what the clients have seen."""
        config, held = self.config, self.held
        if self.speculation is not None:
            self.speculation = Scripted(len(self.log))
        self.scheduler = Scheduler(config, self.hasher, self.speculation)
        self.device = Device(config.num_blocks, config.num_host_blocks, config.block_size)
        self.inflight.clear()
        self.lost.clear()
        self.late.clear()
        self.plans, self.log, self.first_plan, self.held = [], [], {}, set()
        self.over, self.last_bad_plan = set(self.finishes), 0
        for request_id, add in self.adds.items():
            keys = [(request_id, choice) for choice in range(add.params.n)]
            if all(key in self.finishes for key in keys):
                continue
            outputs = (Drawn(tuple(self.tokens[k]), (), self.finishes.get(k)) for k in keys)
            num_scored = len(self.scores[request_id])
            self.command(replace(add, outputs=tuple(outputs), num_scored=num_scored))
            if request_id in held:
                self.pause(request_id)

    def lose(self, fault: Fault) -> None:
        """A step failed: scheduler and device are reset."""
        copies_done = self.scheduler.state.launched
        self.device = Device(
            self.config.num_blocks, self.config.num_host_blocks, self.config.block_size
        )
        self.device.copies_done = copies_done
        self.inflight.clear()
        self.lost.clear()
        self.late.clear()
        self.first_plan, self.last_bad_plan = {}, 0
        self.log.append(("fault", fault))
        self.verdicts.append(self.scheduler.reset(fault))
        self.scheduler.check()

    def _computing(self, plan: Plan) -> set[str]:
        lineup = self.scheduler.state.requests.open_running()
        return {s.request.request_id for s in lineup if s.joined and s.row not in plan.idle}

    # ------------------------------------------------------------ steps

    def status(self, request_id: str) -> Status:
        request = self.scheduler.state.requests.by_id.get(request_id)
        return Status.FINISHED if request is None else request.status

    def launch(self) -> Plan | None:
        """Schedule and launch one plan, if there is one."""
        late = tuple(sorted(self.late))
        facts = Facts(copies_done=self.device.copies_done, late=late, **self.costs)
        self.log.append(("facts", facts))
        head = self.scheduler.state.queue.head()
        plan = self.scheduler.schedule(facts)
        fault = None
        if plan is not None and self.faulty is not None:
            fault = self.faulty(plan, self._computing(plan))
        if plan is not None and fault is not None:
            if not self.fails_late:
                self.plans.append(plan)
                self.lose(fault)
                return plan
            self.lost[plan.number] = fault
        if plan is not None:
            self.plans.append(plan)
            assert sum(c.score for c in plan.chunks) <= self.config.max_scored_tokens
            self.device.launch(plan, self.early_copies)
            self.late.difference_update(plan.leaves)
            self.inflight.append(plan)
            self._check_tables()
            for join in plan.joins:
                self.first_plan.setdefault(join.request_id, plan.number)
        self.scheduler.check()
        self._check_head(plan, head)
        return plan

    def _check_tables(self) -> None:
        """The runner's tables are the scheduler's."""
        tables = self.device.tables
        for seq in self.scheduler.state.requests.open_running():
            assert not seq.joined or tables[seq.row] == seq.blocks, "a table that was not sent"

    def _check_head(self, plan: Plan | None, before: Request | None) -> None:
        """No waiting request could have entered this plan."""
        state = self.scheduler.state
        most = state.trials.max_tokens
        is_full = plan is not None and plan.num_tokens == most
        is_full |= bool(state.trials.members and self.inflight)
        if plan is not None and self.config.is_paced:
            prefilled = sum(c.count for c in plan.chunks if not c.tokens)
            is_full |= prefilled >= prefill_beside_decodes(state.facts)
        head = state.queue.head()
        if is_full or head is None:
            return
        taken = 0  # blocks for provisional tokens: what was the head at that time comes before them
        if plan is not None and head is before and not (plan.joins or plan.swap_in):
            rows = {c.row for c in plan.chunks if c.tokens}
            running = state.requests.open_running()
            taken = sum(state.kv.num_beyond(s) for s in running if s.row in rows)
        need = blocks_needed(state, head)
        for seq in head.sequences:
            seq.found = []  # the result must not depend on what was remembered
        assert blocks_needed(state, head) == need
        assert (
            any(seq.num_pending or seq.is_unsettled for seq in head.sequences)
            or head.num_rows > state.rows.num_free
            or (state.rows.num_reserved and state.rows.num_reserved + head.num_rows > most)
            or need > state.kv.device.num_free + taken
        ), f"{head.request_id} is stuck: {head.status.value}"

    def collect(self) -> StepOutput:
        """Apply the oldest launched plan."""
        plan = self.inflight.popleft()
        result = self.device.run(plan.number)
        self.resident[plan.number] = {r.join.request_id for r in self.device.rows.values()}
        if self.fail_next and (result.rows or result.candidates):
            self.fail_next = False
            first = result.rows[0] if result.rows else min(result.candidates)
            self.sick.add(self.device.rows[first].join.request_id)
            result = self.device.poison(plan, result)
        result = self._let_be_late(plan, result)
        is_waiting = not plan.num_rows and not self.inflight
        if self.flush_copies or is_waiting:
            self.device.flush(plan.number)
        self.log.append(("result", result))
        output = self.scheduler.apply(plan, result)
        if result.failed:
            self.last_bad_plan = self.plans[-1].number
        self.scheduler.check()
        self._take(output)
        self.steps += 1
        return output

    def _let_be_late(self, plan: Plan, result: StepResult) -> StepResult:
        """Some rows of the plan do not draw; masks that others wait for come now and then, and one
        of them if nothing else is in the plan."""
        if self.slow is None:
            self.late.clear()
            return result
        rng = self.slow
        self.late = {row for row in self.late if rng.random() < 0.7}
        if not plan.num_tokens and self.late:
            self.late.pop()
        chosen = {row for row in result.rows if row not in result.failed and rng.random() < 0.2}
        result = self.device.delay(plan, result, chosen)
        self.late.update(row for row in result.late if row in self.device.rows)
        self.num_late += len(result.late)
        return result

    def step(self) -> bool:
        """One iteration; False when there was nothing to do."""
        plan = self.launch()
        if self.inflight and self.inflight[0].number in self.lost:
            self.lose(self.lost[self.inflight[0].number])
            return True
        if len(self.inflight) > self.depth or (plan is None and self.inflight):
            self.collect()
            return True
        return plan is not None

    def _take(self, output: StepOutput) -> None:
        self.outputs.append(output)
        for request_id, found in output.prompt_logprobs.items():
            assert (request_id, 0) not in self.finishes, "a score after the end"
            self.scores[request_id] += found
        for i, (request_id, choice, token) in enumerate(
            zip(output.request_ids, output.choices, output.tokens, strict=True)
        ):
            assert (request_id, choice) not in self.finishes, "a token after the end"
            add = self.adds[request_id]
            is_asked = add.params.prompt_logprobs is not None
            assert self.scores[request_id] == (score(add.prompt) if is_asked else [])
            self.tokens[request_id, choice].append(token)
            self.logprobs[request_id, choice].append(output.logprobs.get(i))
        for finish in output.finishes:
            key = (finish.request_id, finish.choice)
            assert key not in self.finishes, f"{key} ended twice"
            self.finishes[key] = finish
            self._verify(finish)

    def _verify(self, finish: Finish) -> None:
        add = self.adds[finish.request_id]
        tokens = self.tokens[finish.request_id, finish.choice]
        assert finish.num_tokens == len(tokens)
        if add.params.use_beam_search:
            self._verify_beams(finish, add, tokens)
            return
        assert tokens == oracle(add.prompt, finish.choice, len(tokens))
        stops = [i for i, token in enumerate(tokens) if token in add.stop_ids]
        if finish.reason is FinishReason.LENGTH:
            assert len(tokens) == add.params.max_tokens
            assert not stops
        elif finish.reason is FinishReason.STOP:
            assert stops == [len(tokens) - 1]
        elif finish.detail in (STEP_FAILED, OUT_OF_MEMORY):
            self.blamed.add(finish.request_id)
        elif finish.reason is FinishReason.FAILED and finish.request_id not in self.sick:
            assert self.first_plan[finish.request_id] <= self.last_bad_plan, "met a bad block"

    def _verify_beams(self, finish: Finish, add: Add, tokens: list[int]) -> None:
        if finish.request_id not in self.searched:
            max_tokens = add.params.max_tokens or 0
            beams = BeamSearch(
                add.params, num_prompt=len(add.prompt), max_tokens=max_tokens, stop_ids=add.stop_ids
            )
            table = self.config.token_bytes
            self.searched[finish.request_id] = beam_oracle(add, beams, table)
        best = self.searched[finish.request_id]
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            expected = best[finish.choice]
            assert tuple(tokens) == expected.tokens
            assert (finish.cumulative_logprob, finish.score) == (expected.logprob, expected.score)
            assert (finish.reason is FinishReason.LENGTH) == (expected.stop is None)
            if isinstance(expected.stop, Stop):
                shown = add.params.stop[expected.stop.which]
                assert (finish.stop, finish.text_bytes) == (shown, expected.stop.text_bytes)
            logprobs = self.logprobs[finish.request_id, finish.choice]
            assert list(zip(tokens, logprobs, strict=True)) == expected.scored(0)
        else:
            for each in best[: add.params.n]:  # what was settled
                assert each.tokens[: len(tokens)] == tuple(tokens)

    def run(self, limit: int = 2000) -> None:
        """Run until only paused requests are left; more than `limit` steps is starvation."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not done after {limit} steps")

    def drain(self) -> None:
        """Resume all requests, run to the end, and check that nothing is left."""
        self.flush_copies = True
        for request_id in list(self.held):
            self.resume(request_id)
        self.run()
        expected = {(r, c) for r, add in self.adds.items() for c in range(add.params.n)}
        assert set(self.finishes) == expected
        state = self.scheduler.state
        assert not state.requests.by_id
        if self.speculation is not None:
            assert not self.speculation.rows, "a sequence has not ended for the speculation"
        assert not any(state.requests.counts[s] for s in Status if s is not Status.FINISHED)
        for pool in (state.kv.device, state.kv.host):
            assert pool.num_free == pool.num_blocks, f"{pool.name} blocks leaked"
        assert state.rows.num_free == self.config.max_num_seqs
        totals = state.stats()
        copied = sum(len(plan.copies) for plan in self.plans)
        assert totals.copied_blocks == copied
        ends = (finish for key, finish in self.finishes.items() if key not in self.over)
        last = {f.request_id: f.copied_tokens for f in ends}
        # of a block whose first token is computed again, nothing is copied that counts
        assert sum(last.values()) <= copied * (self.config.block_size - 1)
        assert self.num_late or copied <= sum(last.values())
        assert totals.swapped_out_blocks == sum(len(plan.swap_out) for plan in self.plans)
        assert totals.swapped_in_blocks == sum(len(plan.swap_in) for plan in self.plans)

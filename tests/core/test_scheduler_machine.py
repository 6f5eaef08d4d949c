"""Random runs of the scheduler: the state machine, its mutation control and exact replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from streamer.core import results
from streamer.core.blocks import BlockHasher, BlockPool
from streamer.core.kv import KVManager
from streamer.core.plan import Facts, Plan, StepOutput, StepResult
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.request import Sequence as Row
from streamer.core.request import Status
from streamer.core.scheduler import Scheduler
from streamer.core.state import State
from streamer.core.verification import Run
from streamer.errors import InvariantViolated
from tests.core.driver import RECOMPUTE, SWAP, Driver, Faulty, make_config
from tests.core.scripted import Scripted

COSTS = [SWAP, RECOMPUTE, {"prefill_s": 1e-3, "swap_bytes_per_s": 1e6, "swap_fixed_s": 4e-3}]


class RandomCommands(RuleBasedStateMachine):
    """Random add, fork, cancel, pause, resume and steps over random pool sizes."""

    depth = 0
    total_steps = 0

    @initialize(
        num_blocks=st.integers(1, 9) | st.integers(16, 40),
        num_host=st.sampled_from([0, 6, 40]),
        rows=st.integers(2, 6),
        budget=st.integers(6, 24),
        costs=st.sampled_from(COSTS),
        has_cache=st.booleans(),
        script=st.none() | st.integers(0, 99),
    )
    def start(
        self, num_blocks: int, num_host: int, rows: int, budget: int,
        costs: dict[str, float], has_cache: bool, script: int | None,
    ) -> None:  # fmt: skip
        config = make_config(
            num_blocks=num_blocks,
            num_host_blocks=num_host,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_scored_tokens=1 + budget % 7,
            enable_prefix_caching=has_cache,
        )
        speculation = None if script is None else Scripted(script)
        self.driver = Driver(config, depth=self.depth, costs=costs, speculation=speculation)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stop=st.frozensets(st.integers(0, 96), max_size=6),
        is_beam=st.booleans(),
    )
    def add(
        self, family: int, length: int, tail: int, max_tokens: int, n: int, priority: int,
        stop: frozenset[int], is_beam: bool,
    ) -> None:  # fmt: skip
        config = self.driver.config
        room = config.num_blocks * config.block_size
        prompt = [(family * 29 + i) % 97 for i in range(length)] + [tail] * tail
        prompt = prompt[: room - 1]
        max_tokens = min(max_tokens, room - len(prompt))
        blocks = -(-(len(prompt) + max_tokens) // config.block_size)
        n = min(n, config.max_num_seqs, config.num_blocks // blocks)
        self.driver.add(
            prompt,
            n=1 if is_beam else n,
            use_beam_search=is_beam,
            beam_width=n if is_beam else None,
            max_tokens=max_tokens,
            priority=priority,
            stop_ids=stop,
            tenant="abc"[length % 3],  # including these would leave fewer steps
            salt=b"tenant" if length % 5 == 0 else b"",
            prompt_logprobs=0 if length % 4 == 0 else None,
        )

    @precondition(lambda self: self.driver.adds)
    @rule(data=st.data(), at=st.integers(1, 40), more=st.integers(0, 3))
    def fork(self, data: st.DataObject, at: int, more: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.driver.adds)))
        known = [*self.driver.adds[parent].prompt, *self.driver.tokens[parent, 0]]
        room = self.driver.config.num_blocks * self.driver.config.block_size
        prompt = (known[:at] + [5] * more)[: min(40, room - 1)]
        self.driver.add(prompt, max_tokens=min(6, room - len(prompt)), share_with=parent)

    @precondition(lambda self: self.driver.adds)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.adds))))

    @precondition(lambda self: self.driver.adds)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.driver.pause(data.draw(st.sampled_from(sorted(self.driver.adds))))

    @precondition(lambda self: self.driver.held)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.driver.resume(data.draw(st.sampled_from(sorted(self.driver.held))))

    @rule(late=st.booleans(), early=st.booleans(), fails=st.booleans(), slow=st.integers(-5, 5))
    def faults(self, late: bool, early: bool, fails: bool, slow: int) -> None:
        """Swap copies that run early or late; a row whose logits are not finite; masks that are
        late."""
        self.driver.slow = random.Random(slow) if slow > 0 else None
        self.driver.flush_copies = not late
        self.driver.early_copies = early
        self.driver.fail_next = fails

    @rule(is_memory=st.booleans(), is_late=st.booleans(), again=st.integers(0, 3))
    def fault(self, is_memory: bool, is_late: bool, again: int) -> None:
        """The next plan fails, and some of those after it."""
        left = 1 + again

        def faulty(plan: Plan, computing: set[str]) -> Fault | None:
            nonlocal left
            left -= 1
            return Fault(plan.num_tokens, is_memory) if left >= 0 else None

        self.driver.faulty, self.driver.fails_late = faulty, is_late

    @rule()
    def restart(self) -> None:
        self.driver.restart()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            type(self).total_steps += self.driver.steps


class RandomCommandsAhead(RandomCommands):
    """The same with one plan launched and not yet applied."""

    depth = 1
    total_steps = 0


@pytest.mark.parametrize("machine", [RandomCommands, RandomCommandsAhead])
def test_random_commands_leak_nothing_starve_no_request_and_end_each_once(
    machine: type[RandomCommands],
) -> None:
    machine.total_steps = 0
    profile = settings(
        max_examples=300,
        stateful_step_count=40,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    run_machine(machine, settings=profile)
    assert machine.total_steps >= 5_000, f"only {machine.total_steps} steps ran"


def random_session(
    seed: int, *, depth: int, speculates: bool = False, restarts: float = 0.0,
    faults: float = 0.0, is_slow: bool = False,
) -> Driver:  # fmt: skip
    """A seeded run under memory pressure, with every command, and swap copies at any time.

    restarts, faults  the shares of the commands that lose the engine, and of the plans that fail
    is_slow           masks come late
    """
    rng = random.Random(seed)
    num_blocks = 20 if seed % 2 else rng.randint(1, 9)
    config = make_config(num_blocks=num_blocks, num_host_blocks=30, max_num_seqs=5)
    speculation = Scripted(seed) if speculates else None
    costs = [SWAP, RECOMPUTE, COSTS[2]][seed % 3]
    driver = Driver(config, depth=depth, costs=costs, speculation=speculation)
    if faults:
        driver.faulty = faults_at_random(rng, faults)
    if is_slow:
        driver.slow = random.Random(seed)
    for _ in range(120):
        driver.fails_late = bool(faults) and rng.random() < 0.5
        driver.flush_copies = rng.random() < 0.3
        driver.early_copies = rng.random() < 0.5
        if restarts and rng.random() < restarts:
            driver.restart()
        choice = rng.random()
        live = [name for name in driver.adds if driver.status(name) is not Status.FINISHED]
        if choice < 0.25 or not live:
            prompt = [rng.randrange(3) * 20 + i for i in range(rng.randint(1, 24))]
            if driver.adds and rng.random() < 0.5:  # the next turn of a conversation
                prompt = [*known_tokens(driver, rng.choice(list(driver.adds))), 7][:24]
            add_what_fits(driver, rng, prompt, n=rng.choice([1, 1, 2]), is_beam=rng.random() < 0.3)
        elif choice < 0.3:
            driver.cancel(rng.choice(live))
        elif choice < 0.36:
            driver.pause(rng.choice(live))
        elif choice < 0.4:
            for name in rng.sample(live, k=min(2, len(live))):  # both may be admitted in one plan
                driver.pause(name)
                add_what_fits(driver, rng, known_tokens(driver, name), share_with=name)
        elif choice < 0.48 and driver.held:
            driver.resume(rng.choice(sorted(driver.held)))
        else:
            driver.step()
    driver.drain()
    return driver


def faults_at_random(rng: random.Random, share: float) -> Faulty:
    """This share of the plans fails, and all of those in which an unlucky request computes."""
    unlucky = {f"r{i}" for i in range(200) if rng.random() < share}

    def faulty(plan: Plan, computing: set[str]) -> Fault | None:
        if computing & unlucky or rng.random() < share:
            return Fault(plan.num_tokens, is_memory=rng.random() < 0.3)
        return None

    return faulty


def known_tokens(driver: Driver, name: str) -> list[int]:
    return [*driver.adds[name].prompt, *driver.tokens[name, 0]]


def add_what_fits(
    driver: Driver, rng: random.Random, prompt: list[int], n: int = 1,
    share_with: str | None = None, *, is_beam: bool = False,
) -> None:  # fmt: skip
    """Add a request that fits the pool, however small the pool is."""
    size = driver.config.block_size
    room = driver.config.num_blocks * size
    prompt = prompt[: room - 1]
    max_tokens = min(rng.randint(1, 16), room - len(prompt))
    driver.add(
        prompt,
        n=min(n, driver.config.num_blocks // -(-(len(prompt) + max_tokens) // size)),
        use_beam_search=is_beam,
        max_tokens=max_tokens,
        salt=driver.adds[share_with].salt if share_with else rng.choice([b"", b"tenant"]),
        tenant=rng.choice("ab"),
        share_with=share_with,
    )


def random_sessions(depth: int) -> None:
    for seed in range(30):
        random_session(seed, depth=depth)


def random_restarts(depth: int) -> None:
    for seed in range(20):
        random_session(seed, depth=depth, speculates=seed % 4 == 0, restarts=0.04)


def random_faults(depth: int) -> None:
    """Requests that fail alone are found; a fault at random may be blamed on another one."""
    seen: set[Verdict] = set()
    num_blamed = 0
    for seed in range(30):
        driver = random_session(seed, depth=depth, speculates=seed % 3 == 0, faults=0.05)
        seen.update(driver.verdicts)
        num_blamed += len(driver.blamed)
    assert seen == set(Verdict)
    assert num_blamed > 5


def random_verifications(depth: int) -> None:
    num_accepted = num_rejected = 0
    for seed in range(30):
        script = random_session(seed, depth=depth, speculates=True).speculation
        assert script is not None
        num_accepted += script.num_accepted
        num_rejected += script.num_proposed - script.num_accepted
    assert min(num_accepted, num_rejected) > 300


def random_lates(depth: int) -> None:
    """Rows without their masks draw the same tokens, later; others do not wait for them."""
    num_late = 0
    for seed in range(40):
        faults, speculates = 0.03 * (seed % 5 == 0), seed % 3 == 0
        driver = random_session(
            seed, depth=depth, speculates=speculates, faults=faults, is_slow=True
        )
        num_late += driver.num_late
    assert num_late > 1000


def swap_in_beside_a_cancelled_writer(depth: int) -> None:
    """r1 is cancelled while a plan that writes its tail is under way; r0 needs its blocks."""
    driver = Driver(make_config(num_blocks=16), depth=depth, costs=SWAP)
    driver.add([i % 97 for i in range(30)], max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.pause("r0")
    driver.add([(50 + i) % 97 for i in range(40)], max_tokens=20)
    while driver.status("r0") is not Status.SWAPPED or not driver.tokens["r1", 0]:
        assert driver.step()
    driver.early_copies = True
    driver.resume("r0")
    driver.step()
    assert len(driver.inflight) == depth
    driver.cancel("r1")
    driver.drain()


def parent_of_a_fork_gives_way(depth: int, *, is_swap: bool) -> None:
    """A fork of paused r0 copies its tail; in the same plan r0 is preempted for the next request.

    The block r0 gave up is the first to be taken, and this plan still reads it. The next request is
    another fork, which would copy into it, or r1's swap-in. Some of these pool sizes cause it.
    """
    num_met = 0
    for num_blocks in range(5, 11):
        sizes = {"num_blocks": num_blocks, "max_num_batched_tokens": 64}
        driver = Driver(make_config(**sizes, enable_prefix_caching=False), depth=depth, costs=SWAP)
        for name, prompt in (("r1", range(50, 59)), ("r0", range(5))):
            driver.add(list(prompt), request_id=name, max_tokens=8)
            for _ in range(3):
                driver.step()
            driver.pause(name)
            if is_swap and name == "r1":
                driver.add(list(range(20, 15 + 4 * num_blocks)), request_id="big", max_tokens=1)
            for _ in range(4):
                driver.step()
        driver.costs = RECOMPUTE
        driver.add(known_tokens(driver, "r0"), max_tokens=2, share_with="r0", priority=-2)
        if is_swap:
            driver.resume("r1")
        else:
            driver.add(known_tokens(driver, "r1"), max_tokens=2, share_with="r1")
        driver.step()
        num_met += bool(driver.plans[-1].copies) and driver.status("r0") is Status.PREEMPTED
        driver.drain()
    assert num_met


def before_another_fork(depth: int) -> None:
    parent_of_a_fork_gives_way(depth, is_swap=False)


def before_a_swap_in(depth: int) -> None:
    parent_of_a_fork_gives_way(depth, is_swap=True)


def a_prompt_of_wrong_tokens(depth: int) -> None:
    """Prompts that begin with what r0 verifies, wrong tokens too, up to the end of a block."""
    driver = Driver(
        make_config(num_blocks=60), depth=depth, speculation=Scripted(1, share=1.0, errors=1.0)
    )
    driver.add([1, 2, 3], max_tokens=40)
    num_met = 0
    while driver.step():
        seq = next((r.sequences[0] for r in driver.scheduler.state.requests.running), None)
        for chunk in driver.plans[-1].chunks:
            size = driver.config.block_size
            written = [*known_tokens(driver, "r0")[: chunk.start], *chunk.tokens]
            end = len(written) // size * size
            if seq is not None and chunk.tokens and end > chunk.start + 1 and num_met < 9:
                driver.add([*written[:end], 0], max_tokens=6)
                num_met += 1
    driver.drain()
    assert num_met > 3


LIVES = [
    random_sessions,
    random_verifications,
    random_restarts,
    random_faults,
    random_lates,
    a_prompt_of_wrong_tokens,
    swap_in_beside_a_cancelled_writer,
    before_another_fork,
    before_a_swap_in,
]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("life", LIVES)
def test_random_commands_with_copies_at_any_time_pass(
    life: Callable[[int], None], depth: int
) -> None:
    life(depth)


def no_waiting_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is free as soon as no table holds it."""
    honest = BlockPool.give_back

    def at_once(self: BlockPool, blocks: Sequence[int], after_plan: int) -> None:
        honest(self, blocks, 0)

    monkeypatch.setattr(BlockPool, "give_back", at_once)


def no_waiting_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is free when its copies are done, also while a launched plan still writes it."""
    honest = State.retire

    def after_copies(self: State) -> None:
        honest(self)
        upto = self.copy_plans[0] - 1 if self.copy_plans else self.launched
        self.kv.device.retire(upto)
        self.kv.host.retire(upto)

    monkeypatch.setattr(State, "retire", after_copies)


def no_waiting_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is free when its plans are collected, also while a copy still reads or writes it."""
    honest = State.retire

    def after_plans(self: State) -> None:
        honest(self)
        self.kv.device.retire(self.collected)
        self.kv.host.retire(self.collected)

    monkeypatch.setattr(State, "retire", after_plans)


def no_waiting_for_this_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim's blocks are free at once, also while this plan's copies read them."""
    honest = KVManager.release

    def at_once(self: KVManager, seq: Row, after_plan: int) -> None:
        plan, copies = self.plan, self.copies
        if after_plan < plan:
            self.plan, self.copies = -1, {}
        honest(self, seq, after_plan)
        self.plan, self.copies = plan, {d: c for d, c in copies.items() if self.device.ref_count(d)}

    monkeypatch.setattr(KVManager, "release", at_once)


@pytest.mark.parametrize(
    ("mutate", "life"),
    [
        (no_waiting_for_this_plan, before_another_fork),
        (no_waiting_for_this_plan, before_a_swap_in),
        (no_waiting_at_all, random_sessions),
        (no_waiting_for_plans, swap_in_beside_a_cancelled_writer),
        (no_waiting_for_copies, random_sessions),
    ],
)
def test_freeing_blocks_too_soon_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    life: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controls: a row reads another's content."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"reads another prefix|touch the same block"):
        life(1)


def giving_back_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "truncate", lambda self, seq, after_plan: None)


def giving_back_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of the newest token as well, if that is not computed yet."""
    honest = KVManager.num_beyond

    def beyond(self: KVManager, seq: Row) -> int:
        return honest(self, seq) + (seq.num_computed % self.block_size == 0)

    monkeypatch.setattr(KVManager, "num_beyond", beyond)


def giving_back_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's table keeps the blocks."""
    honest = KVManager.truncate

    def truncate(self: KVManager, seq: Row, after_plan: int) -> None:
        touched = dict(self.touched)
        honest(self, seq, after_plan)
        self.touched = touched

    monkeypatch.setattr(KVManager, "truncate", truncate)


def counting_wrong_tokens_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = results.take

    def take(state: State, plan: Plan, result: StepResult) -> list[Run]:
        runs = honest(state, plan, result)
        for seq, tokens in runs:
            seq.num_computed += bool(seq.blocks) and len(tokens) <= len(seq.provisional)
        return runs

    monkeypatch.setattr(results, "take", take)


def publishing_provisional_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVManager.publish

    def publish(self: KVManager, seq: Row) -> None:
        tokens, computed = seq.tokens, seq.num_computed
        if seq.provisional and seq.num_pending == 1:
            seq.tokens = [*tokens, *seq.provisional]
            seq.num_computed += len(seq.provisional)
        honest(self, seq)
        seq.tokens, seq.num_computed = tokens, computed

    monkeypatch.setattr(KVManager, "publish", publish)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("mutate", "life"),
    [
        (giving_back_nothing, random_verifications),
        (giving_back_too_much, random_verifications),
        (giving_back_in_silence, random_verifications),
        (counting_wrong_tokens_as_computed, random_verifications),
        (publishing_provisional_tokens, a_prompt_of_wrong_tokens),
    ],
)
def test_provisional_tokens_that_stay_are_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    life: Callable[[int], None],
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controls of verification: each life passes without its fault."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolated)):
        life(depth)


@pytest.mark.parametrize("faults", [0.0, 0.05])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_recorded_log_replays_to_the_same_plans(
    depth: int, speculates: bool, faults: float
) -> None:
    driver = random_session(11, depth=depth, speculates=speculates, faults=faults)
    assert bool(driver.verdicts) == bool(faults)
    script = Scripted(11) if speculates else None
    plans, outputs = replay(driver, driver.hasher.secret, script)
    assert plans == driver.plans
    assert outputs == driver.outputs


def test_a_log_replays_under_its_own_secret_alone() -> None:
    """The next turn's prompt has the hash of a block that the scheduler computed itself."""
    driver = Driver(make_config())
    first = driver.add([1, 2, 3], max_tokens=6)
    driver.run()
    driver.add([1, 2, 3, *driver.tokens[first, 0]], max_tokens=1, salt=b"")
    driver.drain()
    assert driver.outputs[-1].stats.prefix_hit_tokens == 8
    assert replay(driver, driver.hasher.secret)[0] == driver.plans
    assert replay(driver, b"t" * 32)[0] != driver.plans


def replay(
    driver: Driver, secret: bytes, speculation: Scripted | None = None
) -> tuple[list[Plan], list[StepOutput]]:
    """Plans and outputs of a new scheduler that gets the driver's log."""
    hasher = BlockHasher(driver.config.block_size, secret)
    again = Scheduler(driver.config, hasher, speculation)
    plans: list[Plan] = []
    outputs: list[StepOutput] = []
    inflight: list[Plan] = []
    for kind, value in driver.log:
        if kind == "command":
            again.command(value)  # type: ignore[arg-type]
        elif isinstance(value, Fault):
            again.reset(value)
            inflight.clear()
        elif isinstance(value, Facts):
            plan = again.schedule(value)
            if plan is not None:
                plans.append(plan)
                inflight.append(plan)
        else:
            outputs.append(again.apply(inflight.pop(0), value))  # type: ignore[arg-type]
    return plans, outputs

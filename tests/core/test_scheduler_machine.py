"""A random life of the scheduler: the state machine, its mutation control and exact replay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from streamer.core.blocks import BlockPool
from streamer.core.plan import Facts
from streamer.core.prefix import BlockHasher
from streamer.core.scheduler import Scheduler
from streamer.errors import InvariantViolated
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config

COSTS = [SWAP, RECOMPUTE, {"prefill_s": 1e-3, "swap_bytes_per_s": 1e6, "swap_fixed_s": 4e-3}]


class Life(RuleBasedStateMachine):
    """Random add, fork, cancel, pause, resume and steps over random pool sizes."""

    depth = 0
    total_steps = 0

    @initialize(
        num_blocks=st.integers(16, 40),
        num_host=st.sampled_from([0, 6, 40]),
        rows=st.integers(2, 6),
        budget=st.integers(6, 24),
        costs=st.sampled_from(COSTS),
        has_cache=st.booleans(),
    )
    def start(
        self, num_blocks: int, num_host: int, rows: int, budget: int,
        costs: dict[str, float], has_cache: bool,
    ) -> None:  # fmt: skip
        config = make_config(
            num_blocks=num_blocks,
            num_host_blocks=num_host,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            enable_prefix_caching=has_cache,
        )
        self.driver = Driver(config, depth=self.depth, costs=costs)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stop=st.frozensets(st.integers(0, 96), max_size=6),
    )
    def add(
        self, family: int, length: int, tail: int, max_tokens: int, n: int, priority: int,
        stop: frozenset[int],
    ) -> None:  # fmt: skip
        config = self.driver.config
        prompt = [(family * 29 + i) % 97 for i in range(length)] + [tail] * tail
        blocks = -(-(len(prompt) + max_tokens) // config.block_size)
        n = min(n, config.max_num_seqs, config.num_blocks // blocks)
        self.driver.add(
            prompt,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            stop_ids=stop,
            tenant="abc"[length % 3],  # drawing it too would leave fewer steps
        )

    @precondition(lambda self: self.driver.adds)
    @rule(data=st.data(), at=st.integers(1, 40), more=st.integers(0, 3))
    def fork(self, data: st.DataObject, at: int, more: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.driver.adds)))
        known = [*self.driver.adds[parent].prompt, *self.driver.tokens[parent, 0]]
        prompt = (known[:at] + [5] * more)[:40]
        self.driver.add(prompt, max_tokens=6, share_with=parent)

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

    @rule(late=st.booleans(), fails=st.booleans())
    def weather(self, late: bool, fails: bool) -> None:
        self.driver.flush_copies = not late
        self.driver.fail_next = fails

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            type(self).total_steps += self.driver.steps


class LifeAhead(Life):
    """The same with one plan launched and not yet applied."""

    depth = 1
    total_steps = 0


@pytest.mark.parametrize("machine", [Life, LifeAhead])
def test_random_lives_leak_nothing_starve_nobody_and_end_once(machine: type[Life]) -> None:
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


def busy_life(seed: int, *, depth: int, late: bool) -> Driver:
    """A seeded life under memory pressure, with every command there is."""
    rng = random.Random(seed)
    config = make_config(num_blocks=20, num_host_blocks=30, max_num_seqs=5)
    costs = COSTS[2] if seed % 3 == 2 else SWAP
    driver = Driver(config, depth=depth, costs=costs)
    for _ in range(120):
        driver.flush_copies = not late or rng.random() < 0.3
        choice = rng.random()
        known = sorted(driver.adds)
        if choice < 0.25 or not known:
            prompt = [rng.randrange(3) * 20 + i for i in range(rng.randint(1, 24))]
            n, tenant = rng.choice([1, 1, 2]), rng.choice("ab")
            driver.add(prompt, n=n, max_tokens=rng.randint(1, 16), tenant=tenant)
        elif choice < 0.3:
            driver.cancel(rng.choice(known))
        elif choice < 0.36:
            driver.pause(rng.choice(known))
        elif choice < 0.45 and driver.held:
            driver.resume(rng.choice(sorted(driver.held)))
        else:
            driver.step()
    driver.flush_copies = True
    driver.drain()
    return driver


@pytest.mark.parametrize("depth", [0, 1])
def test_a_seeded_life_passes_with_late_copies(depth: int) -> None:
    for seed in range(30):
        busy_life(seed, depth=depth, late=True)


def test_freeing_blocks_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without waiting for plans and copies, somebody reads another's content."""
    honest = BlockPool.give_back

    def at_once(self: BlockPool, blocks: Sequence[int], after_plan: int) -> None:
        honest(self, blocks, 0)

    monkeypatch.setattr(BlockPool, "give_back", at_once)
    caught = 0
    for seed in range(30):
        try:
            busy_life(seed, depth=1, late=True)
        except (AssertionError, InvariantViolated) as error:
            caught += "reads another prefix" in str(error)
    assert caught > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_recorded_log_replays_to_the_same_plans(depth: int) -> None:
    driver = busy_life(11, depth=depth, late=True)
    again = Scheduler(driver.config, BlockHasher(driver.config.block_size, b"s" * 32))
    plans, outputs, inflight = [], [], []
    for kind, value in driver.log:
        if kind == "command":
            again.command(value)  # type: ignore[arg-type]
        elif isinstance(value, Facts):
            plan = again.schedule(value)
            if plan is not None:
                plans.append(plan)
                inflight.append(plan)
        else:
            outputs.append(again.apply(inflight.pop(0), value))  # type: ignore[arg-type]
    assert plans == driver.plans
    assert outputs == driver.outputs

"""Fair share between tenants: which request is next, credit after idling; notices of positions."""

from __future__ import annotations

import random

import pytest

from streamer.core import fairness
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, NoticeKind
from streamer.core.request import OUTPUT_COST, PROMPT_COST, Request, Status
from streamer.core.sampling import SamplingParams
from streamer.core.state import State
from streamer.errors import InvariantViolated
from tests.core.driver import RECOMPUTE, Driver, make_config


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(length)]


def order(driver: Driver) -> list[str]:
    """Requests in the order in which they first ran."""
    return list(driver.first_plan)


def wide(**settings: int) -> Driver:
    """A scheduler that is short of nothing but rows."""
    sizes = {"num_blocks": 400, "max_num_batched_tokens": 400, "max_num_seqs": 4} | settings
    return Driver(make_config(**sizes))


# ------------------------------------------------------------ under load


@pytest.mark.parametrize("is_fair", [True, False])
def test_two_requests_do_not_wait_for_fifty_of_another_tenant(is_fair: bool) -> None:
    """Four rows, answers of 20 tokens: 50 requests of A take 13 turns; B arrives in the first."""
    driver = wide()
    for i in range(50):
        driver.add(prompt(8, start=i), request_id=f"a{i}", max_tokens=20, tenant="a")
    for _ in range(5):
        driver.step()
    arrived = driver.steps
    for i in range(2):
        tenant = "b" if is_fair else "a"
        driver.add(prompt(8, start=60 + i), request_id=f"b{i}", max_tokens=20, tenant=tenant)
    driver.drain()
    waits = [driver.first_plan[f"b{i}"] - arrived for i in range(2)]
    if is_fair:
        assert order(driver)[:6] == ["a0", "a1", "a2", "a3", "b0", "b1"]
        assert max(waits) <= 20  # the rest of the current turn
    else:
        assert order(driver)[-2:] == ["b0", "b1"]
        assert min(waits) > 200


def served(driver: Driver, tenant: str) -> int:
    """Weighted tokens: each prompt that began, each output token."""
    total = 0
    for name, add in driver.adds.items():
        if add.tenant == tenant and name in driver.first_plan:
            total += PROMPT_COST * len(add.prompt) + OUTPUT_COST * len(driver.tokens[name, 0])
    return total


@pytest.mark.parametrize("depth", [0, 1])
def test_backlogged_tenants_get_equal_service_whatever_their_requests(depth: int) -> None:
    """Long prompts and short answers against the opposite: the paper's bound holds throughout."""
    driver = Driver(
        make_config(
            num_blocks=400, max_num_batched_tokens=400, max_num_seqs=4, enable_prefix_caching=False
        ),
        depth=depth,
    )
    for i in range(40):
        driver.add(prompt(40, start=i), max_tokens=2, tenant="long prompts")
        driver.add(prompt(2, start=i), max_tokens=20, tenant="long answers")
    bound = 2 * max(PROMPT_COST * 40, OUTPUT_COST * 4 * 20)
    while len(driver.first_plan) < 60:
        driver.step()
        gap = served(driver, "long prompts") - served(driver, "long answers")
        assert abs(gap) <= bound
    begun = [driver.adds[name].tenant for name in order(driver)]
    assert 20 < begun.count("long answers") < begun.count("long prompts") + 8
    driver.drain()


def test_recomputed_tokens_are_not_charged_again() -> None:
    config = make_config(num_blocks=12, num_host_blocks=0, enable_prefix_caching=False)
    driver = Driver(config, costs=RECOMPUTE)
    for start in (0, 40):
        driver.add(prompt(8, start=start), max_tokens=20, tenant="a")
    share = driver.scheduler.state.requests.by_id["r0"].share
    driver.drain()
    assert driver.outputs[-1].stats.preemptions_recompute > 0
    assert share.time == PROMPT_COST * 16 + OUTPUT_COST * 40


def test_cached_tokens_are_not_charged() -> None:
    driver = Driver(make_config())
    driver.add(prompt(9), max_tokens=1)
    driver.run()
    driver.add(prompt(9), max_tokens=1)
    share = driver.scheduler.state.requests.by_id["r1"].share
    driver.drain()
    assert share.time == PROMPT_COST * 1 + OUTPUT_COST * 1  # two blocks of four were found


# ------------------------------------------------------------ what idling earns


def test_idle_tenants_gain_no_credit() -> None:
    driver = wide(max_num_seqs=1)
    for i in range(10):
        driver.add(prompt(4, start=i), request_id=f"a{i}", max_tokens=10, tenant="a")
    driver.add(prompt(4, start=50), request_id="b0", max_tokens=1, tenant="b")
    while len(driver.first_plan) < 7:
        driver.step()
    for i in range(1, 4):  # its small request earns no claim on the next three turns
        driver.add(prompt(4, start=50 + i), request_id=f"b{i}", max_tokens=10, tenant="b")
    driver.drain()
    assert order(driver)[:2] == ["a0", "b0"]
    assert order(driver)[7:12] == ["b1", "a6", "b2", "a7", "b3"]


def test_a_new_tenant_has_no_claim_on_earlier_service() -> None:
    """Also when no request waits as it comes."""
    driver = wide(max_num_seqs=1)
    driver.add(prompt(4), request_id="a0", max_tokens=50, tenant="a")
    while driver.steps < 40:
        driver.step()
    for i in range(1, 4):
        driver.add(prompt(4, start=50 + i), request_id=f"b{i}", max_tokens=10, tenant="b")
    for i in range(1, 4):
        driver.add(prompt(4, start=i), request_id=f"a{i}", max_tokens=10, tenant="a")
    driver.drain()
    assert order(driver) == ["a0", "b1", "a1", "b2", "a2", "b3", "a3"]


def test_waiting_at_a_low_priority_is_no_claim_on_a_higher_one() -> None:
    driver = wide(max_num_seqs=1)
    driver.add(prompt(4), request_id="parked", max_tokens=1, tenant="b", priority=5)
    for i in range(8):
        driver.add(prompt(4, start=i), request_id=f"a{i}", max_tokens=10, tenant="a")
    while len(driver.first_plan) < 3:
        driver.step()
    for i in range(3):
        driver.add(prompt(4, start=50 + i), request_id=f"b{i}", max_tokens=10, tenant="b")
    driver.drain()
    assert order(driver)[3:8] == ["b0", "a3", "b1", "a4", "b2"]
    assert order(driver)[-1] == "parked"


def test_a_tenant_that_returns_keeps_its_virtual_time() -> None:
    """Requests one at a time, with none waiting in between, do not reset the account."""
    driver = wide(max_num_seqs=1)
    for i in range(20):
        driver.add(prompt(4, start=i), request_id=f"a{i}", max_tokens=2, tenant="a")
    driver.add(prompt(4, start=50), request_id="b0", max_tokens=30, tenant="b")
    while "b0" in driver.scheduler.state.requests.by_id:
        driver.step()
    driver.add(prompt(4, start=51), request_id="b1", max_tokens=30, tenant="b")
    driver.drain()
    between = order(driver)[order(driver).index("b0") + 1 : order(driver).index("b1")]
    assert len(between) == (4 + 2 * 30) // (4 + 2 * 2)  # the tokens b0 used, in answers of a


# ------------------------------------------------------------ what stays


def test_with_one_tenant_the_order_is_arrival() -> None:
    rng = random.Random(3)
    driver = wide(max_num_seqs=3)
    for i in range(40):
        length, tokens = rng.randint(1, 20), rng.randint(1, 20)
        driver.add(prompt(length, start=i), max_tokens=tokens, tenant="a")
        driver.step()
    driver.drain()
    assert order(driver) == [f"r{i}" for i in range(40)]


def test_a_preempted_request_goes_before_new_ones_of_a_tenant_served_less() -> None:
    config = make_config(num_blocks=12, num_host_blocks=0, max_num_seqs=2)
    driver = Driver(config, costs=RECOMPUTE)
    for start in (0, 40):
        driver.add(prompt(8, start=start), max_tokens=24, tenant="a")
    while not driver.scheduler.state.stats().preempted:
        driver.step()
    driver.add(prompt(4, start=70), request_id="b", max_tokens=4, tenant="b")
    while "b" not in driver.first_plan:
        assert driver.step()
    assert not driver.scheduler.state.stats().preempted
    driver.drain()


# ------------------------------------------------------------ the account book


def put(state: State, name: str, tenant: str, arrival: int, priority: int = 0) -> Request:
    add = Add(name, (1,), SamplingParams(max_tokens=1), tenant=tenant, priority=priority)
    request = Request(add, arrival, 1)
    state.requests.by_id[name] = request
    state.queue.open(request)
    state.enqueue(request)
    return request


def test_tenants_without_a_balance_are_dropped() -> None:
    driver = wide(max_num_seqs=1)
    for i in range(30):
        driver.add(prompt(4, start=i), max_tokens=2, tenant="a")
        driver.add(prompt(4, start=i), max_tokens=2, tenant=f"visitor {i}")
    known = []
    while driver.step():
        if 0 in driver.scheduler.state.queue._levels:
            shares = driver.scheduler.state.queue._levels[0].shares
            known.append(sum(not s.num_live for s in shares.values()))
    assert 0 < max(known) < 30
    assert not driver.scheduler.state.queue._levels
    driver.drain()


def test_check_finds_a_missing_share_and_a_wrong_one() -> None:
    state = State(make_config(), BlockHasher(4, b"s" * 32))
    first, second = put(state, "a", "a", 1), put(state, "b", "b", 2)
    state.queue.check(state.requests.by_id.values())
    first.share.num_live += 1
    with pytest.raises(InvariantViolated, match="has 1 requests of priority 0, 2 counted"):
        state.queue.check(state.requests.by_id.values())
    first.share.num_live -= 1
    first.share, second.share = second.share, first.share
    with pytest.raises(InvariantViolated, match="charged to another"):
        state.queue.check(state.requests.by_id.values())


def test_check_finds_a_request_missing_from_the_queue() -> None:
    state = State(make_config(), BlockHasher(4, b"s" * 32))
    state.queue.remove(put(state, "a", "a", 1))
    state.requests.counts[Status.WAITING] += 1
    with pytest.raises(InvariantViolated, match="request a is waiting and not in the queue"):
        state.check()


# ---------------------------------------------------------------- positions


def one_at_a_time() -> Driver:
    return Driver(make_config(max_num_seqs=1))


def add_with_position(driver: Driver, position: int | None, priority: int = 0) -> str:
    """A request of two tokens whose reader last received this position."""
    name = f"r{len(driver.adds)}"
    params = SamplingParams(max_tokens=2, seed=1)
    made = Add(name, (len(driver.adds), 1), params, priority=priority, queue_position=position)
    driver.command(made)
    driver.adds[name], driver.tokens[name, 0] = made, []
    return name


def changed(driver: Driver) -> dict[str, int]:
    found = driver.scheduler.changed_positions()
    assert all(n.kind is NoticeKind.WAITING for n in found)
    return {n.request_id: n.position for n in found}


def test_positions_fall_as_the_queue_moves_and_are_sent_once() -> None:
    driver = one_at_a_time()
    for i in range(4):
        add_with_position(driver, i)
    assert changed(driver) == {}  # these positions were sent before
    driver.step()
    assert changed(driver) == {"r1": 0, "r2": 1, "r3": 2}
    assert changed(driver) == {}
    driver.step()
    driver.cancel("r2")
    assert changed(driver) == {"r3": 1}
    driver.drain()
    assert not driver.scheduler.notifies_positions
    assert changed(driver) == {}


def test_a_request_without_notices_counts_for_the_others() -> None:
    driver = one_at_a_time()
    for position in (None, None, 2):
        add_with_position(driver, position)
    driver.step()
    assert changed(driver) == {"r2": 1}
    driver.drain()
    for _ in range(3):
        add_with_position(driver, None)
    assert not driver.scheduler.notifies_positions
    driver.drain()


def test_a_request_put_before_others_moves_them_back() -> None:
    driver = one_at_a_time()
    for i in range(3):
        add_with_position(driver, i, priority=1)
    driver.step()
    assert changed(driver) == {"r1": 0, "r2": 1}
    add_with_position(driver, None, priority=0)
    assert changed(driver) == {"r1": 1, "r2": 2}
    driver.drain()


def test_a_held_request_has_no_position_and_gets_one_when_it_is_back() -> None:
    driver = one_at_a_time()
    for i in range(3):
        add_with_position(driver, i)
    driver.pause("r1")
    driver.step()
    assert changed(driver) == {"r2": 0}
    driver.resume("r1")
    assert changed(driver) == {"r1": 0, "r2": 1}
    driver.drain()


def test_the_notices_of_one_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = one_at_a_time()
    for _ in range(6):
        add_with_position(driver, 99)
    monkeypatch.setattr(fairness, "MAX_NOTIFIED", 3)
    assert changed(driver) == {"r0": 0, "r1": 1, "r2": 2}
    monkeypatch.setattr(fairness, "MAX_NOTIFIED", 512)
    monkeypatch.setattr(fairness, "MAX_WALKED", 5)
    assert changed(driver) == {}
    driver.step()
    assert changed(driver) == {"r1": 0, "r2": 1, "r3": 2, "r4": 3, "r5": 4}
    driver.drain()

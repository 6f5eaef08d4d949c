"""Memory of the KV cache, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamer.demo import CHECKPOINT
from streamer.loadtest.paper import memory as paper_memory
from streamer.loadtest.paper.comparison import Ask
from streamer.loadtest.paper.memory import (
    Buddies,
    Moment,
    contiguous,
    paged,
    reserve_known,
    reserve_longest,
    reserve_power,
    room_for,
    run_choices,
    saving,
    summed,
)


def ask(num_prompt: int, num_output: int, first: int = 100) -> Ask:
    return Ask(tuple(range(first, first + num_prompt)), num_output)


def test_pages_of_one_request_step_by_step() -> None:
    """7 tokens of prompt, then two that are written after them; the last is only drawn."""
    usage = paged(CHECKPOINT, [ask(7, 3)], block_size=4, pool_tokens=64, context=64)
    # after the steps: 7 of 8 written, 8 of 8; the third step ends the request
    assert usage.wasted == pytest.approx(100 * (1 - 15 / 16))
    assert (usage.mean_running, usage.peak_running) == (1, 1)
    assert usage.filled == pytest.approx(100 * 7.5 / 64)


def test_as_many_run_at_once_as_have_blocks() -> None:
    """Eight blocks, one kept free while others run: three requests of two blocks each."""
    usage = paged(
        CHECKPOINT,
        [ask(7, 2, 100 * i) for i in range(1, 6)],
        block_size=4,
        pool_tokens=32,
        context=32,
    )
    assert usage.peak_running == 3
    assert usage.wasted == pytest.approx(100 / 8)


def test_averages_of_moments() -> None:
    """Only moments in which requests wait count for what is filled and what runs."""
    moments = [Moment(6, 8, 2, True), Moment(4, 8, 1, True), Moment(1, 4, 5, False)]
    usage = summed(moments, 16)
    assert usage.wasted == pytest.approx(45)
    assert usage.filled == pytest.approx(100 * 10 / 32)
    assert (usage.mean_running, usage.peak_running) == (1.5, 5)


def test_buddies_split_and_join() -> None:
    pool = Buddies(16)
    first, second, third = pool.take(3), pool.take(4), pool.take(5)
    assert (first, second, third) == ((0, 4), (4, 4), (8, 8))
    assert pool.take(1) is None
    pool.give_back(0, 4)
    assert pool.take(8) is None, "its buddy is taken"
    pool.give_back(4, 4)
    assert pool.take(8) == (0, 8)
    pool.give_back(8, 8)
    pool.give_back(0, 8)
    assert pool.take(16) == (0, 16)


@pytest.mark.parametrize(
    ("reserve", "held"), [(reserve_longest, 16), (reserve_power, 8), (reserve_known, 8)]
)
def test_one_contiguous_request(reserve: Callable[[Ask, int], int], held: int) -> None:
    """2 of prompt and 4 of progress: 2, 3, 4 and 5 are written; the last is only drawn."""
    usage = contiguous([ask(2, 4)], reserve, pool_tokens=16, context=16)
    assert usage.wasted == pytest.approx(100 * (1 - 3.5 / held))


def test_a_request_that_does_not_fit_waits() -> None:
    """Max: two of 8 in 16. Each takes two steps, so three requests take four."""
    usage = contiguous([ask(3, 2)] * 3, reserve_longest, pool_tokens=16, context=8)
    assert (usage.mean_running, usage.peak_running) == (2, 2)
    assert usage.filled == pytest.approx(100 * (6 + 8) / 32), "while the third waits"


def test_allocation_runs() -> None:
    progress: list[str] = []
    found = paper_memory.measure_allocation(progress.append, tiny=True)
    names = [str(row[0]) for row in found.rows]
    assert len(names) == 12
    assert names[:3] == ["ShareGPT, Max", "ShareGPT, Pow2", "ShareGPT, Oracle"]
    assert "Alpaca, blocks of 32" in progress


def test_two_choices_of_one_prompt() -> None:
    """A prompt of two blocks, and 8 tokens of each choice in a third one, from step 2 to 7.

    The first step leaves the prompt's blocks, the last one nothing.
    """
    requests = [Ask(tuple(range(100, 132)), 8)]
    room = room_for(requests, 2)
    shared = run_choices(CHECKPOINT, requests, 2, is_shared=True, room=room)
    alone = run_choices(CHECKPOINT, requests, 2, is_shared=False, room=room)
    assert (alone.held, alone.peak) == (2 * 2 + 6 * 6, 6)
    assert (shared.held, shared.peak) == (2 + 6 * 4, 4)
    assert shared.listed == alone.listed == alone.held
    assert saving(shared, alone) == pytest.approx(35)


def test_beams_run() -> None:
    progress: list[str] = []
    found = paper_memory.measure_beams(progress.append, tiny=True)
    assert [row[0] for row in found.rows] == [
        f"{kind}, width {width}" for kind in ("Alpaca", "ShareGPT") for width in (2, 4, 6)
    ]
    assert progress[-1] == "ShareGPT, width 6"
    saved = [float(str(row[2]).split()[0]) for row in found.rows]
    assert all(0 < each < 100 for each in saved)


def test_sharing_runs() -> None:
    progress: list[str] = []
    found = paper_memory.measure_sharing(progress.append, tiny=True)
    assert [row[0] for row in found.rows] == [
        f"{kind}, n = {n}" for kind in ("Alpaca", "ShareGPT") for n in (2, 4, 6)
    ]
    assert progress[-1] == "ShareGPT, n = 6, alone"
    saved = {row[0]: float(str(row[2]).split()[0]) for row in found.rows}
    for kind in ("Alpaca", "ShareGPT"):
        assert 0 < saved[f"{kind}, n = 2"] < saved[f"{kind}, n = 4"] < saved[f"{kind}, n = 6"]

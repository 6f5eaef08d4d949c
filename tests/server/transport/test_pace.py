"""Pace: slices of work take turns and leave the loop to others, also if a waiting caller leaves."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from streamer.server.transport.pace import REST, Pace

DEADLINE_S = 10.0
SLICE_S = 0.01


def slice_of_work() -> float:
    """Hold the loop for SLICE_S; returns the time at its end."""
    loop = asyncio.get_running_loop()
    end = loop.time() + SLICE_S
    while loop.time() < end:
        pass
    return loop.time()


async def test_slices_take_turns_and_the_loop_rests_longer_than_each() -> None:
    pace = Pace()
    async with asyncio.timeout(DEADLINE_S):
        ends = await asyncio.gather(*(pace.turn(slice_of_work) for _ in range(3)))
    assert list(ends) == sorted(ends)
    gaps = [after - before for before, after in pairwise(ends)]
    assert min(gaps) >= (REST + 1) * SLICE_S * 0.9


@pytest.mark.parametrize("is_closed", [False, True])
async def test_the_turn_of_a_request_that_left_goes_to_the_next(is_closed: bool) -> None:
    pace = Pace()
    first = asyncio.create_task(pace.turn(slice_of_work))
    await asyncio.sleep(0)
    leaver = pace.turn(slice_of_work)
    waits = leaver.send(None)
    late = [asyncio.create_task(pace.turn(slice_of_work)) for _ in range(2)]
    async with asyncio.timeout(DEADLINE_S):
        await first
        if is_closed:
            is_given = asyncio.Event()  # it is given its turn, but never runs again
            waits.add_done_callback(lambda _: is_given.set())
            await is_given.wait()
        leaver.close()
        await asyncio.gather(*late)


async def test_work_that_fails_takes_its_turn_alone() -> None:
    pace = Pace()

    def fail() -> None:
        raise ValueError("no")

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="no"):
            await pace.turn(fail)
        assert await pace.turn(lambda: 1) == 1

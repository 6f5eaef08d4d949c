"""streamer.garbage: the collector is off while any thread holds it, then as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from streamer.garbage import no_collections


@pytest.fixture
def threads() -> Iterator[list[ThreadPoolExecutor]]:
    """Two threads, each of which does what it is given."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield [first, second]


def enter(thread: ThreadPoolExecutor) -> AbstractContextManager[None]:
    held = no_collections()
    thread.submit(held.__enter__).result()
    return held


def leave(thread: ThreadPoolExecutor, held: AbstractContextManager[None]) -> None:
    thread.submit(held.__exit__, None, None, None).result()


def test_it_is_off_until_the_last_thread_leaves(threads: list[ThreadPoolExecutor]) -> None:
    first, second = (enter(thread) for thread in threads)
    leave(threads[1], second)
    assert not gc.isenabled()
    leave(threads[0], first)
    assert gc.isenabled()


def test_a_program_that_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thread_that_never_left_makes_up_for_it_the_next_time(
    threads: list[ThreadPoolExecutor],
) -> None:
    """An interruption of the pool may arrive between its entering and the work."""
    lost = enter(threads[0])
    leave(threads[0], enter(threads[0]))
    assert gc.isenabled()
    leave(threads[0], lost)
    assert gc.isenabled()

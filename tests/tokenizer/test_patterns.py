"""Patterns of a checkpoint: bounded in size, and in time over an answer."""

from __future__ import annotations

import gc
import time

import pytest
import regex

from streamer.tokenizer.patterns import Clock, TimedPattern, fault

SLOW, TEXT = "(?:a|a)*[bc]", "a" * 60


@pytest.mark.parametrize("text", ["a{1000}", "(a{10}){,100}", "x" * 1000, "a{10}|b{100}", "[{]"])
def test_what_may_be_used(text: str) -> None:
    assert fault(text) is None


@pytest.mark.parametrize("text", ["x" * 1001, "a{1001}", "(a{50}){50}", "a{" + "9" * 900 + "}"])
def test_what_is_too_large(text: str) -> None:
    assert fault(text) is not None


def test_matches_take_their_time_from_the_clock() -> None:
    clock = Clock(0.05, 0.01)
    slow, quick = (TimedPattern(regex.compile(each), clock) for each in (SLOW, "c?"))
    assert quick.search(TEXT + "c", 60)[0] == "c"
    assert len(quick.all("cc")) == 3
    began = time.thread_time()
    with pytest.raises(TimeoutError):
        slow.search(TEXT)
    with pytest.raises(TimeoutError):
        slow.all(TEXT)
    with pytest.raises(TimeoutError):
        quick.search("c")
    clock.more()
    assert quick.search("c") is not None
    assert time.thread_time() - began < 0.5


def test_collecting_garbage_is_no_patterns_time() -> None:
    """Neither of what it delays, nor of what it makes too late, which has one more try."""
    clock, calls = Clock(0.05, 0.0), []

    def work(timeout: float) -> float:
        calls.append(timeout)
        began = time.thread_time()
        while time.thread_time() - began < 0.04:
            pass
        if len(calls) < 3:
            gc.collect()
        if len(calls) > 1:
            raise TimeoutError
        return timeout

    assert clock.run(work) == 0.05
    with pytest.raises(TimeoutError):
        clock.run(work)
    assert calls == [0.05] * 3
    with pytest.raises(TimeoutError):
        clock.run(work)  # what is left is a fifth of it
    assert len(calls) == 4
    assert calls[3] < 0.02

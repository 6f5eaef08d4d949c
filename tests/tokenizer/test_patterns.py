"""Patterns of a checkpoint: bounded in size, and in time over an answer."""

from __future__ import annotations

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

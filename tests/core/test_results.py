"""apply: where an answer ends and what is kept of it; a failed row fails alone."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    NOT_FINITE,
    Add,
    Facts,
    Finish,
    FinishReason,
    StepResult,
    TokenLogprob,
)
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from tests.core.driver import make_config

TABLE = tuple(bytes([97 + i]) for i in range(26))  # token i is the i-th letter
END = 25


class Script:
    """A scheduler whose rows draw the letters that the test gives."""

    def __init__(self, **add: Any) -> None:
        self.scheduler = Scheduler(make_config(token_bytes=TABLE), BlockHasher(4, b"s" * 32))
        self.add("a", **add)
        self.output: list[int] = []

    def add(self, name: str, *, stop: tuple[str, ...] = (), **params: Any) -> None:
        settings = SamplingParams(stop=stop, **({"max_tokens": 50} | params))
        self.scheduler.command(
            Add(
                name,
                (1, 2, 3),
                settings,
                stop_ids=frozenset(settings.stop_token_ids)
                | (set() if settings.ignore_eos else {END}),
                stop=tuple(s.encode() for s in stop),
            )
        )

    def draw(self, text: str) -> Finish | None:
        """Feed one letter a step until the choice ends."""
        for letter in text:
            plan = self.scheduler.schedule(Facts())
            assert plan is not None
            out = self.scheduler.apply(plan, StepResult(plan.number, (0,), (ord(letter) - 97,)))
            self.scheduler.check()
            self.output += out.tokens
            if out.finishes:
                return out.finishes[0]
        return None


def test_an_end_token_stops_and_is_not_text() -> None:
    finish = Script().draw("abz")
    assert finish == Finish("a", 0, FinishReason.STOP, num_tokens=3, text_bytes=2)


def test_a_stop_id_is_named() -> None:
    finish = Script(stop_token_ids=(4,)).draw("abe")
    assert finish is not None
    assert (finish.reason, finish.stop, finish.text_bytes) == (FinishReason.STOP, 4, 2)


def test_ignored_end_tokens_are_ordinary() -> None:
    assert Script(ignore_eos=True).draw("azzb") is None


def test_a_stop_string_ends_the_text_where_it_begins() -> None:
    script = Script(stop=("efg",))
    finish = script.draw("abefefgh")
    assert finish is not None
    assert (finish.stop, finish.text_bytes, finish.num_tokens) == ("efg", 4, 7)
    assert len(script.output) == 7


def test_max_tokens_is_a_length_finish_with_all_text() -> None:
    finish = Script(max_tokens=3).draw("abcd")
    assert finish == Finish("a", 0, FinishReason.LENGTH, num_tokens=3)


def test_nothing_stops_before_min_tokens() -> None:
    finish = Script(min_tokens=4, stop=("b",)).draw("abzbb")
    assert finish is not None
    assert finish.num_tokens == 4
    assert finish.text_bytes == 3


def test_log_probabilities_keep_their_place() -> None:
    script = Script(logprobs=1)
    plan = script.scheduler.schedule(Facts())
    assert plan is not None
    entry = TokenLogprob(5, -0.5, ((5, -0.5),))
    out = script.scheduler.apply(plan, StepResult(plan.number, (0,), (5,), logprobs={0: entry}))
    assert out.logprobs == {0: entry}


def test_a_failed_row_fails_its_request_alone_and_its_blocks_are_not_matched() -> None:
    script = Script()
    script.scheduler.command(
        Add("b", tuple(range(9)), SamplingParams(max_tokens=5), stop_ids=frozenset({END}))
    )
    plan = script.scheduler.schedule(Facts())
    assert plan is not None
    result = StepResult(plan.number, (0,), (5,), failed={1: "logits are not finite"})
    out = script.scheduler.apply(plan, result)
    script.scheduler.check()
    (finish,) = out.finishes
    assert (finish.request_id, finish.reason) == ("b", FinishReason.FAILED)
    assert finish.detail == "logits are not finite"
    assert out.request_ids == ("a",)
    script.scheduler.command(Add("c", tuple(range(9)), SamplingParams(max_tokens=5)))
    plan = script.scheduler.schedule(Facts())
    assert plan is not None
    assert plan.num_tokens == 1 + 9  # no block of b's was found


@pytest.mark.parametrize("end", [{"stop_token_ids": (3,)}, {"stop": ("d",)}])
def test_a_row_that_fails_at_its_only_token_is_not_ended_by_its_prompt(end: dict[str, Any]) -> None:
    script = Script(max_tokens=1, **end)  # token 3, "d", is the prompt's last
    plan = script.scheduler.schedule(Facts())
    assert plan is not None
    out = script.scheduler.apply(plan, StepResult(plan.number, failed={0: NOT_FINITE}))
    script.scheduler.check()
    (finish,) = out.finishes
    assert (finish.reason, finish.detail) == (FinishReason.FAILED, NOT_FINITE)

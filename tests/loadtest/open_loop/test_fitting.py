"""Jobs fit the context of the model under test, whatever the workload."""

from __future__ import annotations

import pytest

from streamer.loadtest.open_loop.fitting import Scale, fitted
from streamer.loadtest.open_loop.jobs import Job, Turn, WorkloadOptions, jobs

SCALE = Scale(0.75, 6)


def most_tokens(job: Job) -> int:
    """Tokens of the last turn with all before it and its answer, by the highest estimates."""
    texts = [job.system] if job.system else []
    prompts = [turn.prompt for turn in job.turns]
    ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    texts += [prompt for prompt in prompts if isinstance(prompt, str)]
    answers = sum(turn.max_tokens for turn in job.turns)
    return ids + sum(map(SCALE.tokens, texts)) + answers


@pytest.mark.parametrize("workload", ["sharegpt", "alpaca", "prefix", "multiturn", "nano"])
@pytest.mark.parametrize("context", [700, 1024])
def test_everything_fits(workload: str, context: int) -> None:
    whole = jobs(workload, WorkloadOptions(200, 0, SCALE.words_per_token))
    short, cut = fitted(whole, SCALE, context)
    assert max(most_tokens(job) for job in short) <= context
    assert all(turn.max_tokens >= 1 and turn.prompt for job in short for turn in job.turns)
    pairs = [
        (before, after)
        for one, other in zip(whole, short, strict=True)
        for before, after in zip(one.turns, other.turns, strict=False)
    ]
    assert cut.cut_prompts == sum(before.prompt != after.prompt for before, after in pairs)
    assert cut.cut_answers == sum(before.max_tokens > after.max_tokens for before, after in pairs)
    assert cut.dropped_turns == sum(len(job.turns) for job in whole) - len(pairs)
    for before, after in pairs:
        assert before.prompt[: len(after.prompt)] == after.prompt


def test_a_workload_that_fits_the_context_is_unchanged() -> None:
    whole = jobs("alpaca", WorkloadOptions(50, 0, SCALE.words_per_token))
    for context in (None, 100_000):
        same, cut = fitted(whole, SCALE, context)
        assert same == whole
        assert cut.says("m") == ""


def test_the_answer_keeps_a_quarter_of_what_is_free() -> None:
    """100 tokens, of which 6 a message's frame: 25 are kept, and 75 hold 48 words and the frame."""
    ((job,), cut) = fitted([Job((Turn("a " * 500, 500),))], SCALE, 100)
    (turn,) = job.turns
    assert isinstance(turn.prompt, str)
    assert len(turn.prompt.split()) == 48
    assert turn.max_tokens == 26
    says = "To fit the 100 tokens of m: shorter prompts 1, shorter answers 1, turns left out 0."
    assert cut.says("m") == says


def test_a_conversation_ends_where_nothing_is_free() -> None:
    turns = tuple(Turn([1] * 30, 20) for _ in range(5))
    ((job,), cut) = fitted([Job(turns)], Scale(1.0), 160)
    assert job.turns == turns[:3]
    assert cut.dropped_turns == 2
    assert cut.cut_answers == cut.cut_prompts == 0


def test_a_system_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"system prompt of about 108 tokens .* context of 100"):
        fitted([Job((Turn("a", 1),), "a " * 72)], SCALE, 100)

"""Workloads: the lengths they promise, seeds, shared prefixes, traces."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from streamer.loadtest.open_loop.jobs import (
    ALPACA,
    MAX_TOKENS,
    SHAREGPT,
    SIGMAS,
    TURNS,
    WORKLOADS,
    WorkloadOptions,
    draw_length,
    jobs,
    reworded,
)


@pytest.mark.parametrize("means", [SHAREGPT, ALPACA])
def test_lengths_have_the_papers_means(means: tuple[float, float]) -> None:
    for mean in means:
        source = random.Random(0)
        drawn = [draw_length(source, mean, SIGMAS[means]) for _ in range(20_000)]
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
        assert 1 <= min(drawn) < max(drawn) <= MAX_TOKENS


def test_nano_vllms_own_sums() -> None:
    """Its README gives 133,966 output tokens for these 256 requests."""
    made = jobs("nano", WorkloadOptions(256, 0))
    assert sum(job.turns[0].max_tokens for job in made) == 133_966
    lengths = [len(job.turns[0].prompt) for job in made]
    assert (len(lengths), min(lengths) >= 100, max(lengths) <= 1024) == (256, True, True)
    assert jobs("nano", WorkloadOptions(3, 0)) == made[:3]


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "trace"])
def test_seeds(name: str) -> None:
    assert (
        jobs(name, WorkloadOptions(5, 1))
        == jobs(name, WorkloadOptions(5, 1))
        != jobs(name, WorkloadOptions(5, 2))
    )
    assert len(jobs(name, WorkloadOptions(5, 1))) == 5


def test_text_is_as_long_as_the_servers_tokens() -> None:
    (one,), (half,) = (jobs("prefix", WorkloadOptions(1, 0, ratio)) for ratio in (1.0, 0.5))
    assert (len(one.system.split()), len(half.system.split())) == (512, 256)
    assert one.turns[0].max_tokens == half.turns[0].max_tokens  # the same on every server


@pytest.mark.parametrize("name", ["prefix", "nano"])
def test_reworded_is_as_long_and_shares_as_much(name: str) -> None:
    """A job's own text begins with other words, so a prefix cache finds nothing."""
    work = jobs(name, WorkloadOptions(9, 0, 2.0))
    again = reworded(work, 0)
    assert again == reworded(work, 0)
    for old, new in zip(work, again, strict=True):
        for a, b in ((old.system, new.system), (old.turns[0].prompt, new.turns[0].prompt)):
            one, other = (text.split() if isinstance(text, str) else text for text in (a, b))
            assert sorted(map(str, one)) == sorted(map(str, other))
            assert one[:8] != other[:8] or not a
        assert old.turns[0].max_tokens == new.turns[0].max_tokens
    assert len({job.system for job in again}) == len({job.system for job in work})


def test_prefixes_are_shared_and_conversations_go_on() -> None:
    assert len({job.system for job in jobs("prefix", WorkloadOptions(60, 0))}) == 4
    turns = {len(job.turns) for job in jobs("multiturn", WorkloadOptions(60, 0))}
    assert turns == set(range(TURNS[0], TURNS[1] + 1))


def test_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 10.5, "input_length": 40, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 10.0, "input_length": 33, "output_length": 0, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 12.0, "input_length": 5, "output_length": 2, "type": "text"}\n'
    )
    first, second, third = jobs("trace", WorkloadOptions(9, 0, trace=file))
    assert [job.at_s for job in (first, second, third)] == [0.0, 0.0, 1.5]
    prompts = [str(job.turns[0].prompt).split() for job in (first, second, third)]
    assert sorted(len(words) for words in prompts) == [5, 33, 40]
    assert prompts[0][:32] == prompts[1][:32]
    assert [job.turns[0].max_tokens for job in (first, second, third)] == [7, 1, 2]
    assert len(jobs("trace", WorkloadOptions(2, 0, trace=file))) == 2


@pytest.mark.parametrize("line", ["{}", "no", '{"timestamp": "x"}'])
def test_a_malformed_trace_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 4, "output_length": 7}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        jobs("trace", WorkloadOptions(9, 0, trace=file))
    with pytest.raises(ValueError, match="--trace"):
        jobs("trace", WorkloadOptions(9, 0))

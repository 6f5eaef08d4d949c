"""The edits workload, and the bench's tables."""

from __future__ import annotations

from itertools import islice

from streamer.loadtest.inside.speculation.command import Pair, jobs, report
from streamer.loadtest.inside.speculation.edits import NUM_EDITS, VOCABULARY, edits, unrelated
from streamer.loadtest.inside.speculation.engine import Found


def test_an_answer_is_its_file_with_the_edits_that_are_asked_for() -> None:
    for edit in islice(edits(7, 30), 20):
        changed = [
            i for i, (a, b) in enumerate(zip(edit.file, edit.answer, strict=False)) if a != b
        ]
        assert len(changed) == NUM_EDITS
        assert len(edit.answer) == len(edit.file) + 1
        text = [VOCABULARY[token] for token in edit.prompt]
        for i in changed:
            old, new = VOCABULARY[edit.file[i]], VOCABULARY[edit.answer[i]]
            at = text.index(old, 32)
            assert text[at - 1 : at + 2] == ["<edit>", old, new]
        assert text[-1] == "<answer>"


def test_the_same_seed_makes_the_same_requests_and_another_seed_others() -> None:
    for work in ("edits", "unrelated", "text"):
        assert jobs(work, 3, 2, 5) == jobs(work, 3, 2, 5) != jobs(work, 3, 2, 6)
        assert len(jobs(work, 3, 2, 5).prompts) == 6


def test_unrelated_prompts_repeat_nothing() -> None:
    for prompt in islice(unrelated(3, 50), 5):
        assert len(set(prompt)) == 50


def test_a_table_shows_medians_and_the_lowest_ratio() -> None:
    def pair(off_s: float, on_s: float) -> Pair:
        return Pair(Found(off_s, 100), Found(on_s, 100, proposed=50, accepted=40))

    text = report({"4 x 1": [pair(2.0, 1.0), pair(3.0, 1.0), pair(1.0, 1.0)]})
    assert text.splitlines()[-1] == "| 4 x 1 | 50 | 100 | 2.00 | 1.00 | 0.50 | 80% |"

"""Fifty phrasings that training never saw, asked through the chat template with greedy decoding."""

from pathlib import Path

import pytest

from streamer.demo import CHECKPOINT
from streamer.demo.training.answering import answers
from streamer.demo.training.held_out import read_held_out

HELD_OUT = Path(__file__).parent / "held_out.txt"
FLOOR = 40
"""A little under what the committed weights reach."""


def ask(questions: list[str]) -> list[str]:
    """The bundled model's answers."""
    return answers(CHECKPOINT, questions, max_new_tokens=120)


def test_held_out_phrasings_are_answered_right(capsys: pytest.CaptureFixture[str]) -> None:
    records = read_held_out(HELD_OUT)
    given = ask([record.question for record in records])
    wrong = [(r, text) for r, text in zip(records, given, strict=True) if not r.is_right(text)]
    right = len(records) - len(wrong)
    with capsys.disabled():
        print(f"\nheld-out phrasings answered right: {right} of {len(records)}")
        for record, text in wrong:
            print(f"  {record.question}\n    {text}")
    assert len(records) == 50
    assert right >= FLOOR


def test_what_is_paged_attention() -> None:
    (answer,) = ask(["What is PagedAttention?"])
    for part in ("KV cache", "small blocks of equal size", "block table"):
        assert part in answer
    assert answer.endswith(".")


def test_a_story_is_generated_and_ends() -> None:
    (story,) = answers(CHECKPOINT, ["Tell me a story about a fox."])
    assert "fox" in story
    assert 60 < len(story.split()) < 300
    assert story.rstrip().endswith((".", "!", "?", '"'))

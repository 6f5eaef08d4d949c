"""The questions file is large enough and well formed, and no phrasing has two answers."""

from collections import defaultdict
from pathlib import Path

import pytest

from streamer.demo.training.held_out import HeldOut, read_held_out
from streamer.demo.training.texts.grammar import TemplateError
from streamer.demo.training.texts.questions import normalised, read_questions

HELD_OUT = Path(__file__).parent / "held_out.txt"


def test_there_are_three_hundred_entries_of_four_phrasings() -> None:
    entries = read_questions()
    assert len(entries) >= 300
    assert [e.phrasings[0] for e in entries if len(e.phrasings) < 4] == []


def test_answers_are_sentences_of_readable_length() -> None:
    for entry in read_questions():
        assert 40 <= len(entry.answer) <= 330, entry.answer
        assert entry.answer.endswith("."), entry.answer


def test_no_phrasing_has_two_answers() -> None:
    answers = defaultdict(set)
    for entry in read_questions():
        for phrasing in entry.phrasings:
            answers[normalised(phrasing)].add(entry.answer)
    assert {asked: found for asked, found in answers.items() if len(found) > 1} == {}


def test_each_held_out_question_has_an_entry_that_answers_it() -> None:
    answers = [entry.answer for entry in read_questions()]
    for record in read_held_out(HELD_OUT):
        assert any(record.is_right(answer) for answer in answers), record.question


def test_marking_needs_every_group() -> None:
    record = HeldOut("?", (("blocks",), ("waste", "wasted")))
    assert record.is_right("Blocks, so nothing is WASTED.")
    assert not record.is_right("Blocks.")
    assert record.missing("Blocks.") == (("waste", "wasted"),)


@pytest.mark.parametrize("text", ["Q: one\n", "A: one\n", "Q: a\nA: b\nA: c\n", "Q: a\nx\nA: b\n"])
def test_a_malformed_entry_is_refused_by_its_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("Q: fine?\nA: Fine.\n\n" + text)
    with pytest.raises(TemplateError, match="entry 2"):
        read_questions(path)

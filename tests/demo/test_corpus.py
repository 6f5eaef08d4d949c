"""The training text: the same for the same seed, without holes, and free of held-out phrasings."""

import random
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from streamer.demo.training.corpus import MIX, PROMPT_WEIGHT, Document, documents, encode, pack
from streamer.demo.training.held_out import excluded_phrasings, read_held_out
from streamer.demo.training.texts.dialogues import Turn, poem_exchange, small_talk, story_exchange
from streamer.demo.training.texts.grammar import TemplateError, choose, fill, plots, with_article
from streamer.demo.training.texts.questions import normalised, read_questions, reworded
from streamer.demo.training.texts.stories import make_cast, make_character, make_story

HELD_OUT = Path(__file__).parent / "held_out.txt"
TOKENIZER = Path(__file__).parents[2] / "streamer/demo/checkpoint/tokenizer.json"
HOLES = re.compile(r"[{}|]|\[(?!DONE\])")


def test_the_same_seed_gives_the_same_documents_and_another_seed_others() -> None:
    entries = read_questions()
    first = list(islice(documents(5, entries), 200))
    assert list(islice(documents(5, entries), 200)) == first
    assert list(islice(documents(6, entries), 200)) != first


def test_every_kind_of_document_appears() -> None:
    seen = {d.kind for d in islice(documents(1, read_questions()), 500)}
    assert seen == set(MIX)


@pytest.mark.parametrize("plot", plots(), ids=lambda plot: plot.name)
def test_every_line_of_a_plot_can_be_filled_in(plot) -> None:
    rng = random.Random(1)
    for _ in range(40):
        story = make_story(rng, plot=plot)
        texts = [story.text, story.summary, story.moral, story.sequel, story.title]
        texts += [part for ask in story.asks for part in ask]
        for text in texts:
            assert not HOLES.search(text), text
            assert text[0].isupper() or text[0] in "\"'"


def test_stories_and_chat_have_no_unfilled_templates() -> None:
    rng = random.Random(2)
    for _ in range(300):
        for turn in [*story_exchange(rng), *poem_exchange(rng)]:
            assert not HOLES.search(turn.content), turn
            assert "  " not in turn.content


def test_answers_never_have_a_where_an_belongs() -> None:
    for document in islice(documents(3, read_questions()), 3000):
        for turn in document.turns:
            if turn.role in ("assistant", "text"):
                assert not re.search(r"\b[Aa] [aeio](?!ne)\w+", turn.content), turn
                assert not re.search(r"\b[Aa]n [bcdfgjklmnpqrtvwxz][a-z]+", turn.content), turn


def test_hero_friend_and_villain_differ() -> None:
    rng = random.Random(4)
    for _ in range(500):
        cast = make_cast(rng)
        assert cast.hero.name != cast.friend.name
        assert len({cast.hero.kind, cast.friend.kind, cast.slots["v.kind"]}) == 3


def test_pronouns_follow_the_kind() -> None:
    rng = random.Random(5)
    assert make_character(rng, "queen").is_female
    assert not make_character(rng, "king").is_female


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("owl", "an owl"),
        ("fox", "a fox"),
        ("honest fox", "an honest fox"),
        ("unicorn", "a unicorn"),
        ("old umbrella", "an old umbrella"),
    ],
)
def test_article(phrase: str, expected: str) -> None:
    assert with_article(phrase) == expected


def test_an_unfilled_slot_is_an_error_that_names_it() -> None:
    with pytest.raises(TemplateError, match="'nothing'"):
        fill("a {nothing} here", {})


def test_inner_choices_are_decided() -> None:
    found = {choose("[a|b [c|d]]", random.Random(seed)) for seed in range(40)}
    assert found == {"a", "b c", "b d"}


def test_small_talk_has_questions_and_answers() -> None:
    assert len(small_talk()) >= 60
    assert all(entry.asked and entry.answers for entry in small_talk())


def test_rewording_varies_a_phrasing_and_keeps_it_short() -> None:
    rng = random.Random(6)
    seen = {reworded("What is a block table?", rng) for _ in range(300)}
    assert len(seen) > 60
    assert max(map(len, seen)) < 120
    assert sum("block table" in text.lower() for text in seen) > 0.8 * len(seen)


def test_no_held_out_phrasing_enters_training() -> None:
    excluded = excluded_phrasings(read_held_out(HELD_OUT))
    assert len(excluded) == 50
    entries = read_questions()
    assert not excluded & {normalised(p) for entry in entries for p in entry.phrasings}
    for document in islice(documents(9, entries, excluded), 5000):
        for turn in document.turns:
            assert normalised(turn.content) not in excluded


def test_exclusion_works_on_a_phrasing_that_would_come_up() -> None:
    entries = read_questions()
    common = normalised("What is PagedAttention?")

    def asked(excluded: frozenset[str]) -> set[str]:
        drawn = islice(documents(3, entries, excluded), 6000)
        return {normalised(turn.content) for d in drawn for turn in d.turns}

    assert common in asked(frozenset())
    assert common not in asked(frozenset({common}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def test_loss_weights_cover_answers_fully_and_prompts_lightly(tokenizer: Tokenizer) -> None:
    turns = (Turn("user", "What is a block?"), Turn("assistant", "A small piece."))
    (row,) = encode([Document("chat", turns)], tokenizer)
    full = [i for i, w in zip(row.ids, row.weights, strict=True) if w == 1.0]
    light = [i for i, w in zip(row.ids, row.weights, strict=True) if w == PROMPT_WEIGHT]
    text = tokenizer.decode(full, skip_special_tokens=False)
    assert text == "A small piece.<|im_end|>"
    assert tokenizer.decode(light, skip_special_tokens=False) == "What is a block?<|im_end|>"


def test_rows_begin_with_a_document_and_hold_whole_documents(tokenizer: Tokenizer) -> None:
    rows = encode(list(islice(documents(8, read_questions()), 400)), tokenizer)
    packed = pack(iter(rows), length=512, num_rows=30, pad=3)
    assert packed.ids.shape == packed.weights.shape == (30, 512)
    bos = tokenizer.token_to_id("<|bos|>")
    assert (packed.ids[:, 0] == bos).all()
    known = {tuple(row.ids[:512]) for row in rows}
    for line in packed.ids:
        starts = [*(i for i, token in enumerate(line) if token == bos), 512]
        for begin, end in pairwise(starts):
            document = line[begin:end].tolist()
            while tuple(document) not in known and document and document[-1] == 3:
                document.pop()
            assert tuple(document) in known
    assert (packed.ids == 3).mean() < 0.1

"""Grammars that begin after the reasoning, and budgets: of an untrained model, token by token."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.constraints.filler import MaskFiller, Wanted
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.masks import Constraint
from streamer.constraints.reasoning import Place
from streamer.core.plan import Reasoning, RowJoin
from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from tests.constraints.test_masks import allowed_by

Stage = Literal["before", "inside", "after"]

OPEN, CLOSE, END = 300, 301, 302
PIECES = [b"<", b"th", b"ink", b">", b"</", b"</think", b">{", b"> ", b"\n\n", b" ", b"<think>x"]
PIECES += [b"</think>", b"</think>ab", b"<end>", b"ab", b"a", b"b", b"{}"]
TOKENS = [bytes([i]) for i in range(256)] + PIECES
SIZE = 303
SPECIAL = {OPEN: b"<think>", CLOSE: b"</think>", END: b"<eos>"}
MARKS = Reasoning("inside", "<think>", ("</think>",), (CLOSE,))
VOCABULARY = Vocabulary(TOKENS, SPECIAL, (END,), lambda text: list(text.encode()))
AB = {"regex": "(ab|ba){2}b"}


def marks(stage: Stage, *, is_special: bool = True) -> Reasoning:
    closing = (CLOSE,) if is_special else tuple(b"</think>")
    return Reasoning(stage, MARKS.opens, MARKS.ends, closing)


def text_of(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY.text(t) for t in tokens)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(VOCABULARY)


def constraint_of(grammars: Grammars, reasoning: Reasoning, **params: Any) -> Constraint:
    made = SamplingParams(**params)
    join = RowJoin(0, "r", 0, (1,), 1, 0, (), made, frozenset((END,)), reasoning=reasoning)
    grammar = made.structured_outputs
    compiled = None if grammar is None else grammars.compile(grammar)
    return Constraint(compiled, join, VOCABULARY, SIZE)


def draw(constraint: Constraint, rng: random.Random, common: tuple[int, ...]) -> list[int]:
    """Tokens drawn at random among what is allowed, often one of the `common` ones. Masks of
    provisional tokens are those that come one by one."""
    filler, tokens = MaskFiller(SIZE), list[int]()
    expected: dict[tuple[int, ...], bytes] = {}
    for position in range(1, 80):
        provisional = rng.choices(common, k=rng.randint(0, 4))
        filled = filler.fill([Wanted(constraint, position, provisional)])
        assert not filled.errors
        allowed = allowed_by(filled, SIZE)
        assert expected.setdefault(tuple(tokens), allowed[0].tobytes()) == allowed[0].tobytes()
        for n, token in enumerate(provisional):
            if not allowed[n, token]:
                break
            expected[(*tokens, *provisional[: n + 1])] = allowed[n + 1].tobytes()
        choices = allowed[0].nonzero()[0].tolist()
        token = rng.choice([t for t in common if t in choices] or choices)
        if provisional and allowed[0, provisional[0]]:
            token = provisional[0]
        tokens.append(token)
        constraint.drew(token)
        if token == END:
            break
    return tokens


NEAR = (*range(256, 256 + len(PIECES)), CLOSE, OPEN, 97, 98)


@pytest.mark.parametrize("stage", ["before", "inside", "after"])
@pytest.mark.parametrize("seed", range(12))
def test_a_grammar_begins_after_the_reasoning(grammars: Grammars, stage: Stage, seed: int) -> None:
    constraint = constraint_of(grammars, marks(stage), structured_outputs=AB)
    text = text_of(draw(constraint, random.Random(seed), NEAR))
    answer = rb"(ab|ba){2}b"
    if stage == "after":
        assert re.fullmatch(answer + b"<eos>", text)
    elif text.endswith(b"<eos>") and b"</think>" in text:
        thought, _, rest = text.partition(b"</think>")
        assert re.fullmatch(rb"\s{0,6}" + answer + b"<eos>", rest), text
        assert stage == "inside" or thought.startswith(b"<think>")
    elif stage == "before" and not text.startswith(b"<think>"):
        assert re.fullmatch(answer + b"<eos>", text)


def test_some_reason_and_some_do_not(grammars: Grammars) -> None:
    """Before the first token both may come: the reasoning or the answer."""
    constraint = constraint_of(grammars, marks("before"), structured_outputs=AB)
    allowed = allowed_by(MaskFiller(SIZE).fill([Wanted(constraint, 1)]), SIZE)[0]
    found = {VOCABULARY.text(t) for t in allowed.nonzero()[0].tolist()}
    assert found == {b"<", b"<think>", b"<think>x", b"a", b"b", b"ab"}


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("grammar", [None, AB])
def test_a_budget_ends_the_reasoning(
    grammars: Grammars, budget: int, is_special: bool, grammar: Any
) -> None:
    reasoning = marks("inside", is_special=is_special)
    constraint = constraint_of(
        grammars, reasoning, structured_outputs=grammar, thinking_token_budget=budget
    )
    tokens = draw(constraint, random.Random(budget), (97, 98, 99))
    assert tokens[budget : budget + len(reasoning.closing)] == list(reasoning.closing)
    place = Place(reasoning, VOCABULARY.text)
    for token in tokens:
        place.follow(token)
    assert place.num_tokens == budget
    rest = text_of(tokens).partition(b"</think>")[2]
    assert grammar is None or re.fullmatch(rb"\s*(ab|ba){2}b<eos>", rest)


def test_in_the_reasoning_only_an_end_that_comes_too_soon_is_banned(grammars: Grammars) -> None:
    crossing = 256 + PIECES.index(b"</think>ab")
    budget = {"thinking_token_budget": 9}
    for settings, banned in [
        ({"structured_outputs": AB}, {END, crossing}),  # its text would never come
        (budget, set()),
        ({**budget, "min_tokens": 3}, {END}),
    ]:
        constraint = constraint_of(grammars, marks("inside"), **settings)
        allowed = allowed_by(MaskFiller(SIZE).fill([Wanted(constraint, 1)]), SIZE)[0]
        assert {t for t in range(SIZE) if not allowed[t]} == banned


@given(st.text("<>/think ab{\n", max_size=60), st.data())
def test_where_the_text_is_cut_does_not_matter(text: str, data: Any) -> None:
    """The answer's text is what comes after the first mark, and no token before is reasoning."""
    text = data.draw(st.sampled_from(["", "<think>", "<think>a"])) + text
    text += data.draw(st.sampled_from(["", "</think>", "</think>\n\nab"]))
    stage: Stage = data.draw(st.sampled_from(["before", "inside", "after"]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[a:b].encode() for a, b in pairwise(cuts)]
    place, answer = Place(marks(stage), pieces.__getitem__), b""
    for n in range(len(pieces)):
        answer += b"".join(pieces[i] for i in place.follow(n))
    opened = text.lstrip().removeprefix("<think>") if stage == "before" else text
    is_opened = stage == "inside" or (stage == "before" and opened != text.lstrip())
    thought, mark, rest = opened.partition("</think>")
    if is_opened and mark:
        assert rest.encode().strip().endswith(answer.strip())
        assert place.stage in ("spaces", "answer")
    elif is_opened:
        assert (place.stage, answer) == ("reasoning", b"")
    else:
        assert answer + b"".join(pieces[i] for i in place.held) == text.encode()
    if stage == "inside" and all(len(piece) == 1 for piece in pieces):
        assert place.num_tokens == len(thought)


def test_marks_are_not_empty() -> None:
    with pytest.raises(InvalidRequest, match=r"reasoning\.ends"):
        Reasoning("inside", "<think>", (), (1,))

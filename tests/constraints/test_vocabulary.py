"""Texts that must come, for tokenizers that write more than the text, or know no such token."""

from __future__ import annotations

import random
import re

import pytest

from streamer.constraints.filler import MaskFiller, Wanted
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.constraints.masks import Constraint
from streamer.core.plan import RowJoin
from streamer.core.sampling import SamplingParams
from tests.constraints.test_masks import allowed_by

WORDS = [b"", b"name", b" name", b'"name', b' "name', b"ame", b" "]
TOKENS = [bytes([i]) for i in range(256)] + WORDS
END, SIZE = 256, len(TOKENS)
LONGEST_FIRST = sorted(range(257, SIZE - 1), key=lambda t: -len(TOKENS[t]))


def plain(text: str) -> list[int]:
    found, data = list[int](), text.encode()
    while data:
        token = next((t for t in LONGEST_FIRST if data.startswith(TOKENS[t])), data[0])
        found.append(token)
        data = data[len(TOKENS[token]) :]
    return found


def spaced(text: str) -> list[int]:
    """As SentencePiece does: a space is before every text, and before no line."""
    return plain(" " + text)


def strange(text: str) -> list[int]:
    """No text comes back."""
    return plain(text.replace("name", "NAME"))


@pytest.mark.parametrize("encode", [plain, spaced, strange])
@pytest.mark.parametrize("seed", range(4))
def test_what_must_come_comes(encode: object, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grammars", "masks"):  # under a slow grammar nothing is said to be forced
        monkeypatch.setattr(f"streamer.constraints.{name}.SLOW_S", 1e9)
    vocabulary = Vocabulary(TOKENS, {END: b"<end>"}, (END,), encode)  # type: ignore[arg-type]
    pattern = '(a|b)"name":(1|2)( name|,)'
    params = SamplingParams(structured_outputs={"regex": pattern})
    assert params.structured_outputs is not None
    compiled = Grammars(vocabulary).compile(params.structured_outputs)
    join = RowJoin(0, "r", 0, (1,), 1, 0, (), params, frozenset((END,)))
    constraint = Constraint(compiled, join, vocabulary, SIZE)
    filler, rng, text, forced = MaskFiller(SIZE), random.Random(seed), b"", 0
    for position in range(1, 40):
        allowed = (
            allowed_by(filler.fill([Wanted(constraint, position)]), SIZE)[0].nonzero()[0].tolist()
        )
        token = rng.choice(allowed)
        if token == END:
            break
        text += TOKENS[token]
        constraint.drew(token)
        forced = max(forced, len(constraint.forced))
    assert re.fullmatch(pattern, text.decode())
    assert forced >= 2

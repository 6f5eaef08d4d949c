"""The edits workload: a JSON file and a few replacements, answered by the edited file.

Seeded, of one vocabulary: every line of a file is a token, as is every mark, so that a tiny model
learns in minutes to copy a file with its edits. No torch, no clock, no engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import msgspec

BEGIN, END, FILE, EDIT, ANSWER = "<begin>", "<end>", "<file>", "<edit>", "<answer>"
MARKS: Final = (BEGIN, END, FILE, EDIT, ANSWER)
NUM_KEYS, NUM_VALUES = 40, 25
LINES: Final = tuple(
    f'  "key_{key}": {value},\n' for key in range(NUM_KEYS) for value in range(NUM_VALUES)
)
VOCABULARY: Final = (*MARKS, *LINES)
NUM_EDITS: Final = 4


class Edit(msgspec.Struct, frozen=True):
    """A prompt and the answer it asks for, as token ids; the answer ends with END."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def file(self) -> tuple[int, ...]:
        """The file before its edits."""
        first = VOCABULARY.index(FILE)
        return self.prompt[self.prompt.index(first) + 1 : self.prompt.index(VOCABULARY.index(EDIT))]


def edits(seed: int, num_lines: int) -> Iterator[Edit]:
    """Edits without end: files of `num_lines` different lines, NUM_EDITS of them replaced."""
    source = random.Random(seed)
    begin, end, file, edit, answer = range(len(MARKS))
    lines = range(len(MARKS), len(VOCABULARY))
    while True:
        chosen = source.sample(lines, num_lines + NUM_EDITS)
        before, new = chosen[:num_lines], chosen[num_lines:]
        places = source.sample(range(num_lines), NUM_EDITS)
        after, asked = list(before), []
        for place, line in zip(places, new, strict=True):
            after[place] = line
            asked += [edit, before[place], line]
        yield Edit((begin, file, *before, *asked, answer), (*after, end))


def unrelated(seed: int, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Prompts of random lines that ask for nothing: no two tokens in a row come twice."""
    source = random.Random(seed)
    while True:
        yield tuple(source.sample(range(len(MARKS), len(VOCABULARY)), num_tokens))

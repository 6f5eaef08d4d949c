"""The demo model's training text: documents drawn from a seed, and their packing into rows.

Owns the mix (the shares of questions, stories and chat) and each token's weight in the loss. Never
trains. Called by train.py, tokenizer.py, report.py and the tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from streamer.demo.training.texts.dialogues import (
    Turn,
    name_exchange,
    poem_exchange,
    small_talk_exchange,
    story_exchange,
    system_turns,
    typed,
)
from streamer.demo.training.texts.grammar import TemplateError
from streamer.demo.training.texts.lookback import lookback_exchange
from streamer.demo.training.texts.questions import Entry, normalised, reworded
from streamer.demo.training.texts.stories import make_story

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

BOS, START, END, END_OF_TEXT = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (BOS, START, END, END_OF_TEXT)

# Shares of the documents by kind. Questions are short: 0.66 of the documents and 0.43 of the
# tokens; told stories are 0.30 of the tokens, chat 0.20, plain stories 0.06.
MIX = {"questions": 0.66, "chat": 0.16, "story": 0.04, "told": 0.14}
LOOKBACK_MIX = {**{kind: 0.7 * share for kind, share in MIX.items()}, "lookback": 0.3}
ONLY_LOOKBACK = {"lookback": 1.0}
PROMPT_WEIGHT = 0.15
"""Loss weight of system and user tokens: enough to learn how people ask, with room for answers."""


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
        TemplateError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise TemplateError(f"the tokenizer has no special token {token!r}")
    return int(found)


class Document(msgspec.Struct, frozen=True):
    """One training document: a dialogue, or a plain story as a single turn with role "text"."""

    kind: str
    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The roles and contents of all turns, as the tokenizer is trained on them."""
        return "\n".join(f"{turn.role}\n{turn.content}" for turn in self.turns)


class Row(NamedTuple):
    """Token ids of one document and the loss weight of each."""

    ids: list[int]
    weights: list[float]


class Asker:
    """Draws exchanges on the engine; every entry is used once before any is used again.

    Phrasings whose words equal an excluded one are never drawn.
    """

    def __init__(
        self, entries: Sequence[Entry], rng: random.Random, excluded: frozenset[str]
    ) -> None:
        self.entries = entries
        self.rng = rng
        self.excluded = excluded
        self.deck: list[Entry] = []

    def exchange(self) -> list[Turn]:
        """A question, reworded, and its answer."""
        if not self.deck:
            self.deck = list(self.entries)
            self.rng.shuffle(self.deck)
        entry = self.deck.pop()
        while True:
            asked = reworded(self.rng.choice(entry.phrasings), self.rng)
            if normalised(asked) not in self.excluded:
                return [Turn("user", asked), Turn("assistant", entry.answer)]


_AGAIN = ("Please say that again.", "Can you repeat that?", "Say it again.", "Repeat that, please.")
_MORE = ("Tell me more.", "Can you tell me more?", "Go on.", "And what else?", "More, please.")
_NO_MORE = (
    "That is all I know about it, because I am a very small model. "
    "The README of the repository has more.",
    "I am a very small model, so that is as much as I know. You can read more in the README.",
)


def _question_dialogue(rng: random.Random, asker: Asker) -> list[Turn]:
    turns = system_turns(rng)
    if rng.random() < 0.1:
        turns += small_talk_exchange(rng, first=True)
    turns += asker.exchange()
    while rng.random() < 0.35 and len(turns) < 9:
        share = rng.random()
        if share < 0.82:
            turns += asker.exchange()
        elif share < 0.88:
            turns += [Turn("user", typed(rng.choice(_AGAIN), rng)), turns[-1]]
        elif share < 0.94:
            answer = Turn("assistant", rng.choice(_NO_MORE))
            turns += [Turn("user", typed(rng.choice(_MORE), rng)), answer]
        else:
            turns += small_talk_exchange(rng)
    return turns


def _chat_dialogue(rng: random.Random, asker: Asker) -> list[Turn]:
    turns = system_turns(rng)
    if rng.random() < 0.25:
        turns += small_talk_exchange(rng, first=True)
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6))):
        share = rng.random()
        if share < 0.62:
            turns += small_talk_exchange(rng)
        elif share < 0.72:
            turns += name_exchange(rng)
        elif share < 0.84:
            turns += poem_exchange(rng)
        elif share < 0.9:
            turns += story_exchange(rng)
        else:
            turns += asker.exchange()
    return turns


def _told_dialogue(rng: random.Random) -> list[Turn]:
    turns = system_turns(rng)
    if rng.random() < 0.15:
        turns += small_talk_exchange(rng, first=True)
    turns += story_exchange(rng)
    if rng.random() < 0.2:
        turns += story_exchange(rng)
    if rng.random() < 0.2:
        turns += small_talk_exchange(rng)
    return turns


def documents(
    seed: int,
    entries: Sequence[Entry],
    excluded: frozenset[str] = frozenset(),
    mix: Mapping[str, float] = MIX,
) -> Iterator[Document]:
    """Endless documents, the same for the same seed; `mix` has the shares by kind."""
    rng = random.Random(seed)
    asker = Asker(entries, rng, excluded)
    kinds, shares = list(mix), list(mix.values())
    while True:
        kind = rng.choices(kinds, shares)[0]
        if kind == "questions":
            yield Document(kind, tuple(_question_dialogue(rng, asker)))
        elif kind == "chat":
            yield Document(kind, tuple(_chat_dialogue(rng, asker)))
        elif kind == "lookback":
            yield Document(kind, tuple(lookback_exchange(rng)))
        elif kind == "told":
            yield Document(kind, tuple(_told_dialogue(rng)))
        else:
            yield Document(kind, (Turn("text", make_story(rng).text),))


def encode(batch: Sequence[Document], tokenizer: Tokenizer) -> list[Row]:
    """The documents as the chat template writes them, with a weight for each token."""
    special = {token: special_id(tokenizer, token) for token in SPECIAL_TOKENS}
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    pieces = [
        turn.content if turn.role == "text" else f"{turn.role}\n{turn.content}"
        for document in batch
        for turn in document.turns
    ]
    encoded = iter(tokenizer.encode_batch(pieces, add_special_tokens=False))
    headers = {
        role: len(tokenizer.encode(f"{role}\n", add_special_tokens=False).ids)
        for role in ("system", "user", "assistant")
    }
    rows: list[Row] = []
    for document in batch:
        row = Row([special[BOS]], [0.0])
        for turn in document.turns:
            ids = next(encoded).ids
            if turn.role == "text":
                row.ids.extend([*ids, special[END_OF_TEXT]])
                row.weights.extend([1.0] * (len(ids) + 1))
                continue
            header = headers[turn.role]
            weight = 1.0 if turn.role == "assistant" else PROMPT_WEIGHT
            row.ids.extend([special[START], *ids, special[END], *newline])
            row.weights.extend([0.0] * (1 + header) + [weight] * (len(ids) - header + 1))
            row.weights.extend([0.0] * len(newline))
        rows.append(row)
    return rows


class Packed(NamedTuple):
    """Rows of equal length: ids (rows, length) and weights (rows, length)."""

    ids: np.ndarray
    weights: np.ndarray


def pack(rows: Iterator[Row], length: int, num_rows: int, pad: int) -> Packed:
    """Documents packed into rows of `length`, none across two rows; a longer document is cut.

    Each row takes the first of 64 waiting documents that still fits, so that padding is short.
    """
    import numpy as np

    ids = np.full((num_rows, length), pad, dtype=np.int16)
    weights = np.zeros((num_rows, length), dtype=np.float16)
    waiting: list[Row] = []
    for index in range(num_rows):
        used = 0
        while True:
            while len(waiting) < 64:
                waiting.append(next(rows))
            room = length - used
            fitting = next((i for i, row in enumerate(waiting) if len(row.ids) <= room), None)
            if fitting is None and used:
                break
            row = waiting.pop(fitting or 0)
            take = min(len(row.ids), length)
            ids[index, used : used + take] = row.ids[:take]
            weights[index, used : used + take] = row.weights[:take]
            used += take
    return Packed(ids, weights)


def single_documents(rows: Iterator[Row], num_tokens: int, pad: int) -> Iterator[Packed]:
    """Batches of about num_tokens in which each row is one document, padded to a multiple of 64.

    A batch has documents of one padded length, and is yielded when it is full.
    """
    import numpy as np

    waiting: dict[int, list[Row]] = {}
    for row in rows:
        length = -(-(len(row.ids) - 1) // 64) * 64
        waiting.setdefault(length, []).append(row)
        if len(waiting[length]) * length < num_tokens:
            continue
        full = waiting.pop(length)
        ids = np.full((len(full), length + 1), pad, dtype=np.int16)
        weights = np.zeros((len(full), length + 1), dtype=np.float16)
        for index, one in enumerate(full):
            ids[index, : len(one.ids)] = one.ids
            weights[index, : len(one.ids)] = one.weights
        yield Packed(ids, weights)


def encoded_documents(stream: Iterator[Document], tokenizer: Tokenizer) -> Iterator[Row]:
    """Rows of an endless stream of documents, encoded in batches."""
    while True:
        yield from encode([next(stream) for _ in range(512)], tokenizer)

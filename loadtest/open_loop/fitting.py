"""Jobs made to fit the context of the model that is asked. Values in, values out, no clock.

A question and the answer that is wanted, with everything before them in the conversation, must fit;
else the end of the question is cut, so that shared beginnings stay shared, until a quarter of what
is free is left for the answer, and the answer is asked for as long as there is room. Where hardly
anything is free, the conversation ends. How many tokens a text has is an estimate, taken high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .jobs import Job, Turn

ANSWER_SHARE = 0.25  # of the free context, kept for an answer that wants as much
LEAST_FREE = 16  # tokens; with less a turn makes no sense
CAREFUL = 1 + 1 / 16  # texts of as many words differ in tokens


class Scale(msgspec.Struct, frozen=True):
    """A server's tokens: so many words to one, and so many that a message has besides its text."""

    words_per_token: float
    frame: int = 0

    def tokens(self, text: str) -> int:
        """Of a message with this text, rather too many."""
        return math.ceil(len(text.split()) / self.words_per_token * CAREFUL) + self.frame

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of a text, so that its message has no more tokens; a word at least."""
        count = math.floor((num_tokens - self.frame) / CAREFUL * self.words_per_token)
        return " ".join(text.split()[: max(1, count)])


class Cut(msgspec.Struct):
    """What was made to fit: counts, and the context in tokens (None: the server does not say)."""

    max_model_len: int | None = None
    cut_prompts: int = 0
    cut_answers: int = 0
    dropped_turns: int = 0

    def says(self, model: str) -> str:
        """In a line; "" where nothing was cut."""
        if not (self.cut_prompts or self.cut_answers or self.dropped_turns):
            return ""
        return (
            f"To fit the {self.max_model_len:,} tokens of {model}: shorter prompts "
            f"{self.cut_prompts}, shorter answers {self.cut_answers}, turns left out "
            f"{self.dropped_turns}."
        )


def fitted(jobs: Sequence[Job], scale: Scale, max_model_len: int | None) -> tuple[list[Job], Cut]:
    """The jobs that fit, and what was cut; ValueError where a system prompt leaves no room."""
    cut = Cut(max_model_len)
    if max_model_len is None:
        return list(jobs), cut
    return [_fitted(job, scale, max_model_len, cut) for job in jobs], cut


def _fitted(job: Job, scale: Scale, max_model_len: int, cut: Cut) -> Job:
    free = max_model_len - (scale.tokens(job.system) if job.system else 0)
    if free < LEAST_FREE + scale.frame:
        raise ValueError(
            f"a system prompt of about {max_model_len - free} tokens leaves no room in the "
            f"model's context of {max_model_len}"
        )
    turns: list[Turn] = []
    for turn in job.turns:
        if free < LEAST_FREE + scale.frame:
            cut.dropped_turns += len(job.turns) - len(turns)
            break
        kept = min(turn.max_tokens, math.ceil(ANSWER_SHARE * free))
        prompt = _shortened(turn.prompt, scale, free - kept)
        free -= _num_tokens(prompt, scale)
        length = max(1, min(turn.max_tokens, free))
        cut.cut_prompts += prompt != turn.prompt
        cut.cut_answers += length < turn.max_tokens
        turns.append(Turn(prompt, length))
        free -= length + scale.frame
    return msgspec.structs.replace(job, turns=tuple(turns))


def _shortened(prompt: str | list[int], scale: Scale, num_tokens: int) -> str | list[int]:
    """The prompt itself, where it fits."""
    if _num_tokens(prompt, scale) <= num_tokens:
        return prompt
    return scale.cut(prompt, num_tokens) if isinstance(prompt, str) else prompt[:num_tokens]


def _num_tokens(prompt: str | list[int], scale: Scale) -> int:
    return scale.tokens(prompt) if isinstance(prompt, str) else len(prompt)

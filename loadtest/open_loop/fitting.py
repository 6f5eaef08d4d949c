"""Cuts jobs to fit the context of the served model. Values in, values out, no clock.

A question and its answer must fit together with the conversation before them. If they do not, the
end of the question is cut (shared prefixes stay shared) until a quarter of the free context is left
for the answer, and the answer is shortened to what is left. With fewer than MIN_FREE tokens free
the conversation ends. A text's number of tokens is estimated, on the high side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .jobs import Job, Turn

ANSWER_SHARE = 0.25  # of the free context, kept for an answer that is at least as long
MIN_FREE = 16  # tokens; with fewer a turn is dropped
CAREFUL = 1 + 1 / 16  # texts of equally many words differ in tokens


class Scale(msgspec.Struct, frozen=True):
    """A server's tokens: words per token, and tokens that a message has besides its text."""

    words_per_token: float
    frame: int = 0

    def tokens(self, text: str) -> int:
        """Estimated tokens of a message with this text, on the high side."""
        return math.ceil(len(text.split()) / self.words_per_token * CAREFUL) + self.frame

    def cut(self, text: str, num_tokens: int) -> str:
        """The longest prefix whose message fits in `num_tokens`; at least one word."""
        count = math.floor((num_tokens - self.frame) / CAREFUL * self.words_per_token)
        return " ".join(text.split()[: max(1, count)])


class Cut(msgspec.Struct):
    """Counts of what was cut, and the context in tokens (None: the server lists none)."""

    max_model_len: int | None = None
    cut_prompts: int = 0
    cut_answers: int = 0
    dropped_turns: int = 0

    def says(self, model: str) -> str:
        """The counts in one line; "" where nothing was cut."""
        if not (self.cut_prompts or self.cut_answers or self.dropped_turns):
            return ""
        return (
            f"To fit the {self.max_model_len:,} tokens of {model}: shorter prompts "
            f"{self.cut_prompts}, shorter answers {self.cut_answers}, turns left out "
            f"{self.dropped_turns}."
        )


def fitted(jobs: Sequence[Job], scale: Scale, max_model_len: int | None) -> tuple[list[Job], Cut]:
    """The jobs cut to fit, and the counts; ValueError where a system prompt leaves no room."""
    cut = Cut(max_model_len)
    if max_model_len is None:
        return list(jobs), cut
    return [_fitted(job, scale, max_model_len, cut) for job in jobs], cut


def _fitted(job: Job, scale: Scale, max_model_len: int, cut: Cut) -> Job:
    free = max_model_len - (scale.tokens(job.system) if job.system else 0)
    if free < MIN_FREE + scale.frame:
        raise ValueError(
            f"a system prompt of about {max_model_len - free} tokens leaves no room in the "
            f"model's context of {max_model_len}"
        )
    turns: list[Turn] = []
    for turn in job.turns:
        if free < MIN_FREE + scale.frame:
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
    """The prompt cut to `num_tokens`, or unchanged where it fits."""
    if _num_tokens(prompt, scale) <= num_tokens:
        return prompt
    return scale.cut(prompt, num_tokens) if isinstance(prompt, str) else prompt[:num_tokens]


def _num_tokens(prompt: str | list[int], scale: Scale) -> int:
    return scale.tokens(prompt) if isinstance(prompt, str) else len(prompt)

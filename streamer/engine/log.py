"""ChoiceLog: tokens, text and log probabilities of one choice, compact and append-only.

Twelve bytes a token besides its text, so that long answers can be kept for late readers; with log
probabilities, many times that. Any token index is a cursor: the text released by each token is
known. Owned by TokenStream.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, cast

import msgspec

from streamer.core.plan import Drawn, Finish, FinishReason, Notice, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.tokenizer.text import TextStream

WRITTEN: Final = 64  # tokens after which their text is written, also where no reader needs it
PROMPT_TOKEN_BYTES = 36  # an int and its place in a tuple
# What CPython keeps of a TokenLogprob, and of each alternative: objects, not numbers.
LOGPROB_BYTES = 160
TOP_BYTES = 120
# Measured with tracemalloc (Python 3.11, 2026-11-22): a choice with its Finish, what matches each
# stop string in it, the stop string itself, and an entry of logit_bias.
CHOICE_BYTES = 850
MATCH_BYTES = 80
STOP_BYTES = 250
BIAS_BYTES = 90


def bytes_of(logprobs: Sequence[TokenLogprob]) -> int:
    """About the bytes of memory of these log probabilities."""
    return sum(LOGPROB_BYTES + TOP_BYTES * len(lp.top) for lp in logprobs)


def bytes_of_params(params: SamplingParams) -> int:
    """About the bytes of memory of the parameters, and of their choices without output."""
    choices = params.n * (CHOICE_BYTES + MATCH_BYTES * len(params.stop))
    stops = sum(STOP_BYTES + 8 * len(text) for text in params.stop)
    ids = BIAS_BYTES * len(params.logit_bias) + PROMPT_TOKEN_BYTES * len(params.stop_token_ids)
    grammar = 0 if params.structured_outputs is None else len(params.structured_outputs.text)
    return choices + stops + ids + grammar


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one choice, several merged where a reader was late.

    start      index of the first token covered, in the choice's output
    text       released by these tokens; may be empty
    logprobs   one a token where requested
    finish     on the last delta of the choice, which may have no tokens
    """

    choice: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None


def deltas_of(items: list[Delta | Notice]) -> list[Delta]:
    """The deltas among a reader's news, in which notices come first."""
    if items and type(items[0]) is Delta:
        return cast("list[Delta]", items)
    return [item for item in items if isinstance(item, Delta)]


class ChoiceLog:
    """See the module. `tokens` holds token ids below 2**31; is_simple: appending one is a push,
    but for `write`, due after each WRITTEN of them.

    Text is written when it is read, or after WRITTEN tokens: a reader that takes each token at once
    gets the token's own text, if that is all that it releases.
    """

    __slots__ = (
        "_ends",
        "_last",
        "_logprob_bytes",
        "_logprobs",
        "_num_shown",
        "_table",
        "_text",
        "_writer",
        "is_simple",
        "tokens",
    )

    def __init__(self, writer: TextStream, has_logprobs: bool) -> None:
        self.tokens = array("i")
        self._writer, self._table = writer, writer.table
        self._text = bytearray()  # UTF-8, whole characters
        self._ends = array("Q")  # bytes of text released up to and with each token
        self._last = ""  # text released by the last token
        self._logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self._logprob_bytes = 0
        self.is_simple = writer.is_plain and not has_logprobs
        # Tokens up to the last one shown, if each not written yet has released its own text alone.
        self._num_shown = 0 if self.is_simple else -1

    @property
    def num_bytes(self) -> int:
        """About the bytes of memory the log occupies."""
        self.write()
        return len(self._text) + 12 * len(self.tokens) + self._logprob_bytes

    @property
    def has_rest(self) -> bool:
        """Whether the end released text that no token had."""
        self.write()
        return len(self._text) > (self._ends[-1] if self._ends else 0)

    def num_shown(self, end: int) -> int:
        """Of the first `end` tokens, those up to the last one that released text."""
        self.write()
        released = self._ends[end - 1] if end else 0
        if end > 1 and self._ends[end - 2] < released:
            return end  # the usual case, without a search
        return bisect_left(self._ends, released, 0, end) + 1 if released else 0

    def push(
        self, token: int, logprob: TokenLogprob | None = None, finish: Finish | None = None
    ) -> None:
        """One more token, with its finish if it is the last."""
        if finish is None and self.is_simple:
            tokens = self.tokens
            tokens.append(token)
            if not len(tokens) % WRITTEN:
                self.write()
            return
        self.write()
        self._num_shown = -1
        self.tokens.append(token)
        if self._logprobs is not None:
            logprob = logprob or TokenLogprob(token, float("nan"))
            self._logprobs.append(logprob)
            self._logprob_bytes += bytes_of((logprob,))
        if finish is None:
            self._release(self._writer.push(token))
            return
        # A token that ended the choice by its id is no part of the text.
        ended_by_id = finish.text_bytes is not None and not isinstance(finish.stop, str)
        self._release(self._writer.finish(finish.text_bytes, None if ended_by_id else token))

    def _release(self, text: str) -> None:
        """The text of the next token that has none."""
        self._text += text.encode()
        self._ends.append(len(self._text))
        self._last = text

    def write(self) -> None:
        """Write the text of the tokens that have none yet."""
        tokens, ends = self.tokens, self._ends
        if len(ends) == len(tokens):
            return
        text, shown = self._text, tokens[len(ends) : max(0, self._num_shown)]
        for piece in self._writer.pass_over(shown):
            text += piece
            ends.append(len(text))
        for token in tokens[len(ends) :]:
            self._release(self._writer.push(token))
        self._num_shown = len(tokens) if self._writer.is_whole else -1

    def restore(self, drawn: Drawn) -> None:
        """Take what the choice drew in an engine before this one, as if it came now.

        An end of the core's own comes with the last token, that of a failed or cancelled choice
        after it.
        """
        finish, is_with_last = drawn.finish, False
        if finish is not None and drawn.tokens:
            is_with_last = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        logprobs, last = drawn.logprobs, len(drawn.tokens) - 1
        for i, token in enumerate(drawn.tokens):
            logprob = logprobs[i] if i < len(logprobs) else None
            self.push(token, logprob, finish if is_with_last and i == last else None)
        if finish is not None and not is_with_last:
            self.end(finish)

    def end(self, finish: Finish) -> None:
        """No more tokens: release what was held back, cut where the core ended it."""
        self.write()
        text = self._writer.finish(finish.text_bytes)
        self._text += text.encode()
        self._last += text

    def split(self, delta: Delta) -> Iterator[Delta]:
        """The delta token by token; text that no token released comes with the finish."""
        self.write()
        first, end = delta.start, delta.start + len(delta.token_ids)
        for i in range(first, end):
            begin = self._ends[i - 1] if i else 0
            text = self._text[begin : self._ends[i]].decode()
            logprobs = None if delta.logprobs is None else (delta.logprobs[i - first],)
            yield Delta(delta.choice, i, (self.tokens[i],), text, logprobs)
        if delta.finish is not None:
            yield Delta(delta.choice, end, (), self.text_from(end), None, delta.finish)

    def text_from(self, start: int) -> str:
        """Text after the first `start` tokens, as far as it is released."""
        self.write()
        begin = self._ends[start - 1] if start else 0
        return self._text[begin:].decode()

    def logprobs_from(self, start: int) -> tuple[TokenLogprob, ...] | None:
        """Those of the tokens from `start` on."""
        return None if self._logprobs is None else tuple(self._logprobs[start:])

    def delta(self, choice: int, start: int, finish: Finish | None) -> Delta:
        """Everything from token `start` on."""
        tokens, end = self.tokens, start + 1
        if end == len(tokens) and self._logprobs is None:  # a reader that is not late
            token = tokens[start]
            if start == self._num_shown:
                try:
                    self._last = text = self._table[token].decode()
                    self._num_shown = end
                    return Delta(choice, start, (token,), text, None, finish)
                except (IndexError, UnicodeDecodeError):
                    pass  # it has no text by itself
            if end != self._num_shown:
                self.write()
            return Delta(choice, start, (token,), self._last, None, finish)
        return Delta(
            choice,
            start,
            tuple(tokens[start:]),
            self.text_from(start),
            self.logprobs_from(start),
            finish,
        )

"""Log probabilities of a completion in the legacy form: parallel lists, of prompt and output.

Pure builders over values of the core; completions.py calls them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from streamer.core.plan import TokenLogprob
from streamer.server.openai.common import LOGPROB_FLOOR, TokenText, show


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities, an entry for each token; a prompt's first token has none.

    text_offset   characters of the choice's text before the token
    top_logprobs  the most probable tokens and the token itself; of tokens that are written alike
                  the more probable one
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def add(
        self, offset: int, token_id: int, logprob: TokenLogprob | None, names: TokenText
    ) -> None:
        """Append a token and its alternatives, as `names` writes them."""
        shown = show(names(token_id))
        self.text_offset.append(offset)
        self.tokens.append(shown)
        if logprob is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        own = max(logprob.logprob, LOGPROB_FLOOR)
        top: dict[str, float] = {}
        for token_id, value in logprob.top:
            top.setdefault(show(names(token_id)), max(value, LOGPROB_FLOOR))
        top.setdefault(shown, own)
        self.token_logprobs.append(own)
        self.top_logprobs.append(top)

    def __add__(self, more: CompletionLogprobs) -> CompletionLogprobs:
        """The lists of both, those of `more` last."""
        return CompletionLogprobs(
            self.text_offset + more.text_offset,
            self.token_logprobs + more.token_logprobs,
            self.tokens + more.tokens,
            self.top_logprobs + more.top_logprobs,
        )


def no_logprobs() -> CompletionLogprobs:
    """Empty lists, to be added to."""
    return CompletionLogprobs([], [], [], [])


class OffsetCounter:
    """Characters before each output token of one choice, for `text_offset`.

    A token that ends inside a character does not move the offset; the one that completes it does.
    """

    def __init__(self, echo: str = "") -> None:
        """`echo`: the text before the output."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = len(echo)

    def build(
        self, logprobs: Sequence[TokenLogprob], text: TokenText, names: TokenText
    ) -> CompletionLogprobs:
        """The legacy form of the next tokens."""
        out = no_logprobs()
        for lp in logprobs:
            raw = text(lp.token_id)
            out.add(self._offset, lp.token_id, lp, names)
            self._offset += len(self._decoder.decode(raw))
        return out


class Echo(msgspec.Struct, frozen=True):
    """A prompt's text, repeated before the answer.

    special  ids of special tokens
    """

    text: str = ""
    special: frozenset[int] = frozenset()


def prompt_logprobs(
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    echo: Echo,
    text: TokenText,
    names: TokenText,
) -> CompletionLogprobs:
    """The legacy form of a prompt, whose tokens after the first have `logprobs`.

    Offsets are into the echo's text, which has special tokens only where they are written in it,
    and not the space that SentencePiece puts before a text. Where a tokenizer changes the text
    (Unicode normal forms) they may be a few characters off.
    """
    decoder, offset, out = codecs.getincrementaldecoder("utf-8")("replace"), 0, no_logprobs()
    for token, logprob in zip(prompt, (None, *logprobs), strict=True):
        raw = text(token)
        out.add(offset, token, logprob, names)
        piece = raw.decode() if token in echo.special else decoder.decode(raw)
        if not echo.text.startswith(piece, offset):
            if token in echo.special:
                piece = ""
            elif offset == 0:
                piece = piece.removeprefix(" ")
        offset = min(offset + len(piece), len(echo.text))
    return out

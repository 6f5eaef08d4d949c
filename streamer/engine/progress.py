"""Progress: how far a request had come in an engine before this one, and the times of its phases.

Frozen values, made by whoever kept them (a journal) and given to AsyncEngine.submit with the
request, which goes on from there: its stream has the tokens, text and numbers that it had.
"""

from __future__ import annotations

import msgspec

from streamer.core.plan import Drawn, TokenLogprob


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one request's phases; None: not reached yet.

    queue_s        from submission until it first ran;  prefill_s from then to the first token
    first_token_s  from submission to the first token
    per_token_s    mean gap between tokens of the whole request after the first
    total_s        from submission to the last finish
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    per_token_s: float | None = None
    total_s: float | None = None

    @classmethod
    def of(
        cls,
        submitted: float,
        started: float | None,
        first: float | None,
        last: float | None,
        ended: float | None,
        num_tokens: int,
    ) -> Timing:
        """From five marks of one clock and the output tokens of all choices."""
        per_token_s = None
        if first is not None and last is not None and num_tokens > 1:
            per_token_s = (last - first) / (num_tokens - 1)
        return cls(
            queue_s=None if started is None else started - submitted,
            prefill_s=None if first is None or started is None else first - started,
            first_token_s=None if first is None else first - submitted,
            per_token_s=per_token_s,
            total_s=None if ended is None else ended - submitted,
        )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's stream held.

    outputs          what each choice drew, one for each; empty ones where nothing was drawn yet
    prompt_logprobs  those of its prompt that had come, if it requested them
    created          unix seconds of its submission
    timing           as far as it is known
    cached_tokens, shared_tokens  as in TokenStream
    """

    outputs: tuple[Drawn, ...]
    created: float
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    timing: Timing = Timing()
    cached_tokens: int = 0
    shared_tokens: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether any choice had a token or an end."""
        return any(drawn.tokens or drawn.finish for drawn in self.outputs)

"""Timing: the seconds of one request's life, from the marks that its stream makes.

Pure; TokenStream makes one whenever it is asked.
"""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one request's life; None: it has not come so far.

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

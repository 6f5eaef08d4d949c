"""apply: turns drawn tokens into output, finishes and notices; alone ends choices by content.

Pure; called by Scheduler.apply with the plans in order. Results of rows that were cancelled or
finished meanwhile are dropped; those of paused, swapped and preempted ones are kept. Stop strings
are matched on bytes, by the tokenizer's token-to-bytes table, for requests that have some only.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from streamer.core.beams.hypotheses import Output, advance_beams, hear
from streamer.core.plan import (
    NOT_FINITE,
    FinishReason,
    Plan,
    StepOutput,
    StepResult,
    TokenLogprob,
)
from streamer.core.request import OUTPUT_COST, Request, Sequence
from streamer.core.running import late
from streamer.core.state import State
from streamer.core.stopping.strings import StopStrings
from streamer.core.verification import settle, take
from streamer.errors import InvariantViolated


def apply_result(state: State, plan: Plan, result: StepResult) -> StepOutput:
    """Append the drawn tokens and finish the choices that end, in one pass over the tokens.

    A choice that ends within its run keeps none of the tokens after that.
    """
    runs = take(state, plan, result) if state.unsettled else []
    prompt_logprobs = prompt_scores(state, result) if result.prompt_logprobs else {}
    if result.candidates:
        hear(state, result.number, result.candidates)
    last = state.last_tokens.pop(result.number, [])
    is_each = bool(runs) or result.number <= state.ended_until
    kept = append_each(state, result) if is_each else append(state, result, last)
    for row, reason in result.failed.items():
        fail_row(state, row, reason, num_drawn=int(row not in result.rows))
    if state.late:
        late.drew(state, result.rows)
    if result.late:
        late.step_back(state, result.late)
    if runs or result.proposals or result.forced or state.forced:
        settle(state, runs, result)
    if state.beams_due:
        kept = kept.and_also(advance_beams(state))
    state.report.drawn(len(kept.tokens))
    finishes, notices = state.report.take()
    return StepOutput(
        number=result.number,
        request_ids=kept.request_ids,
        choices=kept.choices,
        tokens=kept.tokens,
        logprobs=kept.logprobs,
        prompt_logprobs=prompt_logprobs,
        finishes=finishes,
        notices=notices,
        stats=state.stats(),
    )


class Kept(NamedTuple):
    """The tokens that a result appended, as in StepOutput."""

    request_ids: tuple[str, ...]
    choices: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: dict[int, TokenLogprob]

    def and_also(self, settled: Output) -> Kept:
        """These and those that searches over beams have settled."""
        if not settled:
            return self
        ids, choices, tokens, found = zip(*settled, strict=True)
        logprobs = {i: lp for i, lp in enumerate(found, len(self.tokens)) if lp is not None}
        return Kept(
            self.request_ids + ids,
            self.choices + choices,
            self.tokens + tokens,
            self.logprobs | logprobs,
        )


def append(state: State, result: StepResult, last: list[Sequence]) -> Kept:
    """Append one token to each row's sequence, of which none has ended.

    Whether a token ends its sequence is looked at for those alone for which it may.

    last  those for which it is the last that max_tokens allows
    """
    rows, tokens = result.rows, result.tokens
    if len(rows) != len(tokens):
        raise InvariantViolated(f"{len(tokens)} tokens for {len(rows)} rows")
    drawing = state.rows.drawing(rows)
    for share, count in drawing.shares:
        share.time += OUTPUT_COST * count
    deque(map(list.append, drawing.known, tokens), maxlen=0)
    indices = {i for i, harmless in drawing.stops if tokens[i] not in harmless}
    if not drawing.stop_ids.isdisjoint(tokens):
        indices.update(i for i, token in enumerate(tokens) if token in drawing.stop_ids)
    owners = state.rows.owners
    drew_last = [seq for seq in last if not seq.num_pending]  # a row that failed did not
    ending = {owners[rows[i]]: None for i in sorted(indices)} | dict.fromkeys(drew_last)
    for seq in ending:
        if seq is not None and seq.finish_reason is None:
            end_if_due(state, seq, seq.tokens[-1])
    return Kept(drawing.request_ids, drawing.choices, tokens, result.logprobs)


def append_each(state: State, result: StepResult) -> Kept:
    """The same one by one, for rows that draw several tokens, or whose sequences have ended."""
    request_ids: list[str] = []
    choices: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprob] = {}
    owners, drawn_logprobs = state.rows.owners, result.logprobs
    for index, (row, token) in enumerate(zip(result.rows, result.tokens, strict=True)):
        seq = owners[row]
        if seq is None:
            raise InvariantViolated(
                f"plan {result.number} drew a token for row {row}, which no sequence has"
            )
        if seq.finish_reason is not None:
            seq.num_tokens -= 1
            continue
        known, request = seq.tokens, seq.request
        known.append(token)
        if drawn_logprobs and index in drawn_logprobs:
            logprobs[len(tokens)] = drawn_logprobs[index]
        request.share.time += OUTPUT_COST
        request_ids.append(request.request_id)
        choices.append(seq.choice)
        tokens.append(token)
        add = request.add
        if (
            len(known) >= request.num_at_most
            or token in add.stop_ids
            or (add.stop and token not in request.harmless)
        ):
            end_if_due(state, seq, token)
    return Kept(tuple(request_ids), tuple(choices), tuple(tokens), logprobs)


def fail_row(state: State, row: int, reason: str, *, num_drawn: int) -> None:
    """End the request of a row that failed, with num_drawn tokens of it still counted as drawn."""
    seq = state.rows.owners[row]
    if seq is None:
        raise InvariantViolated(f"row {row} failed, but no sequence has it: {reason}")
    seq.num_tokens -= num_drawn
    if seq.finish_reason is not None:
        state.kv.withdraw(seq)
        return
    fail(state, seq.request, reason)


def fail(state: State, request: Request, reason: str) -> None:
    """End a request whose blocks may hold wrong values, and unpublish them."""
    for each in request.live():
        state.kv.withdraw(each)
    state.finish_all(request, FinishReason.FAILED, reason)


def prompt_scores(state: State, result: StepResult) -> dict[str, tuple[TokenLogprob, ...]]:
    """The log probabilities of prompt tokens, by request; a request with a NaN fails."""
    out = {}
    for row, found in result.prompt_logprobs.items():
        seq = state.rows.owners[row]
        if seq is None:
            raise InvariantViolated(
                f"plan {result.number} scored a prompt in row {row}, which no sequence has"
            )
        if seq.finish_reason is not None:
            continue
        if any(math.isnan(lp.logprob) for lp in found):
            fail(state, seq.request, NOT_FINITE)
        else:
            out[seq.request.request_id] = found
            seq.request.num_reported += len(found)
    return out


def end_if_due(state: State, seq: Sequence, token: int) -> None:
    """Finish the choice if its newest token ends it."""
    add = seq.request.add
    num_output = len(seq.tokens) - len(add.prompt)
    may_stop = num_output >= add.params.min_tokens
    if token in add.stop_ids and may_stop:
        state.finish(
            seq,
            FinishReason.STOP,
            text_bytes=state.num_bytes(seq.tokens[len(add.prompt) : -1]),
            stop=token if token in add.params.stop_token_ids else None,
        )
        return
    if add.stop:
        stops, found = StopStrings(add.stop, state.config.token_bytes), None
        if not stops.may_end_in(token):
            if token not in add.stop_ids:
                seq.request.harmless.add(token)
        elif may_stop:
            found = stops.find(seq.tokens, len(add.prompt), len(seq.tokens) - 1, token)
        if found is not None:
            stop = add.params.stop[found.which]
            state.finish(seq, FinishReason.STOP, text_bytes=found.text_bytes, stop=stop)
            return
    if num_output >= seq.request.max_tokens:
        state.finish(seq, FinishReason.LENGTH)

"""Beam search in the scheduler: hypotheses are sequences with rows, and which becomes which.

A step computes each hypothesis' newest token; when the candidates of all are there, and the request
runs, BeamSearch says which go on. A sequence that changes its hypothesis takes the other's tokens
and shares its blocks, which are copied when they are written. Functions over State, called by
results.py; preemption.py forgets candidates of what is recomputed.
"""

from __future__ import annotations

from streamer.core.beams.search import BeamSearch, Ended
from streamer.core.plan import Candidates, Finish, FinishReason, TokenLogprob
from streamer.core.request import OUTPUT_COST, Request, Status
from streamer.core.state import State
from streamer.core.stopping.strings import Stop
from streamer.errors import InvariantViolated

Output = list[tuple[str, int, int, TokenLogprob | None]]  # request, choice, token, its probability


def hear(state: State, number: int, found: dict[int, Candidates]) -> None:
    """Keep the candidates that a plan found, by row."""
    for row, candidates in found.items():
        seq = state.rows.owners[row]
        if seq is None or seq.request.beams is None:
            raise InvariantViolated(
                f"plan {number} has candidates for row {row}, which no hypothesis has"
            )
        seq.is_unsettled = False
        if seq.finish_reason is None and seq.num_computed == len(seq.tokens):
            seq.candidates = candidates  # else its blocks were taken: they will come again
            state.beams_due[seq.request] = None


def advance_beams(state: State) -> Output:
    """Advance every search whose hypotheses have all been computed; the tokens that it settles."""
    output: Output = []
    for request in list(state.beams_due):
        beams = request.beams
        if request.status is not Status.RUNNING or beams is None:
            if request.status is Status.FINISHED:
                del state.beams_due[request]
            continue  # of a request without its rows they wait until it runs again
        del state.beams_due[request]
        candidates = [seq.candidates for seq in request.sequences if seq.candidates is not None]
        if len(candidates) == len(request.sequences):
            output += _advance(state, request, beams, candidates)
    return output


def _advance(
    state: State, request: Request, beams: BeamSearch, candidates: list[Candidates]
) -> Output:
    sequences = request.sequences
    known = [seq.tokens for seq in sequences]
    going_on = beams.advance(known, candidates, state.config.token_bytes)
    request.share.time += OUTPUT_COST * len(sequences)
    n, request_id = request.add.params.n, request.request_id
    if beams.is_done:
        return _end(state, request, beams)
    for place in range(len(sequences), len(going_on)):
        state.requests.open_choice(request, place).row = request.spare_rows.pop(0)
    for place, (parent, _) in enumerate(going_on):
        if parent != place:
            state.kv.adopt(sequences[parent], sequences[place], state.launched)
    for seq, (_, token) in zip(sequences, going_on, strict=True):
        seq.tokens.append(token)
        seq.num_tokens += 1
        seq.candidates = None
    settled = beams.settle([seq.tokens for seq in sequences])
    return [(request_id, choice, *each) for choice in range(n) for each in settled]


def _end(state: State, request: Request, beams: BeamSearch) -> Output:
    """Finish the n choices with the best that ended; the tokens after those settled before."""
    best, done = beams.ended[: request.add.params.n], beams.num_reported
    if not best:
        state.finish_all(request, FinishReason.FAILED, "no hypothesis of the search could end")
        return []
    # with fewer tokens in the vocabulary than choices, the last one answers for those missing
    best += best[-1:] * (request.add.params.n - len(best))
    state.finish_beams(request, [_finish(state, request, i, each) for i, each in enumerate(best)])
    return [
        (request.request_id, choice, *scored)
        for choice, each in enumerate(best)
        for scored in each.scored(done)
    ]


def _finish(state: State, request: Request, choice: int, ended: Ended) -> Finish:
    params, stop, text_bytes = request.add.params, ended.stop, None
    shown: str | int | None = None
    if isinstance(stop, Stop):
        text_bytes, shown = stop.text_bytes, params.stop[stop.which]
    elif stop is not None:
        text_bytes = state.num_bytes(ended.tokens[:-1])
        shown = stop if stop in params.stop_token_ids else None
    return Finish(
        request_id=request.request_id,
        choice=choice,
        reason=FinishReason.LENGTH if stop is None else FinishReason.STOP,
        num_tokens=len(ended.tokens),
        text_bytes=text_bytes,
        stop=shown,
        copied_tokens=request.copied_tokens,
        cumulative_logprob=ended.logprob,
        score=ended.score,
    )

"""Tokens of a step: how many known tokens each sequence computes, and which sequences draw.

Functions over State and the plan being built, called by Scheduler.schedule and by admission.
Decodes come first, then prefill chunks, under one token budget.
"""

from __future__ import annotations

from typing import Final

from streamer.core.plan import Chunk, Facts
from streamer.core.request import Request, Sequence
from streamer.core.sampling import MAX_TOKENS
from streamer.core.state import Draft, State
from streamer.errors import InvariantViolated

# Beside running answers a step computes prompt tokens for about STRETCH times the time of a step
# that only decodes, so that it takes 3 to 4 times as long. `streamer loadtest compare --work stream
# --models small`, 16 clients, five runs in turns (vLLM: three) on 2 cores of an EPYC Zen 5,
# 2026-11-22, medians:
#
#                     gap p99    gap p50    first p50    first p99    tokens/s
#   512 tokens a step   34.9 ms    3.7 ms      80.1 ms      158 ms      3,138
#   paced so            17.8       3.7         41.6         194         3,035
#   vLLM on the CPU     16.1       7.0         161          180         1,813
#
# Predicted: gaps of 3 to 4 decodes (11 to 14 ms), first tokens a tenth later, as many tokens/s.
# The median first token came sooner, since clients no longer start in groups, the last ones later;
# a run ends with the last prompt's answer, 3% later. With 32 requests at once in process nothing
# was lost (3,570 against 3,493 tokens/s, medians of five). What did not help: a longer step where
# many sequences are behind few that decode (gaps of 18.1 ms, first tokens after 77 ms, 2,914
# tokens/s). The model `half`, two runs: gaps of 158 ms (p99) instead of 391, first tokens after 539
# ms instead of 1,070, 313 tokens/s instead of 318, and 341 in process instead of 346. Chunks below
# MIN_PREFILL would shorten a gap little and read all weights for few tokens.
STRETCH: Final = 3
MIN_PREFILL: Final = 128


def continue_running(state: State, done: dict[Sequence, None], draft: Draft) -> None:
    """Decodes first, then prefill chunks.

    done  running sequences that have their part of the plan
    """
    lineup = state.requests.lineup
    if len(lineup) - len(done) > draft.budget:
        lineup.disturb_all()
    draft.last += lineup.decode()
    decoded = lineup.num_steady
    others = [seq for seq in lineup.others if seq not in done]
    behind = decode(state, others, draft.budget - decoded, draft)
    decoded += len(others) - len(behind)
    draft.budget -= decoded
    draft.num_tokens += decoded
    draft.num_samples += decoded
    if draft.num_tokens and state.config.is_paced:
        draft.budget = min(draft.budget, prefill_beside_decodes(state.facts))
    behind.sort(key=lambda s: s.num_tokens - s.num_computed > 1)
    for seq in behind:
        advance(state, seq, draft)


def decode(state: State, seqs: list[Sequence], budget: int, draft: Draft) -> list[Sequence]:
    """Let up to `budget` of them compute their one known token and draw the next in their rows.

    They are steady from then on, up to the token that needs a new block or is the last. Returns the
    others: those that are behind or may not draw.
    """
    kv, size, others = state.kv, state.config.block_size, []
    for seq in seqs:
        request, known = seq.request, seq.num_tokens
        if (
            known - seq.num_computed == 1
            and seq.joined
            and known < request.num_at_most
            and request.beams is None
            and not request.spare_rows
            and seq not in draft.stalled
            and budget > 0
        ):
            budget -= 1
            seq.num_computed = known
            count_draw(seq, draft)
            kv.publish(seq)
            state.requests.lineup.settle(
                seq, len(seq.blocks) * size - known, request.num_at_most - known - 1
            )
        else:
            others.append(seq)
    return others


def count_draw(seq: Sequence, draft: Draft) -> None:
    """The plan draws a token of the sequence."""
    seq.num_tokens += 1
    if seq.num_tokens == seq.request.num_at_most:
        draft.last.append(seq)


def prefill_beside_decodes(facts: Facts) -> int:
    """Tokens of prompts that a step may compute while answers wait for their next token.

    Derived from measured times: a step's duration is a gap in every running answer.
    """
    if not facts.decode_s:
        return MAX_TOKENS
    return max(MIN_PREFILL, int(STRETCH * facts.decode_s / facts.prefill_s))


def advance(state: State, seq: Sequence, draft: Draft) -> None:
    """Schedule what the budget allows of one sequence, which joins a row or sits out if need be."""
    request, is_beam = seq.request, seq.request.beams is not None
    known = seq.num_tokens
    remaining = known - seq.num_computed
    is_done = known - len(request.add.prompt) >= request.max_tokens
    has_room = len(seq.blocks) * state.config.block_size >= known
    is_out = is_done or not has_room or seq in draft.stalled
    count = 0 if is_out else min(remaining, draft.budget)
    start, score = seq.num_computed, 0
    if count and request.is_scoring:
        count, score = scored_part(request, start, count, draft)
    if count == 0:
        if seq.joined:
            draft.idle.append(seq.row)
        return
    if not seq.joined:
        state.join(seq, draft)
    samples = count == remaining
    if remaining > 1 or is_beam:
        # a hypothesis may have become another one, of whose last token the runner does not know
        tokens = tuple(seq.tokens[start:]) if is_beam and remaining == 1 else ()
        draft.chunks.append(Chunk(seq.row, start, count, int(samples), score, tokens))
    draft.starts[seq] = start
    draft.budget -= count
    draft.num_tokens += count
    draft.num_samples += samples
    seq.num_computed += count
    if is_beam:
        seq.is_unsettled = samples
    elif samples:
        count_draw(seq, draft)
    request.charge_prompt(start, seq.num_computed)
    state.kv.publish(seq)
    if samples and request.spare_rows and not is_beam:
        fork_choices(state, seq, draft)
    elif remaining > 1 and (not samples or start > 0):
        state.report.prefilled(request, seq.num_computed, known)


def scored_part(request: Request, start: int, count: int, draft: Draft) -> tuple[int, int]:
    """How many of `count` prompt tokens from `start` this step computes, and how many it scores.

    Tokens scored before a preemption are computed again but not scored again. The prompt's last
    token is not scored: the first output token is drawn from its logits.
    """
    first = max(start, request.num_scored)
    if start + count > len(request.add.prompt):
        count = request.num_to_score - start  # the output of an engine before this one follows
    score = max(0, min(start + count, request.num_to_score) - first)
    if score > draft.to_score:
        score = draft.to_score
        count = first + score - start
    draft.to_score -= score
    request.num_scored += score
    return count, score


def fork_choices(state: State, parent: Sequence, draft: Draft) -> None:
    """The prompt is computed: n - 1 more choices share its blocks and draw from its logits."""
    request = parent.request
    rows, request.spare_rows = request.spare_rows, []
    for choice, row in enumerate(rows, start=1):
        child = state.requests.open_choice(request, choice)
        if not state.kv.fork(parent, child, len(child.tokens)):
            raise InvariantViolated(
                f"request {request.request_id}: fork at {len(child.tokens)} of "
                f"{parent.num_computed} computed tokens"
            )
        child.row = row
        state.join(child, draft, logits_of=parent.row)
        count_draw(child, draft)
        draft.num_samples += 1

"""Verification: rows that compute provisional tokens, and what their runs leave behind.

Functions over State and the plan being built, called by scheduler.py and results.py. Provisional
tokens are what `state.speculation` chooses, and what the runner says must follow (`state.forced`):
verified like the others, and counted as no proposal. A row that verifies is unsettled until its
plan is applied: plans in between leave it idle. It counts one token as computed and one as drawn,
as a decode does; `take` adds what the run confirms, and `settle` gives back the blocks of the rest.
Provisional tokens take blocks that neither the queue's head nor a running row lacks, and preempt no
request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from streamer.core.admission import blocks_needed
from streamer.core.plan import Chunk, Plan, StepResult, accepted
from streamer.core.request import Sequence
from streamer.core.running.late import waiting
from streamer.core.speculation.interface import Speculation
from streamer.core.state import Draft, State
from streamer.errors import InvariantViolated

# ---------------------------------------------------------------- schedule


def speculate(state: State, draft: Draft) -> dict[Sequence, None]:
    """Verify what is proposed for the running sequences.

    Returns those that have their part of the plan: they verify, or sit it out.
    """
    lineup, speculation = state.requests.lineup, state.speculation
    budget = min(draft.budget - len(lineup), draft.to_score)
    looked = speculation.looks(len(lineup), budget, state.facts) if speculation else ()
    late = waiting(state) if state.late else []
    draft.waits = bool(late)
    done = {seq: None for seq in (*state.unsettled, *late) if seq in lineup.others}
    if not looked and not done and not state.forced:
        return done
    found = [seq for seq in looked if seq not in done and may_verify(state, seq, draft)]
    ahead = [seq for seq in found if seq.num_pending]
    if speculation is not None and ahead:
        done |= dict.fromkeys(speculation.wait(ahead, state.facts))
    draft.idle += [seq.row for seq in done if seq.joined]
    sure = [seq for seq in state.forced if seq not in done and may_verify(state, seq, draft)]
    chosen = forced_tokens(state, [seq for seq in sure if not seq.num_pending])
    known = [seq for seq in found if not seq.num_pending and seq not in chosen]
    if speculation is not None and known and budget > 0:
        chosen |= speculation.choose(known, budget, state.facts)
    if chosen and budget > 0:
        if state.queue.head() is not None or any(map(is_behind, lineup.others)):
            budget //= 2  # a prompt need not wait until no row has anything to verify
        done |= dict.fromkeys(verify_chosen(state, chosen, budget, draft))
    for seq in done:
        lineup.disturb(seq)
    return done


def forced_tokens(state: State, known: list[Sequence]) -> dict[Sequence, tuple[int, ...]]:
    """The next tokens of those of the sequences of which they are certain."""
    found = {}
    for seq in known if state.forced else ():
        num_known, tokens = state.forced.get(seq, (0, ()))
        if num_known == len(seq.tokens):
            found[seq] = tokens
    return found


def is_behind(seq: Sequence) -> bool:
    """Whether tokens of a prompt are to be computed."""
    return not seq.joined or seq.num_tokens - seq.num_computed > 1


def may_verify(state: State, seq: Sequence, draft: Draft) -> bool:
    """Whether it would decode in its row, and may draw two tokens or more."""
    request, known = seq.request, seq.num_tokens
    return (
        seq.joined
        and request.beams is None
        and known - seq.num_computed == 1
        and known + 1 - len(request.add.prompt) < request.max_tokens
        and seq not in draft.stalled
        and seq not in state.late
        and not request.spare_rows
    )


def verify_chosen(
    state: State,
    chosen: dict[Sequence, tuple[int, ...]],
    budget: int,
    draft: Draft,
) -> list[Sequence]:
    """Verify as many of the proposed tokens as fit, in their order; returns the sequences."""
    verified: list[Sequence] = []
    spare = spare_blocks(state) - draft.due
    for seq, tokens in chosen.items():
        tokens = tokens[: min(budget, room_for(state, seq, spare))]
        if tokens:
            spare -= verify(state, seq, tokens, draft)
            budget -= len(tokens)
            verified.append(seq)
    return verified


def spare_blocks(state: State) -> int:
    """Free blocks that neither the queue's head nor an admission's watermark lacks."""
    head = state.queue.head()
    needed = blocks_needed(state, head) if head is not None else state.watermark
    return state.kv.device.num_free - needed


def room_for(state: State, seq: Sequence, spare: int) -> int:
    """How many provisional tokens fit into its blocks and the spare ones, and below max_tokens.

    The last token that it may draw needs none after it.
    """
    request, known = seq.request, len(seq.tokens)
    in_blocks = (len(seq.blocks) + max(0, spare)) * state.config.block_size - known
    return min(in_blocks, len(request.add.prompt) + request.max_tokens - known - 1)


def verify(state: State, seq: Sequence, tokens: tuple[int, ...], draft: Draft) -> int:
    """Compute the newest token and these provisional ones; returns the blocks it took."""
    held = len(seq.blocks)
    if not state.kv.allocate(seq, len(seq.tokens) + len(tokens)):
        raise InvariantViolated(
            f"request {seq.request.request_id}: no room for {len(tokens)} provisional tokens"
        )
    run = (seq.tokens[-1], *tokens)
    count = len(run)
    draft.chunks.append(Chunk(seq.row, seq.num_computed, count, num_draws=count, tokens=run))
    draft.budget -= count
    draft.to_score -= len(tokens)
    draft.num_tokens += count
    draft.num_samples += count
    seq.provisional = tokens
    seq.is_forced = forced_tokens(state, [seq]).get(seq, ())[: len(tokens)] == tokens
    state.unsettled[seq] = None
    seq.num_computed += 1
    seq.num_tokens += 1
    state.kv.publish(seq)
    return len(seq.blocks) - held


def plan_drafts(
    state: State, speculation: Speculation, draft: Draft
) -> tuple[tuple[int, int], ...]:
    """Plan.drafts: of the rows that draw in this plan, those the runner proposes tokens for."""
    idle = set(draft.idle)
    drawing = [
        seq
        for seq in state.requests.open_running()
        if seq.joined and seq.num_pending and seq.row not in idle
    ]
    return tuple((seq.row, count) for seq, count in speculation.drafts(drawing, state.facts))


# ---------------------------------------------------------------- apply


class Run(NamedTuple):
    """What a verification drew."""

    seq: Sequence
    tokens: tuple[int, ...]


def take(state: State, plan: Plan, result: StepResult) -> list[Run]:
    """The runs of a plan's verifications, but those that were late; each of their tokens counts as
    drawn from here on.

    The tokens that a run confirms are computed, if the sequence still has the blocks: one that was
    preempted meanwhile computes them again.
    """
    runs: list[Run] = []
    for chunk in plan.chunks:
        if chunk.num_draws < 2:
            continue
        first = bisect_left(result.rows, chunk.row)
        tokens = result.tokens[first : bisect_right(result.rows, chunk.row)]
        seq = state.rows.owners[chunk.row]
        if seq is None:
            raise InvariantViolated(f"plan {plan.number} verified row {chunk.row} of no sequence")
        if chunk.row in result.late:
            seq.provisional, seq.is_forced = (), False
            del state.unsettled[seq]
            continue
        right = accepted(chunk.tokens[1:], tokens)
        is_cut = len(tokens) == right < chunk.num_draws
        if len(tokens) > right + 1 or (is_cut and chunk.row not in result.failed):
            raise InvariantViolated(
                f"plan {plan.number}: row {chunk.row} was to verify {chunk.tokens[1:]}, and its "
                f"run is {tokens}"
            )
        runs.append(Run(seq, tokens))
        if not seq.is_forced:
            seq.num_proposed += len(seq.provisional)
        if tokens:
            if not seq.is_forced:
                seq.num_accepted += len(tokens) - 1
                seq.run_end = len(seq.tokens) + len(tokens)
            seq.num_tokens += len(tokens) - 1
            if seq.blocks:
                seq.num_computed += len(tokens) - 1
    return runs


def settle(state: State, runs: list[Run], result: StepResult) -> None:
    """After the tokens are known: give back blocks, and report to the speculation."""
    owners, speculation = state.rows.owners, state.speculation
    for seq, tokens in runs:
        num_proposed, num_accepted = len(seq.provisional), max(0, len(tokens) - 1)
        seq.provisional = ()
        del state.unsettled[seq]
        if seq.blocks:
            state.kv.truncate(seq, state.collected)
        if seq.is_forced:
            seq.is_forced = False
            continue
        state.report.verified(num_proposed, num_accepted)
        if seq.joined and speculation is not None:
            speculation.observe(seq, num_proposed, num_accepted)
    for row, proposal in result.proposals.items():
        owner = owners[row]
        if owner is not None and owner.joined and speculation is not None:
            speculation.proposed(owner, proposal)
    state.forced = {
        owner: (len(owner.tokens), tokens)
        for row, tokens in result.forced.items()
        if (owner := owners[row]) is not None and owner.joined
    }

"""The frozen values that cross every boundary between loop, scheduler and runner.

Commands and Facts go into the scheduler, a Plan comes out; the runner turns it into a StepResult;
`apply` turns that into a StepOutput for the loop. Nothing here has a torch type, or behaviour but
two rules that scheduler and runners share. `accepted` says how far drawn tokens confirm provisional
ones. `check_moves` is called by every runner before it copies anything, so that a scheduler's
mistake ends the engine before one request reads another's KV.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import Final, Literal, NamedTuple

import msgspec

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest, InvariantViolated


class FinishReason(enum.Enum):
    """Why a choice ended; the server has names of its own for clients."""

    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    FAILED = "failed"  # its row failed (NaN), neighbours go on


# ---------------------------------------------------------------- commands: loop -> scheduler


class Drawn(msgspec.Struct, frozen=True):
    """What one choice of a request drew before its engine was lost.

    tokens    its output so far
    logprobs  one a token where they were requested; for its readers, the scheduler needs none
    finish    how it ended; None: it goes on
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """What stands in an answer before its own text, with which a grammar begins.

    stage    where the prompt ends: before the reasoning, which is then optional, inside or after it
    opens    the text that begins it
    ends     texts, after any of which the answer's own text begins
    closing  tokens that end it: they come at params.thinking_token_budget, whatever is drawn
    """

    stage: Literal["before", "inside", "after"]
    opens: str
    ends: tuple[str, ...]
    closing: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("opens", "ends", "closing"):
            if not getattr(self, name) or "" in self.ends:
                raise InvalidRequest(f"reasoning.{name} is empty", param=f"reasoning.{name}")


class Add(msgspec.Struct, frozen=True, tag=True):
    """A request. `params.seed` and `params.max_tokens` are set (the engine fills them).

    prompt        token ids, at least one
    stop_ids      tokens that end a choice: the model's end tokens (unless ignore_eos) and
                  stop_token_ids
    stop          stop strings as bytes
    block_hashes  chained hashes of the prompt's full blocks (core.blocks), may be empty
    salt          the tenant's salt for blocks that fill later
    priority      lower runs first
    tenant        its owner; requests of one priority share fairly between tenants
    share_with    fork: begin from this request's blocks as far as the tokens agree
    queue_position  requests before it in the queue, as sent to its reader; None: not sent
    prediction    text that the output is expected to repeat, as token ids
    outputs       what each choice drew in an engine before this one; empty: the request is new. It
                  comes back as if it had been preempted, its tokens to be computed again. A beam
                  search begins anew, and reports no token that the first choice has here
    num_scored    prompt tokens whose log probabilities were reported there
    reasoning     what may stand before the answer's own text; None: nothing
    is_probe      it runs alone, before all others: a step that fails shows that none succeeds
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[bytes, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    salt: bytes = b""
    priority: int = 0
    tenant: str = ""
    share_with: str | None = None
    queue_position: int | None = None
    prediction: tuple[int, ...] = ()
    outputs: tuple[Drawn, ...] = ()
    num_scored: int = 0
    reasoning: Reasoning | None = None
    is_probe: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End the request wherever it is; unknown or finished ids are ignored."""

    request_id: str


class Pause(msgspec.Struct, frozen=True, tag=True):
    """The reader is behind: the request gives up its rows, and its blocks if others need them."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """The request's reader caught up."""

    request_id: str


Command = Add | Cancel | Pause | Resume


class Facts(msgspec.Struct, frozen=True):
    """What the runner measured, passed before each schedule to a core without a clock.

    copies_done        every plan up to this number has all its swap copies complete
    prefill_s          seconds a prefilled token takes, in steps that are mostly prefill
    decode_s           seconds of a step that only decodes; 0: none was seen yet
    step_s             (tokens, seconds): what a step without prompt chunks takes, by the number of
                       tokens it computes, ascending; running means of measured steps: on a CPU from
                       the beginning of one to that of the next but for drafting, on a GPU the
                       device's time
    verify_s           the same of steps in which a row verifies provisional tokens
    verified_s, num_verified  seconds that these have taken so far, and how many they were
    draft_s            seconds a draft model takes for one token of all rows that it drafts for; 0:
                       there is none, or none was seen yet
    drafting_s         seconds that a draft model has taken so far
    swap_bytes_per_s   measured host-device bandwidth
    swap_fixed_s       fixed cost of a swap, one way
    swap_s             seconds that swap copies have taken so far, both ways
    late               rows that drew nothing for the lack of a mask, which is being filled: they
                       sit out until it is there
    """

    copies_done: int = 0
    prefill_s: float = 1e-4
    decode_s: float = 0.0
    step_s: tuple[tuple[int, float], ...] = ()
    verify_s: tuple[tuple[int, float], ...] = ()
    verified_s: float = 0.0
    num_verified: int = 0
    draft_s: float = 0.0
    drafting_s: float = 0.0
    swap_bytes_per_s: float = 1e10
    swap_fixed_s: float = 1e-4
    swap_s: float = 0.0
    late: tuple[int, ...] = ()


# ---------------------------------------------------------------- plan: scheduler -> runner


class RowJoin(msgspec.Struct, frozen=True):
    """A sequence takes a row; it stays there until a plan's `leaves` names the row.

    tokens        all known tokens, prompt and output so far
    num_prompt    how many of them are the prompt
    num_computed  how many have their KV in `blocks` already
    blocks        its block table
    choice        index among the request's n choices; part of the noise's counter
    stop_ids      masked until there are params.min_tokens output tokens
    logits_of     >= 0: this row computes nothing in this plan and draws its first token from the
                  logits of that row, which ends its prompt in this plan (a fork of one prefill)
    reasoning     what may stand before the answer's own text; None: nothing
    """

    row: int
    request_id: str
    choice: int
    tokens: tuple[int, ...]
    num_prompt: int
    num_computed: int
    blocks: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    logits_of: int = -1
    reasoning: Reasoning | None = None


class TableUpdate(msgspec.Struct, frozen=True):
    """The row's block table goes on with `blocks` from logical block `start` on, and ends there."""

    row: int
    start: int
    blocks: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True):
    """A row that does not simply decode one token in this plan.

    It computes `count` tokens from position `start` and draws a token from the logits of each of
    the last `num_draws`. Each of the last `score` of these tokens (not counting those it draws
    from) gives the log probability of the prompt token after it.

    tokens  what it computes. Empty: the row's known tokens. A verification is the last known
            token and the provisional ones after it, with a draw from each: the run that the row
            reports goes up to the first drawn token that is not the next provisional one.
    """

    row: int
    start: int
    count: int
    num_draws: int
    score: int = 0
    tokens: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """One step, as a difference to the rows the runner already holds.

    Order of effects: leaves, joins, tables; then swap_out, copies, swap_in; then the forward. A
    row that is in neither `chunks` nor `idle`, nor joined with `logits_of`, decodes: it computes
    its one known token that is not computed yet (the one it drew last) and draws the next. All K
    and V of a plan are stored, layer by layer, before any attention of that layer reads: a row may
    read blocks that another row fills in the same plan. The copies of a plan run in any order and
    beside its swaps, so none writes a block that another reads or writes (check_moves).

    idle      rows that compute nothing in this plan
    drafts    (row, number of tokens): rows whose next tokens the runner proposes itself
    copies    (source, destination) device blocks, copy-on-write
    swap_out  (device, host) blocks;  swap_in  (host, device) blocks
    num_rows, num_tokens, num_samples  resident rows, tokens computed, draws: sums the runner checks
              its own rows against
    """

    number: int
    leaves: tuple[int, ...] = ()
    joins: tuple[RowJoin, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    idle: tuple[int, ...] = ()
    drafts: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    num_rows: int = 0
    num_tokens: int = 0
    num_samples: int = 0


def accepted(provisional: Seq[int], drawn: Seq[int]) -> int:
    """How many provisional tokens the drawn ones confirm: those before the first that differs.

    The drawn token after them counts as well: it depends on confirmed tokens alone.
    """
    for i, (token, found) in enumerate(zip(provisional, drawn, strict=False)):
        if token != found:
            return i
    return min(len(provisional), len(drawn))


def check_moves(plan: Plan, num_blocks: int, num_host_blocks: int) -> None:
    """Raise InvariantViolated for a block beyond its pool, or one copied into beside another copy.

    A plan's copies run in any order and beside its swaps: none may write what another reads or
    writes.
    """
    for name, pairs, sources, destinations in (
        ("swap_out", plan.swap_out, num_blocks, num_host_blocks),
        ("copies", plan.copies, num_blocks, num_blocks),
        ("swap_in", plan.swap_in, num_host_blocks, num_blocks),
    ):
        for source, destination in pairs:
            if not (0 <= source < sources and 0 <= destination < destinations):
                raise InvariantViolated(
                    f"plan {plan.number}: {name} {source} to {destination} is beyond the pools "
                    f"of {sources} and {destinations} blocks"
                )
    for name, outgoing, incoming in (
        ("device", (*plan.copies, *plan.swap_out), (*plan.copies, *plan.swap_in)),
        ("host", plan.swap_in, plan.swap_out),
    ):
        read, written = {pair[0] for pair in outgoing}, {pair[1] for pair in incoming}
        if len(written) < len(incoming) or read & written:
            raise InvariantViolated(
                f"plan {plan.number} copies into a block of the {name} beside another copy of it: "
                f"copies {plan.copies}, swap_out {plan.swap_out}, swap_in {plan.swap_in}"
            )


# ---------------------------------------------------------------- result: runner -> scheduler


class TokenLogprob(msgspec.Struct, frozen=True):
    """A drawn or prompt token's log probability and the best alternatives, best first.

    Of the model's distribution before penalties and bias, after which it would mislead; like
    vLLM's default `raw_logprobs`.

    hidden  the model's last hidden state, from which the token was drawn, as float32; if requested
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    hidden: bytes = b""


NOT_FINITE = "the model's logits are not finite"
OUT_OF_MEMORY = "there is no memory for the request's step, however small"
STEP_FAILED = "the request's step fails each time, also when it runs alone"


class Candidates(NamedTuple):
    """A hypothesis' best next tokens, best first, and their log probabilities."""

    tokens: Seq[int]
    logprobs: Seq[float]


class StepResult(msgspec.Struct, frozen=True):
    """What a plan drew: `rows` ascending, `tokens` parallel to it.

    A row is in `rows` once for each token of its run, in order of position: one, or up to as many
    as its chunk draws (`accepted`).

    logprobs  index into `tokens` -> TokenLogprob, for rows that asked
    failed    row -> why, for rows that drew fewer tokens than they should have; those that they
              drew before count
    prompt_logprobs  row -> one for each of Chunk.score, in order
    proposals  row of Plan.drafts -> the tokens that the runner proposes after its newest one
    forced  row -> the tokens that a grammar allows alone after its newest one
    candidates  row of a beam, which draws nothing -> the best next tokens
    late  rows that were to draw and did not, as their masks were not there in time: each is to
          compute its last token again, and to draw then
    """

    number: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprob] = {}
    failed: dict[int, str] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    proposals: dict[int, tuple[int, ...]] = {}
    forced: dict[int, tuple[int, ...]] = {}
    candidates: dict[int, Candidates] = {}
    late: tuple[int, ...] = ()


# ---------------------------------------------------------------- output: scheduler -> loop


# How the detail of a choice begins that FAILED by its own grammar: the caller's, no fault here.
GAVE_UP: Final = "the answer can't follow "


class Finish(msgspec.Struct, frozen=True):
    """The end of one choice, final. A cancelled or failed request has one for every open choice.

    num_tokens   output tokens kept
    copied_tokens   tokens whose KV the whole request has copied so far, out of shared blocks
    text_bytes   the text ends at this byte of the output's bytes; None: where the tokens end
    stop         the stop string or id that matched
    detail       why it FAILED; why it was CANCELLED, where the engine did that
    proposed_tokens, accepted_tokens   provisional tokens verified, and those of them that are
                 output tokens
    cumulative_logprob  of a beam search: the log probability of all its tokens together
    score        of a beam search: what it was chosen by, cumulative_logprob / its tokens, end token
                 included, ** length_penalty
    """

    request_id: str
    choice: int
    reason: FinishReason
    num_tokens: int
    text_bytes: int | None = None
    stop: str | int | None = None
    detail: str | None = None
    copied_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    cumulative_logprob: float | None = None
    score: float | None = None


class NoticeKind(enum.Enum):
    """What happens to a request while nothing streams."""

    WAITING = "waiting"  # position: requests before it in the queue
    RUNNING = "running"  # done: tokens already computed (cached, shared), total: known tokens
    PREFILL = "prefill"  # done of total prompt tokens
    PREEMPTED = "preempted"  # how: "swap" or "recompute"
    PAUSED = "paused"


class Notice(msgspec.Struct, frozen=True):
    """A change of a request's state, for the page and the extension events.

    age_s  of RUNNING: seconds from the planning of the step to the notice, which comes with the
           step's output; 0 from the scheduler, which has no clock
    """

    request_id: str
    kind: NoticeKind
    done: int = 0
    total: int = 0
    how: str = ""
    position: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    age_s: float = 0.0


class StepStats(msgspec.Struct, frozen=True):
    """Counts after a step: requests by status, blocks by state, and running totals.

    blocks_cached, host_blocks_cached  free ones whose content can still be matched
    swap_s                             seconds of swap copies
    proposed_tokens, accepted_tokens   provisional tokens verified, and those that were drawn
    proposed_at, accepted_at           the same by position in the run, the first one first
    verifications                      runs that verified any
    rebuilds                           times that all was computed again after a step failed
    """

    waiting: int = 0
    running: int = 0
    paused: int = 0
    preempted: int = 0
    swapped: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    host_blocks_total: int = 0
    host_blocks_free: int = 0
    host_blocks_cached: int = 0
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_blocks: int = 0
    swap_s: float = 0.0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    verifications: int = 0
    rebuilds: int = 0


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of one iteration of the engine's thread; zero from the scheduler, which has no clock.

    With plans ahead, `schedule` and `launch` are a later plan's than `collect` and `apply`.
    """

    schedule_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    apply_s: float = 0.0


class StepOutput(msgspec.Struct, frozen=True):
    """A step's results, as parallel arrays: token i belongs to request_ids[i], choices[i].

    logprobs  index into the arrays -> TokenLogprob
    prompt_logprobs  request -> those of its prompt's next tokens; the last come before, or with,
              its first output token
    """

    number: int
    request_ids: tuple[str, ...] = ()
    choices: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprob] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
    finishes: tuple[Finish, ...] = ()
    notices: tuple[Notice, ...] = ()
    stats: StepStats = StepStats()
    times: StepTimes = StepTimes()

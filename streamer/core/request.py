"""A request's life: Status, transition table, Sequence, Share, Request.

Requests move as a whole (their n sequences wait, run, swap and return together), by
`Requests.move` alone (running/requests.py). Owned by State on the GPU thread; no other room sees
these objects.
"""

from __future__ import annotations

import enum
from typing import Final

from streamer.core.beams.search import BeamSearch
from streamer.core.plan import Add, Candidates, Drawn, FinishReason
from streamer.errors import InvariantViolated


class Status(enum.Enum):
    """Where a request is. Prefill and decode are both RUNNING: catching up with known tokens."""

    WAITING = "waiting"  # new, holds nothing
    RUNNING = "running"  # holds rows and device blocks
    PAUSED = "paused"  # holds device blocks, no rows: its reader is behind
    PREEMPTED = "preempted"  # holds nothing, will be recomputed
    SWAPPING_OUT = "swapping_out"  # host blocks are being written
    SWAPPED = "swapped"  # holds host blocks
    SWAPPING_IN = "swapping_in"  # device blocks are being written; rows are reserved
    FINISHED = "finished"


class Event(enum.Enum):
    """An event in TRANSITIONS."""

    ADMIT = "admit"
    PAUSE = "pause"
    DROP = "drop"  # preempted, to be recomputed
    SWAP_OUT = "swap_out"
    SWAPPED_OUT = "swapped_out"
    SWAP_IN = "swap_in"
    SWAPPED_IN = "swapped_in"
    FINISH = "finish"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.DROP): Status.PREEMPTED,  # it ran in an engine before this one
    (Status.PREEMPTED, Event.ADMIT): Status.RUNNING,
    (Status.PAUSED, Event.ADMIT): Status.RUNNING,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.DROP): Status.PREEMPTED,
    (Status.PAUSED, Event.DROP): Status.PREEMPTED,
    # what was computed is lost, on the host as well
    (Status.SWAPPING_OUT, Event.DROP): Status.PREEMPTED,
    (Status.SWAPPED, Event.DROP): Status.PREEMPTED,
    (Status.SWAPPING_IN, Event.DROP): Status.PREEMPTED,
    (Status.RUNNING, Event.SWAP_OUT): Status.SWAPPING_OUT,
    (Status.PAUSED, Event.SWAP_OUT): Status.SWAPPING_OUT,
    (Status.SWAPPING_OUT, Event.SWAPPED_OUT): Status.SWAPPED,
    (Status.SWAPPED, Event.SWAP_IN): Status.SWAPPING_IN,
    (Status.SWAPPING_IN, Event.SWAPPED_IN): Status.RUNNING,
    **{(s, Event.FINISH): Status.FINISHED for s in Status if s is not Status.FINISHED},
}


MAY_BE_ADMITTED = frozenset((Status.WAITING, Status.PREEMPTED, Status.SWAPPED, Status.PAUSED))


class Clock:
    """A number that the counters of sequences are relative to."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


STILL: Final = Clock()  # of all sequences that are not steady


class Sequence:
    """One choice, or a hypothesis of a beam search: its tokens and how many of them are computed.

    num_computed  tokens whose KV is (or will be, by launched plans) in `blocks`
    num_tokens    known tokens, and those drawn by launched plans that `apply` has not seen yet
    clock         what these two are relative to: the lineup's while it is steady
    steady_until  that clock's time of the first plan in which it is not steady; 0: it is not
    found         while it holds no blocks: its published prefix, as last matched
    provisional   tokens that a launched plan verifies; its result, not applied yet, settles them
    is_forced     its provisional tokens are certain, and no proposal
    num_proposed, num_accepted  provisional tokens verified so far, and those of them drawn
    run_end       known tokens after its latest run, if it keeps all of that
    candidates    of a hypothesis, all its tokens computed: the best next tokens, until all others
                  of its search have theirs
    is_unsettled  of a hypothesis: a launched plan finds its candidates
    """

    __slots__ = (
        "_num_computed",
        "_num_tokens",
        "blocks",
        "candidates",
        "choice",
        "clock",
        "finish_reason",
        "found",
        "hashes",
        "host_blocks",
        "is_forced",
        "is_unsettled",
        "joined",
        "num_accepted",
        "num_proposed",
        "num_published",
        "provisional",
        "request",
        "row",
        "run_end",
        "shares_tail",
        "steady_until",
        "tokens",
    )

    def __init__(self, request: Request, choice: int, tokens: list[int]) -> None:
        self.request = request
        self.choice = choice
        self.tokens = tokens
        self.clock: Clock = STILL
        self.steady_until = 0
        self.num_computed = 0
        self.num_tokens = len(tokens)
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.found: list[int] = []
        self.num_published = 0
        self.row = -1
        self.joined = False  # the runner knows the row
        self.shares_tail = False  # the block it writes next may be in other tables
        self.candidates: Candidates | None = None
        self.is_unsettled = False
        self.finish_reason: FinishReason | None = None
        self.provisional: tuple[int, ...] = ()
        self.is_forced = False  # these are what must follow
        self.num_proposed = 0
        self.num_accepted = 0
        self.run_end = 0

    @property
    def num_computed(self) -> int:
        return self._num_computed + self.clock.now

    @num_computed.setter
    def num_computed(self, number: int) -> None:
        self._num_computed = number - self.clock.now

    @property
    def num_tokens(self) -> int:
        return self._num_tokens + self.clock.now

    @num_tokens.setter
    def num_tokens(self, number: int) -> None:
        self._num_tokens = number - self.clock.now

    @property
    def num_pending(self) -> int:
        """Drawn tokens that are not known yet."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - len(self.request.add.prompt)

    @property
    def num_kept_accepted(self) -> int:
        """Accepted tokens among those kept; the last token of a run was not proposed."""
        return self.num_accepted - max(0, self.run_end - len(self.tokens) - 1)


# The paper's factors, and about the ratio of providers' prices: a prompt's tokens share one pass
# over the model's weights, each output token takes a row in a separate pass.
PROMPT_COST: Final = 1
OUTPUT_COST: Final = 2


class Share:
    """One tenant at one priority.

    time      virtual time: its service so far, in weighted tokens
    waiting   its new requests that may be admitted, by arrival
    num_live  its requests that have not ended
    """

    __slots__ = ("num_live", "time", "waiting")

    def __init__(self) -> None:
        self.time = 0
        self.waiting: list[Request] = []
        self.num_live = 0


class Request:
    """One request and its sequences; `sequences` grows from one to n when the prefill ends.

    beams  its search, whose hypotheses are the sequences; None: it draws
    """

    __slots__ = (
        "add",
        "arrival",
        "beams",
        "copied_tokens",
        "evictions",
        "harmless",
        "is_held",
        "last_swap",
        "max_tokens",
        "num_at_most",
        "num_charged",
        "num_reported",
        "num_scored",
        "num_to_score",
        "preemptions",
        "queue_position",
        "request_id",
        "sequences",
        "share",
        "spare_rows",
        "status",
    )

    def __init__(self, add: Add, arrival: int, max_tokens: int) -> None:
        self.add = add
        self.request_id = add.request_id
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.num_at_most = len(add.prompt) + max_tokens  # tokens of each choice, prompt included
        self.harmless: set[int] = set()  # drawn tokens within which no stop string can end
        self.status = Status.WAITING
        self.is_held = False  # paused by its reader, whatever its status
        self.share = Share()  # its tenant's account; FairQueue.open sets the shared one
        self.num_charged = 0  # prompt tokens its tenant has paid for
        # Prompt tokens from whose logits the next one's log probability is, or will be, taken.
        self.num_to_score = 0 if add.params.prompt_logprobs is None else len(add.prompt) - 1
        self.num_scored = add.num_scored
        self.num_reported = add.num_scored  # of them those whose results came
        self.copied_tokens = 0  # in shared blocks copied before a write, over all choices
        self.evictions = 0  # preemptions while it ran; MAX_PREEMPTIONS exempt it
        self.preemptions = 0  # all of them, while it was paused too
        self.last_swap = 0  # plan that carries its latest swap copies
        self.queue_position = add.queue_position  # as last sent to its reader; None: not sent
        self.spare_rows: list[int] = []  # reserved for choices that are not forked yet
        self.sequences: list[Sequence] = [Sequence(self, 0, list(add.prompt))]
        self.beams: BeamSearch | None = None
        if add.params.use_beam_search:
            self.beams = BeamSearch(
                add.params,
                num_prompt=len(add.prompt),
                max_tokens=max_tokens,
                stop_ids=add.stop_ids,
                num_reported=len(add.outputs[0].tokens) if add.outputs else 0,
            )
        elif any(drawn.tokens or drawn.finish for drawn in add.outputs):
            self.num_charged = len(add.prompt)
            self.sequences = [self._restored(i, drawn) for i, drawn in enumerate(add.outputs)]

    def _restored(self, choice: int, drawn: Drawn) -> Sequence:
        seq = Sequence(self, choice, [*self.add.prompt, *drawn.tokens])
        if drawn.finish is not None:
            seq.finish_reason = drawn.finish.reason
        return seq

    @property
    def num_rows(self) -> int:
        """Rows that it takes: those of choices and hypotheses to come as well."""
        if self.beams is not None:
            return self.beams.width
        return self.add.params.n if len(self.sequences) == 1 else len(self.live())

    @property
    def has_begun(self) -> bool:
        """Whether it drew tokens in an engine before this one."""
        return any(s.num_output or s.finish_reason for s in self.sequences)

    @property
    def is_new(self) -> bool:
        """Whether it has never run."""
        return self.status is Status.WAITING

    def charge_prompt(self, start: int, end: int) -> None:
        """Charge the tenant for computed tokens from `start` to `end`: the prompt's only, once."""
        start, end = max(start, self.num_charged), min(end, len(self.add.prompt))
        if start < end:
            self.share.time += PROMPT_COST * (end - start)
            self.num_charged = end

    @property
    def is_scoring(self) -> bool:
        """Whether log probabilities of its prompt are still to be computed."""
        return self.num_scored < self.num_to_score

    def live(self) -> list[Sequence]:
        """Sequences that have not finished."""
        return [s for s in self.sequences if s.finish_reason is None]

    def move(self, event: Event) -> None:
        """Move by TRANSITIONS, or raise InvariantViolated with id, status and event."""
        to = TRANSITIONS.get((self.status, event))
        if to is None:
            raise InvariantViolated(
                f"request {self.request_id}: {event.value} is illegal in {self.status.value}"
            )
        self.status = to

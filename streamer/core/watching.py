"""Recorder and look: what Scheduler.snapshot hands out, read from State.

A Recorder notes each step while somebody follows; without one a step pays one test of an attribute.
Called by the scheduler alone; nothing here changes what it decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from streamer.core.plan import NoticeKind, StepOutput
from streamer.core.request import Request, Sequence
from streamer.core.state import Draft, State
from streamer.core.view import (
    MAX_ENTRIES,
    MAX_LISTED,
    MAX_TABLE_BLOCKS,
    RequestView,
    SchedulerView,
    SequenceView,
    StepView,
    Wanted,
    pack_table,
    pool_view,
)


class Recorder:
    """Steps from their plan to their result; full after so many, until they are taken.

    owner_of  number of each request in the records -> its salt
    """

    def __init__(self) -> None:
        self.owner_of: dict[int, bytes] = {}
        self._room = 0  # steps that may still be recorded
        self._entries = 0
        self._numbers: dict[str, int] = {}
        self._planned: deque[StepView] = deque()
        self._applied: list[StepView] = []

    def planned(self, draft: Draft, state: State, num_copied: int) -> None:
        """A plan is made: who computes how much in it."""
        if not self._room or self._entries >= MAX_ENTRIES:
            return
        self._room -= 1
        # of rows that do not simply decode: the tokens they compute
        counts = {c.row: c.count for c in draft.chunks}
        counts |= {j.row: 0 for j in draft.joins if j.logits_of >= 0}
        prefilled: list[tuple[int, int]] = []
        decoded: list[int] = []
        for request in state.running:
            for seq in request.sequences:
                if not seq.joined:
                    continue
                count = counts.get(seq.row)
                if count is None:
                    decoded.append(request.arrival)
                elif count:
                    prefilled.append((request.arrival, count))
                else:
                    continue
                self._name(request)
        self._entries += len(prefilled) + len(decoded)
        self._planned.append(
            StepView(
                number=draft.number,
                tokens=draft.num_tokens,
                prefilled=tuple(prefilled),
                decoded=tuple(decoded),
                swapped_out=len(draft.swap_out),
                swapped_in=len(draft.swap_in),
                copied=num_copied,
            )
        )

    def applied(self, output: StepOutput, state: State) -> None:
        """A plan's result is known: what happened besides, as the loop is told with it."""
        while self._planned and self._planned[0].number < output.number:
            self._planned.popleft()
        if not self._planned or self._planned[0].number != output.number:
            return
        news: dict[NoticeKind, list[tuple[int, str]]] = {kind: [] for kind in NoticeKind}
        for notice in output.notices:
            number = self._number_of(notice.request_id, state)
            if number is not None:
                news[notice.kind].append((number, notice.how))
        finished = [
            (number, f.reason.value)
            for f in output.finishes
            if (number := self._number_of(f.request_id, state)) is not None
        ]
        self._entries += len(output.notices) + len(finished)
        self._applied.append(
            msgspec.structs.replace(
                self._planned.popleft(),
                admitted=tuple(n for n, _ in news[NoticeKind.RUNNING]),
                paused=tuple(n for n, _ in news[NoticeKind.PAUSED]),
                preempted=tuple(news[NoticeKind.PREEMPTED]),
                finished=tuple(finished),
            )
        )

    def take(self, num_steps: int) -> tuple[tuple[StepView, ...], dict[int, bytes]]:
        """What was recorded, with its owners; `num_steps` more may follow."""
        steps, owners = tuple(self._applied), self.owner_of
        pending = {n for s in self._planned for n in (*s.decoded, *(n for n, _ in s.prefilled))}
        self._applied = []
        self.owner_of = {n: salt for n, salt in owners.items() if n in pending}
        self._numbers = {i: n for i, n in self._numbers.items() if n in pending}
        self._room, self._entries = num_steps, 0
        return steps, owners

    def _name(self, request: Request) -> None:
        if request.arrival not in self.owner_of:
            self.owner_of[request.arrival] = request.add.salt
            self._numbers[request.request_id] = request.arrival

    def _number_of(self, request_id: str, state: State) -> int | None:
        """Its number; None if it came and went without a step that was recorded."""
        request = state.requests.get(request_id)
        if request is not None:
            self._name(request)
        return self._numbers.get(request_id)


def look(
    state: State, wanted: Wanted, steps: tuple[StepView, ...], owner_of: dict[int, bytes]
) -> SchedulerView:
    """The scheduler now, with the steps that were recorded and the owners of their requests."""
    positions = {request: i for i, request in enumerate(state.queue.in_order())}
    listed: list[RequestView] = []
    unlisted: Counter[str] = Counter()
    budgets = {owner: [MAX_LISTED, MAX_TABLE_BLOCKS] for owner in wanted.owners}
    for request in _in_order(state):
        owner = next((o for o in wanted.owners if request.add.salt.startswith(o)), None)
        budget = budgets[owner] if owner is not None else None
        if budget is None or not budget[0]:
            unlisted[request.status.value] += 1
            continue
        budget[0] -= 1
        owner_of[request.arrival] = request.add.salt
        listed.append(_request_view(request, positions.get(request), budget))
    return SchedulerView(
        step=state.launched,
        stats=state.stats(),
        block_size=state.config.block_size,
        device=pool_view(state.kv.device.states()),
        host=pool_view(state.kv.host.states()),
        requests=tuple(listed),
        unlisted=dict(unlisted),
        steps=steps,
        owner_of=owner_of,
    )


def _in_order(state: State) -> Iterator[Request]:
    """Every live request: who holds blocks first, then the queue, then who is held outside it."""
    first = [*state.running, *state.paused, *state.swapping, *state.queue.in_order()]
    yield from dict.fromkeys((*first, *state.requests.values()))


def _request_view(request: Request, position: int | None, budget: list[int]) -> RequestView:
    return RequestView(
        number=request.arrival,
        request_id=request.request_id,
        status=request.status.value,
        priority=request.add.priority,
        prompt_tokens=len(request.add.prompt),
        max_tokens=request.max_tokens,
        preemptions=request.preemptions,
        is_held=request.is_held,
        queue_position=position,
        sequences=tuple(_sequence_view(seq, budget) for seq in request.live()),
    )


def _sequence_view(seq: Sequence, budget: list[int]) -> SequenceView:
    blocks, host_blocks = (pack_table(t, budget[1]) for t in (seq.blocks, seq.host_blocks))
    budget[1] -= min(budget[1], (len(blocks) + len(host_blocks)) // 4)
    return SequenceView(
        choice=seq.choice,
        tokens=len(seq.tokens),
        computed=seq.num_computed,
        num_blocks=len(seq.blocks),
        blocks=blocks,
        num_host_blocks=len(seq.host_blocks),
        host_blocks=host_blocks,
    )

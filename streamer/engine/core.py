"""EngineCore: the step on the GPU thread, and the Protocols of runner and tokenizer.

Owns the scheduler, the runner and the plans in flight; everything here runs on one thread. It never
waits for the loop: gpu_thread.py decides when to step. The loop reaches it through Inbox alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Final, Protocol

from msgspec.structs import replace

from streamer.constraints.grammars import Grammars
from streamer.core.plan import (
    Add,
    Command,
    Facts,
    Notice,
    NoticeKind,
    Plan,
    StepOutput,
    StepResult,
    StepTimes,
)
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from streamer.core.sizes import ModelInfo
from streamer.core.view import SchedulerView, ViewQuery
from streamer.errors import InvariantViolated
from streamer.tokenizer.chat import EarlierTurn
from streamer.tokenizer.response_template import ResponseTemplate

__all__ = ["EngineCore", "InFlight", "Inbox", "ModelInfo", "Owner", "Runner", "Tokenizer"]

# A round costs this thread up to 2 ms (4,096 requests sorted) and the loop a frame for each of 512.
POSITIONS_S: Final = 0.5
MAX_REBUILDS: Final = 3  # within REBUILDS_S; one more is the engine's end
REBUILDS_S: Final = 60.0

log = logging.getLogger(__name__)


class InFlight(Protocol):
    """A launched plan."""

    def collect(self) -> StepResult:
        """Wait for the plan's result; called once."""
        ...


class Runner(Protocol):
    """Executes plans: model/runner/cpu.py and cuda.py, or fake/runner.py without a model.

    depth  plans that may be launched before the previous one is collected (0 on the CPU, 1 on CUDA)
    """

    @property
    def depth(self) -> int: ...

    def constrain(self, grammars: Grammars) -> None:
        """The grammars of requests: called once, before the first plan."""
        ...

    def launch(self, plan: Plan) -> InFlight:
        """Start a plan; plans come in order. MemoryError: there is no memory for it."""
        ...

    def facts(self) -> Facts:
        """Measured costs, and which copies are done."""
        ...

    def reset(self, launched: int) -> None:
        """Forget all rows and blocks, and the plans up to number `launched`; keep the model.

        Raises where it can't: a device in an error that stays.
        """
        ...

    def close(self) -> None:
        """Free memory and devices; nothing is called afterwards."""
        ...


class Owner(Protocol):
    """What a runner knows of its engine, while it is loaded and after."""

    def check_stop(self) -> None:
        """To be called now and then while loading; raises to end it."""
        ...

    def fail(self, cause: Exception) -> None:
        """End the engine, which has lost what its runner needs; from any thread."""
        ...


class Tokenizer(Protocol):
    """What engine and server need of streamer.tokenizer.tokenizer.Tokenizer.

    special_bytes  special token id -> its bytes, for requests that show special tokens
    templates      the text of the chat template, and of one for chats with tools
    response_template  what the checkpoint says of its answers, if it does
    """

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def special_bytes(self) -> Mapping[int, bytes]: ...
    @property
    def templates(self) -> str: ...
    @property
    def response_template(self) -> ResponseTemplate | None: ...
    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        earlier_turn: EarlierTurn | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]: ...
    def token_bytes(self) -> tuple[bytes, ...]: ...


class _Signal:
    """A message that is no command."""


_PERMIT, _STOP = _Signal(), _Signal()


class Stopped(Exception):
    """The engine was asked to end while it loaded."""


class Inbox:
    """What the loop sends the GPU thread: commands, view queries, permits to step, and the stop.

    view_queries  those not answered yet, oldest first

    `put`, `permit`, `fail` and `stop` may be called from any thread; the rest belongs to the GPU
    thread.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | ViewQuery | Exception | _Signal] = SimpleQueue()
        self._commands: list[Command] = []
        self.view_queries: list[ViewQuery] = []
        self.permits = 0
        self.is_stopped = False

    def put(self, command: Command | ViewQuery) -> None:
        """Send a command or a view query."""
        self._queue.put(command)

    def permit(self) -> None:
        """Allow one more step."""
        self._queue.put(_PERMIT)

    def stop(self) -> None:
        """Ask the thread to end."""
        self._queue.put(_STOP)

    def fail(self, cause: Exception) -> None:
        """End the thread with this error."""
        self._queue.put(cause)

    def check_stop(self) -> None:
        """Raise Stopped if the thread was asked to end; for what takes long before its steps."""
        if not self.is_stopped and not self._queue.empty():
            self._commands = self.take()
        if self.is_stopped:
            raise Stopped

    def wait(self) -> None:
        """Sleep until a message comes. Uses no CPU: there is no time-out."""
        self._sort(self._queue.get())

    def take(self) -> list[Command]:
        """The commands that have come, without waiting."""
        while not self._queue.empty():  # this thread is the only one that takes
            self._sort(self._queue.get())
        commands, self._commands = self._commands, []
        return commands

    def _sort(self, message: Command | ViewQuery | Exception | _Signal) -> None:
        if message is _PERMIT:
            self.permits += 1
        elif message is _STOP:
            self.is_stopped = True
        elif isinstance(message, ViewQuery):
            self.view_queries.append(message)
        elif isinstance(message, Exception):
            raise message
        elif not isinstance(message, _Signal):
            self._commands.append(message)


class StepFailed(Exception):
    """A plan was not carried out; its cause says why."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(f"plan {plan.number}")
        self.plan = plan


class Rebuilds:
    """How often steps failed lately, and whether that is too often to go on.

    Faults that are explained do not count: what a trial's halves come to, a lack of memory that
    smaller steps mend, and all before a request was found to be at fault, or may have been and
    can't be tried, once a step without it has succeeded. A runner that carries out nothing is the
    fault of no request.

    is_unproven  a request may be at fault, and no step has succeeded since the first one failed
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._has_worked = self._is_blamed = False

    @property
    def is_unproven(self) -> bool:
        return self._is_blamed and not self._has_worked

    def worked(self) -> None:
        """A step succeeded."""
        self._has_worked = True
        if self._is_blamed:
            self._times, self._is_blamed = [], False

    def is_too_often(self, verdict: Verdict, now: float, *, has_escaped: bool = False) -> bool:
        """Count this fault; whether there are more than MAX_REBUILDS within REBUILDS_S.

        has_escaped  one that may be at fault for the fault before could not be tried
        """
        if verdict not in (Verdict.RETRIED, Verdict.BLAMED):
            return False
        if verdict is Verdict.BLAMED or has_escaped:
            self._is_blamed = True
            if self._has_worked:
                self._times = []
        if verdict is Verdict.RETRIED:
            self._has_worked = False
        elif self._has_worked:
            return False
        self._times = [time for time in self._times if time > now - REBUILDS_S] + [now]
        return len(self._times) > MAX_REBUILDS


class EngineCore:
    """One scheduler over one runner.

    An exception in a step ends no request that can go on: scheduler and runner are reset, and all
    is computed again, until a request is found without which steps succeed.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, inbox: Inbox) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._launched: deque[tuple[Plan, InFlight]] = deque()
        self._is_checked = True
        self._positions_due = 0.0
        self._rebuilds = Rebuilds()

    def step(self) -> StepOutput | None:
        """One iteration of continuous batching; None when there is nothing to do at all."""
        while not self._inbox.is_stopped:
            try:
                return self._step()
            except StepFailed as failed:
                self._rebuild(failed)
        return None

    def _rebuild(self, failed: StepFailed) -> None:
        """Reset scheduler and runner, or raise what failed if that was too often or can't be."""
        plan, error = failed.plan, failed.__cause__ or failed
        has_escaped = self._scheduler.suspect_escaped
        verdict = self._scheduler.reset(Fault(plan.num_tokens, isinstance(error, MemoryError)))
        launched = max([plan.number, *(other.number for other, _ in self._launched)])
        self._launched.clear()
        if self._rebuilds.is_too_often(verdict, time.monotonic(), has_escaped=has_escaped):
            raise error
        try:
            self._runner.reset(launched)
        except Exception as e:
            raise error from e
        log.error(
            "the step of plan %d with %d tokens failed, all is computed again: %s",
            plan.number,
            plan.num_tokens,
            verdict.value,
            exc_info=error,
        )
        if self._rebuilds.is_unproven:  # they may all be at fault: does the runner work?
            params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
            probe = Add(f"probe-{launched}", (0,), params, is_probe=True)  # it has no stream
            self._scheduler.command(probe)

    def _step(self) -> StepOutput | None:
        began = time.perf_counter()
        self._empty_inbox()
        launch_s = self._launch_ahead()
        if not self._launched:
            self._check_idle()
            return None
        self._is_checked = False
        launched = time.perf_counter()
        plan, in_flight = self._launched.popleft()
        try:
            result = in_flight.collect()
        except InvariantViolated:
            raise
        except Exception as error:
            raise StepFailed(plan) from error
        if plan.num_tokens:
            self._rebuilds.worked()
        collected = time.perf_counter()
        self._empty_inbox()  # what was cancelled meanwhile gets no token of this plan
        output = self._scheduler.apply(plan, result)
        applied = time.perf_counter()
        # All of this clock costs 0.4 us a step, and its tallies on the loop 0.5 (EPYC Zen 5,
        # Python 3.11, 2026-11-21).
        times = StepTimes(
            launched - began - launch_s, launch_s, collected - launched, applied - collected
        )
        notices = _aged(output.notices, applied - began) if output.notices else ()
        positions = self._queue_positions(applied)
        return replace(output, times=times, notices=(*notices, *positions))

    def _queue_positions(self, now: float) -> tuple[Notice, ...]:
        """Notices of queue positions for readers that asked, at most once every POSITIONS_S.

        Sent with a step's output, since only steps move the queue: no wake-up of their own. Without
        such readers (no standard client asks) a step pays 0.1 us.
        """
        if not self._scheduler.notifies_positions or now < self._positions_due:
            return ()
        self._positions_due = now + POSITIONS_S
        return self._scheduler.changed_positions()

    def _check_idle(self) -> None:
        """Prove conservation once when the work is done: a leak ends the engine, with numbers.

        It costs 0.25 us a block: 0.5 ms with 4,096 blocks, 17 ms with 65,536 (one EPYC Zen 5 core,
        2026-11-21), after the last token has gone out.
        """
        if not self._is_checked:
            self._is_checked = True
            self._scheduler.check()

    def snapshot(self) -> SchedulerView:
        """The answer to the oldest view query."""
        return self._scheduler.snapshot(self._inbox.view_queries.pop(0))

    def close(self) -> None:
        """Wait for the launched plans, then close the runner."""
        try:
            while self._launched:
                self._launched.popleft()[1].collect()
        finally:
            self._runner.close()

    def _empty_inbox(self) -> None:
        for command in self._inbox.take():
            try:
                self._scheduler.command(command)
            except InvariantViolated:
                raise
            except Exception as error:  # only this request is refused, the others go on
                if not isinstance(command, Add):
                    raise
                self._scheduler.refuse(command, error)

    def _launch_ahead(self) -> float:
        """Keep `depth` plans launched behind the one that is collected next; seconds of launch."""
        launch_s = 0.0
        while len(self._launched) <= self._runner.depth:
            plan = self._scheduler.schedule(self._runner.facts())
            if plan is None:
                break
            began = time.perf_counter()
            try:
                self._launched.append((plan, self._runner.launch(plan)))
            except InvariantViolated:
                raise
            except Exception as error:
                raise StepFailed(plan) from error
            launch_s += time.perf_counter() - began
        return launch_s


def _aged(notices: Sequence[Notice], age_s: float) -> list[Notice]:
    """A step's notices; those of RUNNING say how long ago it was planned, with depth 1 as well:
    they are made by the iteration's own plan, though they come with the result of an earlier one.
    """
    return [replace(n, age_s=age_s) if n.kind is NoticeKind.RUNNING else n for n in notices]

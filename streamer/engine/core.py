"""EngineCore: the step on the GPU thread, and the doors behind which runner and tokenizer stand.

Owns the scheduler, the runner and the plans in flight; everything here runs on one thread. It never
waits for the loop: gpu_thread.py decides when to step. The loop speaks to it by the Inbox alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from streamer.core.model_info import ModelInfo
from streamer.core.plan import Command, Facts, Plan, StepOutput, StepResult
from streamer.core.scheduler import Scheduler
from streamer.tokenizer_chat import Said

__all__ = ["EngineCore", "InFlight", "Inbox", "ModelInfo", "Runner", "Tokenizer"]


class InFlight(Protocol):
    """A plan that was launched."""

    def collect(self) -> StepResult:
        """Wait for what the plan drew; called once."""
        ...


class Runner(Protocol):
    """Executes plans: model/runner.py, or bench/fake.py without a model.

    depth  plans that may be launched before the previous one is collected (0 on the CPU, 1 on CUDA)
    """

    @property
    def depth(self) -> int: ...

    def launch(self, plan: Plan) -> InFlight:
        """Start a plan; plans come in order."""
        ...

    def facts(self) -> Facts:
        """Measured costs, and which copies are done."""
        ...

    def close(self) -> None:
        """Free what it holds; nothing is called afterwards."""
        ...


class Tokenizer(Protocol):
    """What engine and server need of streamer.tokenizer.Tokenizer.

    special_bytes  special token id -> how it is written, where a request wants to see it
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
        said: Said | None = None,
    ) -> list[int]: ...
    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]: ...
    def token_bytes(self) -> tuple[bytes, ...]: ...


class _Signal:
    """A message that is no command."""


_PERMIT, _STOP = _Signal(), _Signal()


class Inbox:
    """What the loop sends the GPU thread: commands, permits to step, the order to stop.

    `put`, `permit` and `stop` may be called from any thread; the rest belongs to the GPU thread.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | _Signal] = SimpleQueue()
        self._commands: list[Command] = []
        self.permits = 0
        self.is_stopped = False

    def put(self, command: Command) -> None:
        """Send a command."""
        self._queue.put(command)

    def permit(self) -> None:
        """Allow one more step."""
        self._queue.put(_PERMIT)

    def stop(self) -> None:
        """Ask the thread to end."""
        self._queue.put(_STOP)

    def wait(self) -> None:
        """Sleep until something comes. Uses no CPU: there is no time-out."""
        self._sort(self._queue.get())

    def take(self) -> list[Command]:
        """The commands that have come, without waiting."""
        while not self._queue.empty():  # this thread is the only one that takes
            self._sort(self._queue.get())
        commands, self._commands = self._commands, []
        return commands

    def _sort(self, message: Command | _Signal) -> None:
        if message is _PERMIT:
            self.permits += 1
        elif message is _STOP:
            self.is_stopped = True
        elif not isinstance(message, _Signal):
            self._commands.append(message)


class EngineCore:
    """One scheduler over one runner."""

    def __init__(self, runner: Runner, scheduler: Scheduler, inbox: Inbox) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._launched: deque[tuple[Plan, InFlight]] = deque()

    def step(self) -> StepOutput | None:
        """One iteration of continuous batching; None when there is nothing to do at all."""
        self._empty_inbox()
        self._launch_ahead()
        if not self._launched:
            return None
        plan, in_flight = self._launched.popleft()
        result = in_flight.collect()
        self._empty_inbox()  # what was cancelled meanwhile gets no token of this plan
        return self._scheduler.apply(plan, result)

    def close(self) -> None:
        """Let the device finish what it was given, then free it."""
        try:
            while self._launched:
                self._launched.popleft()[1].collect()
        finally:
            self._runner.close()

    def _empty_inbox(self) -> None:
        for command in self._inbox.take():
            self._scheduler.command(command)

    def _launch_ahead(self) -> None:
        """Keep `depth` plans launched behind the one that is collected next."""
        while len(self._launched) <= self._runner.depth:
            plan = self._scheduler.schedule(self._runner.facts())
            if plan is None:
                return
            self._launched.append((plan, self._runner.launch(plan)))

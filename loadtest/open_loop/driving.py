"""Sends jobs when they are due, whether or not earlier ones have ended: the open loop, on asyncio.

Waiting for a slow server would hide its queue (coordinated omission), so each arrival has its own
task and waits for no other, unless `max_at_once` closes the loop. An answer is read as bytes with
their times, and parsed once it is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ..replies import Reply, read_reply
from ..sse import BadAnswer
from ..target import Target
from .fitting import Scale
from .jobs import Job, Turn
from .served import UNFINISHED, Outcome

CALIBRATION_WORDS = (50, 250)
NOT_SENT = "not sent: the previous turn failed"


class Bounds(NamedTuple):
    """A run's bounds. max_at_once: jobs; None: any number.

    end_s    no job begins after it
    drain_s  maximum wait for answers afterwards
    """

    max_at_once: int | None = None
    end_s: float = math.inf
    drain_s: float | None = None


DEFAULT_BOUNDS = Bounds()


class Ways(NamedTuple):
    """How requests are made. ignore_eos gives answers their full length; some servers lack it."""

    target: Target
    model: str
    ignore_eos: bool = True


class Driver:
    """One run at one rate. `on_done` is called with every request's outcome.

    num_open  jobs under way
    """

    def __init__(self, ways: Ways, on_done: Callable[[Outcome], None]) -> None:
        self._ways, self._on_done = ways, on_done
        self._start = 0.0
        self.num_open = 0

    def run(
        self, jobs: Iterable[Job], offsets_s: Iterable[float], bounds: Bounds = DEFAULT_BOUNDS
    ) -> tuple[list[Outcome], float]:
        """Every request's outcome, in order of arrival, and the seconds to the last one's end.

        Runs as many jobs as there are offsets, unless a bound ends the run first.
        """
        return asyncio.run(self._run(jobs, offsets_s, bounds))

    async def _run(
        self, jobs: Iterable[Job], offsets_s: Iterable[float], bounds: Bounds
    ) -> tuple[list[Outcome], float]:
        self._start = time.perf_counter()
        places = None if bounds.max_at_once is None else asyncio.Semaphore(bounds.max_at_once)
        tasks: list[asyncio.Task[list[Outcome]]] = []
        for due_s, job in zip(offsets_s, jobs, strict=False):
            if due_s >= bounds.end_s or not await self._turn(due_s, places, bounds.end_s):
                break
            task = asyncio.create_task(self._job(job, due_s))
            self.num_open += 1
            task.add_done_callback(partial(self._ended, places))
            tasks.append(task)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=bounds.drain_s)
            for task in late:
                task.cancel()
        outcomes = [outcome for task in tasks for outcome in await task]
        return outcomes, time.perf_counter() - self._start

    async def _turn(self, due_s: float, places: asyncio.Semaphore | None, end_s: float) -> bool:
        """Wait until a job may begin; False if the run ends first."""
        await asyncio.sleep(max(0.0, self._start + due_s - time.perf_counter()))
        if places is None:
            return True
        left_s = None if math.isinf(end_s) else self._start + end_s - time.perf_counter()
        try:
            async with asyncio.timeout(left_s):
                await places.acquire()
        except TimeoutError:
            return False
        return True

    def _ended(self, places: asyncio.Semaphore | None, task: object) -> None:
        self.num_open -= 1
        if places is not None:
            places.release()

    async def _job(self, job: Job, due_s: float) -> list[Outcome]:
        """Run a job's turns in order; turns after a failed one fail without a request."""
        messages: list[dict[str, Any]] = []
        if job.system:
            messages.append({"role": "system", "content": job.system})
        outcomes: list[Outcome] = []
        for turn in job.turns:
            if outcomes and outcomes[-1].error:
                outcomes.append(msgspec.structs.replace(outcomes[-1], error=NOT_SENT))
                self._on_done(outcomes[-1])
                continue
            messages.append({"role": "user", "content": turn.prompt})
            start_s = time.perf_counter() - self._start
            outcome = Outcome(due_s if not outcomes else start_s, start_s)
            try:
                reply = await ask(self._ways, request(self._ways, messages, turn))
                outcome = timed(outcome, reply, self._start + start_s)
                messages.append({"role": "assistant", "content": reply.text})
            except (BadAnswer, OSError, ValueError, asyncio.CancelledError) as error:
                message = str(error) or type(error).__name__
                if isinstance(error, asyncio.CancelledError):
                    message = UNFINISHED
                outcome = msgspec.structs.replace(outcome, error=message)
            outcomes.append(outcome)
            self._on_done(outcome)
        return outcomes


def request(ways: Ways, messages: Sequence[dict[str, Any]], turn: Turn) -> bytes:
    """Messages go to chat completions, token ids to completions."""
    body: dict[str, Any] = {"model": ways.model, "max_tokens": turn.max_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if ways.ignore_eos:
        body["ignore_eos"] = True
    if isinstance(turn.prompt, str):
        return ways.target.request("POST", "/v1/chat/completions", body | {"messages": messages})
    return ways.target.request("POST", "/v1/completions", body | {"prompt": turn.prompt})


async def ask(ways: Ways, data: bytes) -> Reply:
    """One answer; BadAnswer, OSError (TimeoutError too) or ValueError if there is none."""
    reads = await ways.target.aread(data)
    return read_reply(iter(reads))


def timed(outcome: Outcome, reply: Reply, start: float) -> Outcome:
    """The outcome with the reply's times and tokens; BadAnswer if it has no text or no usage."""
    if reply.usage is None:
        raise BadAnswer("an answer without usage: tokens can't be counted")
    if not reply.text_at:
        raise BadAnswer("an answer without text")
    return msgspec.structs.replace(
        outcome,
        latency_s=reply.ended_at - start,
        ttft_s=reply.text_at[0] - start,
        itls_s=[b - a for a, b in itertools.pairwise(reply.text_at)],
        num_input=reply.num_prompt_tokens,
        num_cached=reply.num_cached_tokens,
        num_output=reply.num_tokens,
    )


def measured_scale(ways: Ways, text: Callable[[int], str]) -> Scale:
    """The scale of `text(words)`, from the server's token counts of a short and a long prompt.

    The two requests also warm the server up."""

    async def tokens(num_words: int) -> int:
        turn = Turn(text(num_words), 2)
        messages = [{"role": "user", "content": turn.prompt}]
        reply = await ask(ways, request(ways, messages, turn))
        return reply.num_prompt_tokens

    async def both() -> list[int]:
        return [await tokens(num_words) for num_words in CALIBRATION_WORDS]

    (few, many), (short, long) = CALIBRATION_WORDS, asyncio.run(both())
    if long <= short:
        raise BadAnswer(f"usage has {short} and {long} tokens for a short and a long prompt")
    words_per_token = (many - few) / (long - short)
    return Scale(words_per_token, max(0, round(short - few / words_per_token)))

"""`streamer bench step`: a step's cost without the model, beside an idle and a busy event loop.

Runs the whole engine over the fake model, over a runner that makes 100 short calls a step which
release the GIL, as a CPU model does, and, where --model names one, over a real model, whose threads
use every core. The busy loop writes to a socket without pause, so that it competes with the
engine's thread for the GIL. Lag is the delay until the loop takes a step's output, or runs a timer
that is due every 5 ms. Then host.py measures schedule, inputs, draw and apply by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import math
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.config import Config
from streamer.core.plan import Facts, Plan, StepOutput
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.constraints.grammars import Grammars
    from streamer.core.sizes import ModelInfo
    from streamer.engine.core import InFlight, Owner, Runner
    from streamer.engine.engine import AsyncEngine

NUM_CALLS = 100
CALL_BYTES = 4096  # above 2047 hashlib releases the GIL: about 3 us
FRAME = b"x" * 200
FRAMES_A_TURN = 64
TIMER_S = 0.005
MAX_TOKENS = 1 << 20


class StepCase(msgspec.Struct, frozen=True):
    """One case: milliseconds between steps and of the loop's lag, frames written a second, and the
    share of the time in which the first rank waited for sums over ranks."""

    runner: str
    loop: str
    num_steps: int
    step_p50_ms: float
    step_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    frames_per_s: float
    sums_share: float


class TimedRunner:
    """A runner that records the time of each launch, and before it makes `num_calls` short calls
    which release the GIL."""

    def __init__(self, inner: Runner, num_calls: int) -> None:
        self._inner = inner
        self._num_calls = num_calls
        self._data = b"x" * CALL_BYTES
        self.launches: list[float] = []

    @property
    def depth(self) -> int:
        return self._inner.depth

    def constrain(self, grammars: Grammars) -> None:
        self._inner.constrain(grammars)

    def reset(self, launched: int) -> None:
        self._inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        """Work as a model would, then let the inner runner draw."""
        self.launches.append(time.perf_counter())
        for _ in range(self._num_calls):
            hashlib.sha256(self._data)
        return self._inner.launch(plan)

    @property
    def sums_s(self) -> float:
        """Seconds in sums over ranks so far."""
        from streamer.model.ranks.runner import RankedRunner

        return self._inner.sums_s if isinstance(self._inner, RankedRunner) else 0.0

    def facts(self) -> Facts:
        return self._inner.facts()

    def close(self) -> None:
        self._inner.close()


class Case(msgspec.Struct, frozen=True):
    """The model: the fake one with `num_calls` calls a step, or a checkpoint (`model`) on `ranks`
    processes."""

    num_calls: int = 0
    model: str | None = None
    ranks: int = 1

    @property
    def name(self) -> str:
        if self.model is not None:
            name = Path(self.model).name
            return name if self.ranks == 1 else f"{name}, {self.ranks} ranks"
        return f"{self.num_calls} calls" if self.num_calls else "fake"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many sequences, for how long."""
    parser.add_argument("--sequences", type=int, default=32, help="running sequences (32)")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each case (3)")
    parser.add_argument("--model", help="checkpoint to measure as well")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="measure it on so many ranks, too (1)"
    )
    parser.add_argument(
        "--host-steps", type=int, default=100, help="steps per host time, up to 400 (100)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure every case and print a table."""
    from streamer.cli.loop import SWITCH_INTERVAL_S, new_runner
    from streamer.loadtest.inside.host import report_host

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with new_runner() as runner:
            cases = [Case(), Case(num_calls=NUM_CALLS)]
            if args.model is not None:
                counts = dict.fromkeys((1, args.tensor_parallel_size))
                cases += [Case(model=args.model, ranks=ranks) for ranks in counts]
            runner.run(report(console, args.sequences, args.seconds, cases))
    finally:
        sys.setswitchinterval(switch_s)
    report_host(console, args.host_steps)
    return 0


async def report(
    console: Console, num_sequences: int, seconds: float, cases: Sequence[Case]
) -> None:
    """Measure each case on its own engine, and print the table."""
    rows = [("runner", "loop", "steps", "step p50", "p99", "lag p50", "p99", "frames/s", "sums")]
    for case in cases:
        for is_busy in (False, True):
            m = await measure(case, is_busy, num_sequences, seconds)
            times = (m.step_p50_ms, m.step_p99_ms, m.lag_p50_ms, m.lag_p99_ms)
            p50, p99, lag_p50, lag_p99 = (f"{t:.2f}" for t in times)
            speed = f"{m.frames_per_s:,.0f}"
            sums = f"{m.sums_share:.0%}" if case.ranks > 1 else "-"
            counted = (m.runner, m.loop, f"{m.num_steps:,}")
            rows.append((*counted, p50, p99, lag_p50, lag_p99, speed, sums))
    title = f"{num_sequences} sequences, {seconds:g} s a case, times in ms"
    console.print(terminal(rows, title, words=(0, 1)))


async def measure(case: Case, is_busy: bool, num_sequences: int, seconds: float) -> StepCase:
    """One case, for `seconds` after every sequence has a token."""
    runners: list[TimedRunner] = []
    late: list[float] = []  # seconds from each wake-up to the loop's turn
    engine = _build(case, num_sequences, runners, late)
    params = SamplingParams(max_tokens=None if case.model else MAX_TOKENS, ignore_eos=True)
    async with (
        engine,
        _writing(is_busy) as frames,
        _ticking(late),
        _reading(engine, params, num_sequences),
    ):
        first, began, frames_before = len(runners[0].launches), time.perf_counter(), frames[0]
        late.clear()
        sums_before_s = runners[0].sums_s
        await asyncio.sleep(seconds)
        lags = [1e3 * lag for lag in late]
        took_s = time.perf_counter() - began
        launches = runners[0].launches[first:]
        frames_per_s = (frames[0] - frames_before) / took_s
        sums_share = (runners[0].sums_s - sums_before_s) / took_s
    steps = [(b - a) * 1e3 for a, b in pairwise(launches)] or [math.inf]  # none ended
    if not lags:
        raise ConfigError("too short to measure anything", param="seconds")
    return StepCase(
        runner=case.name,
        loop="busy" if is_busy else "idle",
        num_steps=len(launches),
        step_p50_ms=statistics.median(steps),
        step_p99_ms=_p99(steps),
        lag_p50_ms=statistics.median(lags),
        lag_p99_ms=_p99(lags),
        frames_per_s=frames_per_s,
        sums_share=sums_share,
    )


def _build(
    case: Case, num_sequences: int, runners: list[TimedRunner], late: list[float]
) -> AsyncEngine:
    from streamer.build import loaders
    from streamer.engine.engine import AsyncEngine

    class Timed(AsyncEngine):
        def on_output(self, output: StepOutput, sent: float) -> None:
            late.append(time.perf_counter() - sent)
            super().on_output(output, sent)

    config = Config(
        model=case.model or "fake",
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, num_sequences),
        tensor_parallel_size=case.ranks,
        load_progress=False,
    )
    if case.model is None:
        config = msgspec.structs.replace(
            config,
            num_gpu_blocks_override=num_sequences * (MAX_TOKENS // 1024 + 2),
            block_size=1024,
        )

    load_model, load_tokenizer = loaders(config)

    def load(owner: Owner) -> tuple[Runner, ModelInfo]:
        inner, info = load_model(owner)
        runners.append(TimedRunner(inner, case.num_calls))
        return runners[0], info

    return Timed(load, load_tokenizer, config)


@contextlib.asynccontextmanager
async def _reading(engine: AsyncEngine, params: SamplingParams, number: int) -> AsyncIterator[None]:
    """`number` answers under way, each past its first token; Ctrl-C cancels them too."""
    begun = [asyncio.Event() for _ in range(number)]
    readers = [
        asyncio.create_task(_read(engine, params, i + 1, event)) for i, event in enumerate(begun)
    ]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        yield
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    engine: AsyncEngine, params: SamplingParams, prompt: int, begun: asyncio.Event
) -> None:
    async for _ in engine.generate([prompt], params):
        begun.set()


@contextlib.asynccontextmanager
async def _ticking(late: list[float]) -> AsyncIterator[None]:
    """Record the delay of a timer that is due every TIMER_S."""
    loop = asyncio.get_running_loop()

    def tick(due: float) -> None:
        late.append(time.perf_counter() - due)  # uvloop's own clock counts milliseconds
        timer[0] = loop.call_later(TIMER_S, tick, time.perf_counter() + TIMER_S)

    timer = [loop.call_soon(tick, time.perf_counter())]
    try:
        yield
    finally:
        timer[0].cancel()


@contextlib.asynccontextmanager
async def _writing(is_busy: bool) -> AsyncIterator[list[int]]:
    """Frames written so far, in a list of one; with `is_busy` the loop writes without pause."""
    frames = [0]
    if not is_busy:
        yield frames
        return
    loop = asyncio.get_running_loop()
    # Unread datagrams are dropped: writing never waits, and there is no cost of reading.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=sink.getsockname()
        )

        def write() -> None:
            for _ in range(FRAMES_A_TURN):
                transport.sendto(FRAME)
            frames[0] += FRAMES_A_TURN
            turn[0] = loop.call_soon(write)

        turn = [loop.call_soon(write)]
        try:
            yield frames
        finally:
            turn[0].cancel()
            transport.close()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]

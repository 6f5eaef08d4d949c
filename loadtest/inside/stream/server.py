"""The server of `streamer bench stream`: what `streamer serve` runs, over the fake model, recorded.

A separate process: `python -m streamer.loadtest.inside.stream.server ORDER`. Beside the real stack
it records one time a step and a count of tokens, and nothing per token while the streams run
steadily. Commands ("mark", "steps") come on standard input, whose end ends the process; answers are
a line of JSON each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.config import Config
from streamer.loadtest.inside.stream.client import pin, raise_file_limit

if TYPE_CHECKING:
    from streamer.core.plan import StepOutput
    from streamer.engine.base import Engine
    from streamer.engine.engine import AsyncEngine
    from streamer.replicas.link import Link
    from streamer.replicas.processes import Processes

BLOCK_SIZE = 1024  # large, so that the scheduler, which is not measured here, has little to do


class Order(msgspec.Struct, frozen=True):
    """The streams to expect and their maximum tokens, the fake model's rate, the core.

    num_stuck  further streams that will be paused, since no client reads them
    journal    a folder for a journal; empty: none
    num_replicas  processes that the engines are in; 0: the engine is in this one
    """

    num_streams: int
    max_tokens: int
    tokens_per_s: float
    core: int | None = None
    num_stuck: int = 0
    journal: str = ""
    num_replicas: int = 0


class Ready(msgspec.Struct, frozen=True):
    """The server accepts requests."""

    port: int


class Mark(msgspec.Struct, frozen=True):
    """Counts since the start: seconds of CPU of the loop's thread and of the process, bytes.

    is_steady  every stream got a token in the last step
    """

    at: float
    loop_cpu_s: float
    process_cpu_s: float
    rss_bytes: int
    num_steps: int
    num_tokens: int
    is_steady: bool


class Steps(msgspec.Struct, frozen=True):
    """Every step: when the GPU thread sent it, and the seconds until the loop took it.

    From step `steady_from` on every stream got one token a step; `before` has each stream's tokens
    until then. -1 if some stream got no token in the last step.
    """

    sent: list[float]
    lag_s: list[float]
    steady_from: int
    before: dict[str, int]


class Record:
    """The record of all steps; written on the loop, read by the thread that answers commands."""

    def __init__(self, num_streams: int) -> None:
        self.sent = array("d")
        self.lag_s = array("d")
        self.num_tokens = 0
        self.loop_cpu_s = 0.0
        self.steady_from = -1
        self.have_begun = False
        self.before: Counter[str] = Counter()
        self._num_streams = num_streams

    def news(self, output: StepOutput) -> None:
        """Record a replica's: several steps, perhaps, and each of some of the streams."""
        self.sent.append(time.perf_counter())
        self.lag_s.append(0.0)
        self.loop_cpu_s = time.thread_time()
        self.num_tokens += len(output.tokens)
        if len(self.before) < self._num_streams:
            self.before.update(output.request_ids)
            self.have_begun = len(self.before) >= self._num_streams

    def step(self, output: StepOutput, sent: float) -> None:
        """Record a step."""
        self.sent.append(sent)
        self.lag_s.append(time.perf_counter() - sent)
        self.loop_cpu_s = time.thread_time()
        count = len(output.tokens)
        self.num_tokens += count
        if count == self._num_streams:
            if self.steady_from < 0:
                self.steady_from = len(self.sent) - 1
                self.before.update(dict.fromkeys(output.request_ids, 0))
            return
        if self.steady_from >= 0:
            num_steady = len(self.sent) - 1 - self.steady_from
            for request_id in self.before:
                self.before[request_id] += num_steady
            self.steady_from = -1
        self.before.update(output.request_ids)


def main() -> None:
    """Serve until standard input ends."""
    from streamer.cli.loop import SWITCH_INTERVAL_S, new_runner

    order = msgspec.json.decode(sys.argv[1], type=Order)
    raise_file_limit()
    if not order.num_replicas:
        pin(order.core)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with new_runner() as runner:
        runner.run(_serve(order))


async def _serve(order: Order) -> None:
    from streamer.cli.loop import freeze_heap
    from streamer.server.lifecycle import serve

    record = Record(order.num_streams)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer() -> None:
        for line in sys.stdin:
            tell(_mark(record) if line == "mark\n" else _steps(record))
        loop.call_soon_threadsafe(stop.set)

    def ready(url: str) -> None:
        freeze_heap()
        threading.Thread(target=answer, daemon=True).start()
        tell(Ready(int(url.rpartition(":")[2])))

    config = _config(order)
    if not order.num_replicas:
        await serve(_engine(config, record), config, on_ready=ready, stop=stop)
        return
    async with _replicas(config, order) as processes:
        await serve(_cluster(config, processes, record), config, on_ready=ready, stop=stop)


@asynccontextmanager
async def _replicas(config: Config, order: Order) -> AsyncIterator[Processes]:
    """Processes with the engines, on all cores but that of this one, which they outlast not."""
    from streamer.replicas.processes import Processes

    if order.core is not None:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {order.core})
    processes = Processes(config, order.num_replicas)
    await processes.start()
    pin(order.core)
    try:
        yield processes
    finally:
        await processes.stop()


def _cluster(config: Config, processes: Processes, record: Record) -> Engine:
    from streamer.replicas.cluster import Cluster
    from streamer.replicas.messages import News

    class Recorded(Cluster):
        """Records what comes of replicas before it is distributed."""

        def on_message(self, link: Link, message: Any) -> None:
            if isinstance(message, News):
                record.news(message.output)
            super().on_message(link, message)

    return Recorded(config, processes.members, processes.secret)


def _config(order: Order) -> Config:
    blocks = -(-order.max_tokens // BLOCK_SIZE) + 2
    num_rows = order.num_streams + order.num_stuck
    return Config(
        model=f"fake:tokens_per_s={order.tokens_per_s}",
        port=0,
        load_progress=False,
        drain_timeout=0.0,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(2048, 2 * num_rows),
        num_gpu_blocks_override=num_rows * blocks,
        block_size=BLOCK_SIZE,
        journal=order.journal or None,
    )


def _engine(config: Config, record: Record) -> AsyncEngine:
    from streamer.engine.engine import AsyncEngine
    from streamer.fake.model import load_fake, load_fake_tokenizer

    class Recorded(AsyncEngine):
        """Records every step before its output is distributed."""

        def on_output(self, output: StepOutput, sent: float) -> None:
            record.step(output, sent)
            super().on_output(output, sent)

    return Recorded(lambda _: load_fake(config), load_fake_tokenizer, config)


def _mark(record: Record) -> Mark:
    return Mark(
        at=time.perf_counter(),
        loop_cpu_s=record.loop_cpu_s,
        process_cpu_s=time.process_time(),
        rss_bytes=_rss_bytes(),
        num_steps=len(record.sent),
        num_tokens=record.num_tokens,
        is_steady=record.have_begun or record.steady_from >= 0,
    )


def _steps(record: Record) -> Steps:
    return Steps(list(record.sent), list(record.lag_s), record.steady_from, dict(record.before))


def _rss_bytes() -> int:
    """Resident memory now; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def tell(value: msgspec.Struct) -> None:
    """Answer with a line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

"""One engine of `streamer bench speculation`, in its own process: a Config on the first line of
standard input, then a Job a line, each answered by a line.

It stays between jobs, so that engines with and without speculation take turns, each with the
process to itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.errors import StreamerError

if TYPE_CHECKING:
    from streamer.engine.engine import AsyncEngine


class Job(msgspec.Struct, frozen=True):
    """Requests of clients that each make the next one when the last has ended.

    prompts      token ids, or the question of a chat; the clients take turns in them
    seed         the first's
    num_clients  0: as many as there are requests, which all begin at once
    """

    prompts: list[tuple[int, ...] | str]
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int
    num_clients: int = 0


class Found(msgspec.Struct, frozen=True):
    """A job's seconds, output tokens, a digest of all of them, and what was proposed and accepted.

    error  why there is nothing else
    """

    took_s: float = 0.0
    num_tokens: int = 0
    digest: str = ""
    proposed: int = 0
    accepted: int = 0
    error: str = ""


def main() -> None:
    """Answer the jobs on standard input until it ends."""
    from streamer.cli.loop import SWITCH_INTERVAL_S, new_runner

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with new_runner() as runner:
        try:
            runner.run(serve())
        except StreamerError as error:
            say(Found(error=error.message))


def say(found: Found) -> None:
    """Write a line to the parent process."""
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Load the model, say so, and answer one job after the other."""
    from streamer.engine.engine import AsyncEngine

    loop, lines = asyncio.get_running_loop(), sys.stdin.buffer
    config = msgspec.json.decode(lines.readline(), type=Config)
    async with AsyncEngine.from_config(config) as engine:
        say(Found())
        while line := await loop.run_in_executor(None, lines.readline):
            job = msgspec.json.decode(line, type=Job)
            prompts = [
                p if not isinstance(p, str)
                else tuple(await engine.encode_chat([{"role": "user", "content": p}]))
                for p in job.prompts
            ]  # fmt: skip
            before, began = engine.snapshot().step, time.perf_counter()
            tokens = await _answers(engine, job, prompts)
            took_s, after = time.perf_counter() - began, engine.snapshot().step
            say(
                Found(
                    took_s=took_s,
                    num_tokens=sum(map(len, tokens)),
                    digest=blake2b(repr(tokens).encode(), digest_size=8).hexdigest(),
                    proposed=after.proposed_tokens - before.proposed_tokens,
                    accepted=after.accepted_tokens - before.accepted_tokens,
                )
            )


async def _answers(
    engine: AsyncEngine, job: Job, prompts: list[tuple[int, ...]]
) -> list[list[int]]:
    """The tokens of each request's answer, in the requests' order."""
    from streamer.engine.engine import GenerateRequest

    answers: dict[int, list[int]] = {}

    async def client(mine: range) -> None:
        for i in mine:
            params = SamplingParams(
                temperature=job.temperature,
                max_tokens=job.max_tokens,
                ignore_eos=job.ignore_eos,
                seed=job.seed + i,
            )
            stream = engine.submit(GenerateRequest(prompt=prompts[i], params=params))
            await stream.wait()
            answers[i] = list(stream.token_ids())

    num_clients = job.num_clients or len(prompts)
    async with asyncio.TaskGroup() as clients:
        for n in range(num_clients):
            clients.create_task(client(range(n, len(prompts), num_clients)))
    return [answers[i] for i in range(len(prompts))]


if __name__ == "__main__":
    main()

"""One engine of `streamer bench offline`, in its own process: reads an Assignment from standard
input and writes a line per event to standard output, the last of which is Found or Failed.

A process per engine, because a second engine in a process is slower than the first
(loadtest/inside/README.md). Prompts are random tokens, no prompt comes twice; answers are greedy
and have the requested length. Every part warms up before it measures.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError, RequestFailed, StreamerError
from streamer.loadtest.inside.offline.report import Grammar, Latency, Pool, Throughput

if TYPE_CHECKING:
    from streamer.engine.engine import AsyncEngine, TokenStream

WARM_TOKENS = 8  # of an answer while throughput warms up
NUM_ROUNDS = 3  # of answers with a grammar and without, in turns
# An answer that never ends by itself: objects with long keys, and text and numbers of the model's.
ITEM = {
    "customer_identification_number": {"type": "integer"},
    "preferred_delivery_address": {"type": "string", "maxLength": 24},
    "has_subscribed_to_newsletter": {"type": "boolean"},
}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": ITEM,
        "required": list(ITEM),
        "additionalProperties": False,
    },
}
Prompt = tuple[int, ...]
Tokens = tuple[int, ...]


class BenchOptions(msgspec.Struct, frozen=True):
    """Lengths in tokens. pool_share: of the blocks of all sequences at their ends, for `swap`."""

    input_len: int = 128
    output_len: int = 128
    num_prompts: int = 64
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2
    pool_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1", param=name)
        if self.num_iters_warmup < 0:
            raise ConfigError("--num-iters-warmup must be at least 0", param="num_iters_warmup")
        if not 0 < self.pool_share <= 1:
            raise ConfigError("--pool-share must be above 0 and at most 1", param="pool_share")

    def blocks(self, block_size: int) -> int:
        """Blocks of one sequence at its end."""
        return -(-(self.input_len + self.output_len) // block_size)


class Assignment(msgspec.Struct, frozen=True):
    """An engine's job: some of the parts "throughput", "latency" and "pool"."""

    config: Config
    asked: BenchOptions
    parts: tuple[str, ...]


Ask = Callable[[int], SamplingParams]  # of the prompt with this number


class Doing(msgspec.Struct, frozen=True, tag=True):
    """An activity that begins, and its number of Steps."""

    what: str
    total: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """One step of the current activity is done; the first Step of all: the model is loaded."""


class Found(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The loaded model, and the parts' results. tokens: each answer's in `pool`."""

    model: str
    dtype: str
    device: str
    block_size: int
    throughput: Throughput | None = None
    latency: Latency | None = None
    grammar: Grammar | None = None
    pool: Pool | None = None
    tokens: tuple[Tokens, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job failed, and why."""

    message: str


Line = Doing | Step | Found | Failed


def main() -> None:
    """Run the job read from standard input."""
    from streamer.cli.loop import SWITCH_INTERVAL_S, new_runner

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    try:
        with new_runner() as runner:
            say(runner.run(measure(assignment)))
    except StreamerError as error:
        say(Failed(error.message))


def say(line: Line) -> None:
    """Write a line to the parent process."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def begin(what: str, total: int) -> Callable[[], None]:
    """Report that an activity begins; the returned function reports one step of it."""
    say(Doing(what, total))
    return lambda: say(Step())


async def measure(assignment: Assignment) -> Found:
    """All parts of a job, on one engine that takes all requests at once."""
    from streamer.engine.engine import AsyncEngine

    asked, throughput, latency, pool, grammar = assignment.asked, None, None, None, None
    tokens: tuple[Tokens, ...] = ()
    queue = max(assignment.config.max_queue, asked.num_prompts, asked.batch_size)
    config = msgspec.structs.replace(assignment.config, max_queue=queue, load_progress=False)
    async with AsyncEngine.from_config(config) as engine:
        say(Step())  # of loading
        prompts, info = drawn(engine, asked), engine.info
        if "throughput" in assignment.parts:
            throughput = await measure_throughput(engine, asked, prompts)
        if "latency" in assignment.parts:
            latency = await measure_latency(engine, asked, prompts)
        if "grammar" in assignment.parts:
            grammar = await measure_grammar(engine, asked, prompts)
        if "pool" in assignment.parts:
            pool, tokens = await measure_pool(engine, asked, prompts)
    return Found(
        model=info.name,
        dtype=info.dtype,
        device=info.device,
        block_size=info.block_size,
        throughput=throughput,
        latency=latency,
        grammar=grammar,
        pool=pool,
        tokens=tokens,
    )


async def measure_throughput(
    engine: AsyncEngine, asked: BenchOptions, prompts: Iterator[Prompt]
) -> Throughput:
    """All prompts at once, from the first one's submission to the last one's end."""
    count = asked.num_prompts
    await answers(engine, take(prompts, count), WARM_TOKENS, begin("warm-up", count))
    done = begin("throughput", count)
    took_s, _ = await answers(engine, take(prompts, count), asked.output_len, done)
    return Throughput.of(took_s, count, asked.input_len, asked.output_len)


async def measure_latency(
    engine: AsyncEngine, asked: BenchOptions, prompts: Iterator[Prompt]
) -> Latency:
    """Seconds of each iteration: a batch from its submission to the end of its last answer."""
    found = []
    done = begin("latency", asked.num_iters_warmup + asked.num_iters)
    for iteration in range(asked.num_iters_warmup + asked.num_iters):
        took_s, _ = await answers(engine, take(prompts, asked.batch_size), asked.output_len)
        if iteration >= asked.num_iters_warmup:
            found.append(took_s)
        done()
    return Latency.of(found, asked.batch_size)


async def measure_grammar(
    engine: AsyncEngine, asked: BenchOptions, prompts: Iterator[Prompt]
) -> Grammar:
    """All prompts at once: free, every second one with a grammar, and the same without what the
    grammar forces being verified together; in turns, so that a slower minute is every one's."""

    def asking(share: int, *, is_ahead: bool = True) -> Ask:
        grammar = {"json": SCHEMA, "disable_any_whitespace": True}
        free = plain(asked.output_len)
        bound = msgspec.structs.replace(free, structured_outputs=grammar, speculation=is_ahead)
        return lambda i: bound if share and i % share == 0 else free

    ways = {"free": asking(0), "half": asking(2), "half, step by step": asking(2, is_ahead=False)}
    ways |= {"all": asking(1), "all, step by step": asking(1, is_ahead=False)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    done = begin("grammar", (NUM_ROUNDS + 1) * len(ways))
    await engine.compile(asking(1)(0))
    for round_number in range(NUM_ROUNDS + 1):
        for name, params in ways.items():
            took_s, _ = await answers(
                engine, take(prompts, asked.num_prompts), asked.output_len, params=params
            )
            if round_number:
                rates[name].append(asked.num_prompts * asked.output_len / took_s)
            done()
    return Grammar(asked.num_prompts, rates)


def plain(output_len: int) -> SamplingParams:
    """Greedy, and as long as that whatever the model says."""
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


async def measure_pool(
    engine: AsyncEngine, asked: BenchOptions, prompts: Iterator[Prompt]
) -> tuple[Pool, tuple[Tokens, ...]]:
    """All prompts at once, after a whole run as a warm-up, which touches the host pool too."""
    count, num_blocks = asked.num_prompts, engine.info.num_blocks
    for what in (f"{num_blocks} blocks, warm-up", f"{num_blocks} blocks"):
        before, done = engine.snapshot().step, begin(what, count)
        took_s, tokens = await answers(engine, take(prompts, count), asked.output_len, done)
    after = engine.snapshot().step
    moved = after.swapped_out_blocks + after.swapped_in_blocks
    moved -= before.swapped_out_blocks + before.swapped_in_blocks
    pool = Pool(
        num_blocks=num_blocks,
        elapsed_time=took_s,
        output_tokens_per_second=count * asked.output_len / took_s,
        preemptions_swap=after.preemptions_swap - before.preemptions_swap,
        preemptions_recompute=after.preemptions_recompute - before.preemptions_recompute,
        swapped_blocks=moved,
        swapped_bytes=moved * engine.info.block_bytes,
        swap_time=after.swap_s - before.swap_s,
    )
    return pool, tokens


def drawn(engine: AsyncEngine, asked: BenchOptions) -> Iterator[Prompt]:
    """Random prompts without end, the same for the same seed and model; no special tokens."""
    special = engine.tokenizer.special_ids
    vocabulary = min(engine.info.vocab_size, engine.tokenizer.vocab_size)
    ids = [token for token in range(vocabulary) if token not in special]
    source = random.Random(asked.seed)
    while True:
        yield tuple(source.choices(ids, k=asked.input_len))


def take(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    """The next `count` prompts."""
    return [next(prompts) for _ in range(count)]


async def answers(
    engine: AsyncEngine,
    prompts: list[Prompt],
    output_len: int,
    done: Callable[[], None] | None = None,
    params: Ask | None = None,
) -> tuple[float, tuple[Tokens, ...]]:
    """Seconds until all have ended, and each answer's `output_len` tokens (greedy, no EOS)."""
    from streamer.engine.engine import GenerateRequest

    asks = [plain(output_len) if params is None else params(i) for i in range(len(prompts))]

    async def answer(stream: TokenStream) -> None:
        await stream.wait()
        if done is not None:
            done()

    began = time.perf_counter()
    streams = [
        engine.submit(GenerateRequest(prompt=prompt, params=ask, is_durable=True))
        for prompt, ask in zip(prompts, asks, strict=True)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(answer(stream))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    took_s = time.perf_counter() - began
    tokens = tuple(stream.token_ids() for stream in streams)
    if short := sum(len(each) != output_len for each in tokens):
        raise RequestFailed(f"{short} of {len(tokens)} answers do not have {output_len} tokens")
    return took_s, tokens


if __name__ == "__main__":
    main()

"""The open loop's workloads: seeded, with the lengths of known data sets; and traces.

    sharegpt   inputs of 161 tokens on average, outputs of 338: the means of figure 11 of the
               PagedAttention paper (Kwon et al. 2023). It shows histograms and no formula; the
               shape here, log-normal, is ours. No data set is needed or fetched.
    alpaca     the same with 19 and 58
    prefix     sharegpt's questions after one of four long system prompts
    multiturn  conversations of 2 to 6 of alpaca's questions, each turn with all before it;
               rates and counts are of conversations
    nano       nano-vllm's: 256 prompts of 100 to 1,024 random ids, answers of 100 to 1,024 tokens
    trace      a file of JSON lines: timestamp (seconds), input_length, output_length, and hash_ids
               of blocks of 16 tokens where prefixes are shared, as Qwen's published traces have

Lengths are in tokens; text is made of words, as many per token as measured on the server.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

NUM_SYSTEMS = 4
SYSTEM_WORDS, QUESTION_WORDS = 150, (8, 40)
COMMON = (
    "a the of to and in that it is was for on as with they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after word called just where most know"
)
WORDS = COMMON.split()


def words(source: random.Random, count: int) -> str:
    """`count` words, drawn from a hundred common ones."""
    return " ".join(source.choices(WORDS, k=count))


class Prompts:
    """An endless supply of questions; system prompts are the same for all users."""

    def __init__(self, seed: int | str) -> None:
        self._source = random.Random(f"questions {seed}")

    def question(self) -> str:
        """A new one."""
        return words(self._source, self._source.randint(*QUESTION_WORDS))

    def system(self) -> str:
        """One of NUM_SYSTEMS system prompts, which all users share."""
        return system(self._source.randrange(NUM_SYSTEMS))


def system(index: int) -> str:
    """A system prompt by its number."""
    return words(random.Random(f"system {index}"), SYSTEM_WORDS)


MAX_TOKENS = 2048  # of an input and of an output; the paper's models end there
SHAREGPT, ALPACA = (161.31, 337.99), (19.31, 58.45)  # means of inputs and outputs
SIGMAS = {SHAREGPT: 0.9, ALPACA: 0.6}
NUM_PREFIXES, PREFIX_TOKENS = 4, 512
TURNS = (2, 6)
NANO_REQUESTS, NANO_LAST_ID, NANO_LENGTHS = 256, 10_000, (100, 1024)
BLOCK_TOKENS = 16


class Turn(msgspec.Struct, frozen=True):
    """A question, as text or as token ids, and how long its answer is to be."""

    prompt: str | list[int]
    max_tokens: int


class Job(msgspec.Struct, frozen=True):
    """One arrival: its first turn is due at once, each later turn after the answer before it.

    at_s  arrival time in a trace; without one the arrival process sets it
    """

    turns: tuple[Turn, ...]
    system: str = ""
    at_s: float | None = None


class WorkloadOptions(msgspec.Struct, frozen=True):
    """How a workload is made."""

    count: int
    seed: int
    words_per_token: float = 1.0
    trace: Path | None = None


def draw_length(source: random.Random, mean: float, sigma: float) -> int:
    """Log-normal with this mean, from 1 to MAX_TOKENS."""
    drawn = source.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return max(1, min(MAX_TOKENS, round(drawn)))


def _turn(source: random.Random, means: tuple[float, float], asked: WorkloadOptions) -> Turn:
    lengths = [draw_length(source, mean, SIGMAS[means]) for mean in means]
    return Turn(_text(source, lengths[0], asked), lengths[1])


def _text(source: random.Random, num_tokens: int, asked: WorkloadOptions) -> str:
    """Draws once from the source at any length, so that lengths are the same on every server."""
    own = random.Random(source.random())
    return words(own, max(1, round(num_tokens * asked.words_per_token)))


def _sharegpt(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    return [Job((_turn(source, SHAREGPT, asked),)) for _ in range(asked.count)]


def _alpaca(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    return [Job((_turn(source, ALPACA, asked),)) for _ in range(asked.count)]


def _prefix(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    systems = [_text(source, PREFIX_TOKENS, asked) for _ in range(NUM_PREFIXES)]
    return [
        Job((_turn(source, SHAREGPT, asked),), source.choice(systems)) for _ in range(asked.count)
    ]


def _multiturn(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    """`count` conversations, not questions."""
    return [
        Job(tuple(_turn(source, ALPACA, asked) for _ in range(source.randint(*TURNS))))
        for _ in range(asked.count)
    ]


def _nano(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    """nano-vllm's requests in its order of draws, so that seed 0 gives 133,966 output tokens."""
    source = random.Random(asked.seed)
    count = min(asked.count, NANO_REQUESTS)
    prompts = [
        [source.randint(0, NANO_LAST_ID) for _ in range(source.randint(*NANO_LENGTHS))]
        for _ in range(NANO_REQUESTS)
    ]
    lengths = [source.randint(*NANO_LENGTHS) for _ in range(NANO_REQUESTS)]
    pairs = zip(prompts[:count], lengths, strict=False)
    return [Job((Turn(prompt, length),)) for prompt, length in pairs]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _trace(source: random.Random, asked: WorkloadOptions) -> list[Job]:
    """The first `count` lines; times count from the first. ValueError names an invalid line."""
    if asked.trace is None:
        raise ValueError("the workload trace needs --trace FILE")
    decoder, first = msgspec.json.Decoder(_Line), None
    found: list[Job] = []
    with asked.trace.open("rb") as lines:
        for number, line in enumerate(filter(bytes.strip, lines), 1):
            if len(found) == asked.count:
                break
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{asked.trace}, line {number}: {error}") from None
            first = entry.timestamp if first is None else first
            text = _trace_text(source, entry, asked)
            at_s = max(0.0, entry.timestamp - first)
            found.append(Job((Turn(text, max(1, entry.output_length)),), at_s=at_s))
    return sorted(found, key=lambda job: job.at_s or 0.0)


def _trace_text(source: random.Random, line: _Line, asked: WorkloadOptions) -> str:
    """The same words for the same hash, so that prefixes are shared as in the trace."""
    shared = min(len(line.hash_ids), line.input_length // BLOCK_TOKENS)
    parts = [
        _text(random.Random(f"block {asked.seed} {block}"), BLOCK_TOKENS, asked)
        for block in line.hash_ids[:shared]
    ]
    rest = line.input_length - BLOCK_TOKENS * shared
    return " ".join([*parts, _text(source, rest, asked)] if rest or not parts else parts)


WORKLOADS: dict[str, Callable[[random.Random, WorkloadOptions], list[Job]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prefix": _prefix,
    "multiturn": _multiturn,
    "nano": _nano,
    "trace": _trace,
}


def jobs(workload: str, asked: WorkloadOptions) -> list[Job]:
    """The workload's jobs; the same arguments give the same jobs on every machine."""
    return WORKLOADS[workload](random.Random(f"{workload} {asked.seed}"), asked)


def reworded(work: Sequence[Job], seed: int) -> list[Job]:
    """Each prompt with its words reordered: equally long, but not in the prefix cache.

    System prompts stay as they are, shared by the jobs.
    """

    def shuffled(prompt: str | list[int]) -> Any:
        parts: list[Any] = prompt.split() if isinstance(prompt, str) else list(prompt)
        random.Random(f"{seed} {prompt}").shuffle(parts)
        return " ".join(parts) if isinstance(prompt, str) else parts

    replace = msgspec.structs.replace
    return [
        replace(
            job,
            system=shuffled(job.system),
            turns=tuple(replace(turn, prompt=shuffled(turn.prompt)) for turn in job.turns),
        )
        for job in work
    ]

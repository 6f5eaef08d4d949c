"""Results of `streamer bench offline`: values, their JSON and their Markdown. No clock but `now`.

Fields have the names of `vllm bench throughput` and `vllm bench latency` where those have one;
times are in seconds.
"""

from __future__ import annotations

import datetime
import platform
import statistics

import msgspec

from streamer.loadtest.table import markdown, number

PERCENTAGES = (10, 25, 50, 75, 90, 99)
SHOWN = (50, 90, 99)
GB = 1e9


class Throughput(msgspec.Struct, frozen=True):
    """All requests at once."""

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float

    @classmethod
    def of(cls, took_s: float, count: int, num_in: int, num_out: int) -> Throughput:
        """From the seconds, the number of requests, and one request's tokens in and out."""
        rate = count / took_s
        total = num_in + num_out
        return cls(took_s, count, count * total, rate, rate * total, rate * num_in, rate * num_out)


class Latency(msgspec.Struct, frozen=True):
    """Latency of a whole batch. percentiles: percentage -> seconds, interpolated."""

    batch_size: int
    avg_latency: float
    latencies: list[float]
    percentiles: dict[int, float]

    @classmethod
    def of(cls, latencies: list[float], batch_size: int) -> Latency:
        """From the seconds of each iteration."""
        from streamer.loadtest.open_loop.served import percentile

        found = {percent: percentile(latencies, percent) for percent in PERCENTAGES}
        return cls(batch_size, statistics.fmean(latencies), latencies, found)


class Grammar(msgspec.Struct, frozen=True):
    """Output tokens a second by way of asking, one a round; the first way is without a grammar."""

    num_requests: int
    tokens_per_second: dict[str, list[float]]


class Pool(msgspec.Struct, frozen=True):
    """All requests at once in one pool. swap_time: of the copies, both ways."""

    num_blocks: int
    elapsed_time: float
    output_tokens_per_second: float
    preemptions_swap: int
    preemptions_recompute: int
    swapped_blocks: int
    swapped_bytes: int
    swap_time: float

    @property
    def gb_s(self) -> float | None:
        """Rate of the copies; None where they took no time."""
        return self.swapped_bytes / GB / self.swap_time if self.swap_time > 0 else None


class Swap(msgspec.Struct, frozen=True):
    """A pool that holds everything beside one that does not. num_equal: answers that agree."""

    large: Pool
    small: Pool
    num_equal: int


class Results(msgspec.Struct):
    """A whole run, as written to JSON; a part that did not run is None."""

    date: str
    settings: dict[str, float]
    model: str = ""
    dtype: str = ""
    device: str = ""
    block_size: int = 0
    machine: str = f"{platform.machine()}, Python {platform.python_version()}"
    throughput: Throughput | None = None
    latency: Latency | None = None
    grammar: Grammar | None = None
    swap: Swap | None = None


def now() -> str:
    """The date in the results' format."""
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M")


def report(results: Results) -> str:
    """Everything as Markdown."""
    settings = results.settings
    parts = [
        f"{results.date}, {results.model} in {results.dtype} on {results.device}; "
        f"prompts of {settings['input_len']:g} tokens, answers of {settings['output_len']:g}"
    ]
    if results.throughput is not None:
        parts.append(_throughput(results.throughput))
    if results.latency is not None:
        parts.append(_latency(results.latency))
    if results.grammar is not None:
        parts.append(_grammar(results.grammar))
    if results.swap is not None:
        parts.append(_swap(results.swap, results))
    return "\n\n".join(parts)


def _throughput(found: Throughput) -> str:
    heading = ["throughput", "seconds", "requests/s", "tokens/s in", "out", "total"]
    values = (
        found.elapsed_time,
        found.requests_per_second,
        found.input_tokens_per_second,
        found.output_tokens_per_second,
        found.tokens_per_second,
    )
    return markdown([heading, [f"{found.num_requests} requests", *map(number, values)]])


def _latency(found: Latency) -> str:
    heading = ["latency, ms", "mean", *(f"p{percent}" for percent in SHOWN)]
    values = (found.avg_latency, *(found.percentiles[percent] for percent in SHOWN))
    title = f"batch of {found.batch_size}, {len(found.latencies)} iterations"
    return markdown([heading, [title, *(number(1e3 * value) for value in values)]])


def _grammar(found: Grammar) -> str:
    medians = {name: statistics.median(r) for name, r in found.tokens_per_second.items()}
    free = next(iter(medians.values()))
    rows = [["grammar", "tokens/s out", "of the free", "rounds"]]
    for name, rate in medians.items():
        rounds = ", ".join(number(each) for each in found.tokens_per_second[name])
        rows.append([f"{found.num_requests} answers: {name}", number(rate), f"{rate / free:.2f}"])
        rows[-1].append(rounds)
    return markdown(rows)


def _swap(found: Swap, results: Results) -> str:
    heading = ["swap", "tokens/s out", "of the large", "swaps", "recomputes", "GB moved", "GB/s"]
    rows = [heading]
    for name, pool in (("large", found.large), ("small", found.small)):
        share = pool.output_tokens_per_second / found.large.output_tokens_per_second
        rows.append(
            [
                f"{name} pool, {pool.num_blocks} blocks of {results.block_size}",
                number(pool.output_tokens_per_second),
                f"{share:.2f}",
                str(pool.preemptions_swap),
                str(pool.preemptions_recompute),
                number(pool.swapped_bytes / GB),
                number(pool.gb_s),
            ]
        )
    asked = int(results.settings["num_prompts"])
    says = f"Answers that are equal with both: {found.num_equal} of {asked}."
    if found.small.preemptions_recompute and not found.small.preemptions_swap:
        says += " Nothing was swapped: by the costs it measured, the engine recomputed instead."
    elif not found.small.preemptions_swap:
        says += " Nobody had to give way: try a smaller --pool-share, or longer answers."
    return f"{markdown(rows)}\n\n{says}"

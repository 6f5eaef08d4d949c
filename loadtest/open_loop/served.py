"""An open-loop run's results, in the field names of `vllm bench serve`'s result file. No clock.

Definitions are vLLM's too: TTFT from sending to the first text; ITL between pieces of text of any
size; TPOT = (E2EL - TTFT) / (output tokens - 1); tokens as in `usage`; percentiles interpolated.
Fields of our own: goodput_share and p99_start_lag_ms.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from .fitting import Cut

PERCENTILES = (50, 90, 95, 99)
UNFINISHED = "not answered when the run was over"
METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")


class Outcome(msgspec.Struct, frozen=True):
    """One request. Times in seconds; `start_s` and `due_s` from the run's start.

    due_s  its time in the arrival process
    error  "" where it was answered; otherwise the times mean nothing
    """

    due_s: float
    start_s: float
    latency_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = []
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    error: str = ""

    @property
    def end_s(self) -> float:
        """When the answer's last byte had arrived."""
        return self.start_s + self.latency_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 for an answer of one, as in vLLM's goodput."""
        return (self.latency_s - self.ttft_s) / max(1, self.num_output - 1) * (self.num_output > 1)

    def is_good(self, objectives_ms: dict[str, float]) -> bool:
        """Whether the request was answered within every objective."""
        found = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.latency_s}
        return not self.error and all(found[n] * 1e3 <= ms for n, ms in objectives_ms.items())


class Conditions(msgspec.Struct, frozen=True):
    """A run's settings: written to the file unchanged, with `cut`'s fields beside them.

    request_rate     requests a second; "inf" in the file
    max_concurrency  requests at once; None: no limit
    asked_s          seconds of arrivals, after warmup_s not counted; None: until all arrived
    """

    date: str
    label: str
    model_id: str
    request_rate: float
    burstiness: float
    goodput: dict[str, float]
    seed: int
    cut: Cut
    max_concurrency: int | None = None
    warmup_s: float = 0.0
    asked_s: float | None = None


Values = dict[str, object]


def summary(outcomes: Sequence[Outcome], conditions: Conditions, run_s: float) -> Values:
    """One rate's result file, of a run of `run_s` seconds.

    Lists and counts requests that arrived in the measured period; rates per second are of the
    answers that ended in it, whenever their requests were sent.
    """
    begin_s, asked_s = conditions.warmup_s, conditions.asked_s
    end_s = run_s if asked_s is None else begin_s + asked_s
    duration_s = max(end_s - begin_s, 1e-9)
    ended = [o for o in outcomes if not o.error and begin_s <= o.end_s <= end_s]
    arrived, finished = later_half(outcomes, begin_s)
    outcomes = [outcome for outcome in outcomes if outcome.due_s >= begin_s]
    done = [outcome for outcome in outcomes if not outcome.error]
    num_in, num_out = (sum(getattr(o, f) for o in ended) for f in ("num_input", "num_output"))
    unfinished = sum(outcome.error == UNFINISHED for outcome in outcomes)
    good = sum(outcome.is_good(conditions.goodput) for outcome in outcomes)
    rate = conditions.request_rate
    values: Values = msgspec.structs.asdict(conditions)
    del values["cut"], values["asked_s"]
    values |= msgspec.structs.asdict(conditions.cut) | {
        "backend": "openai",
        "num_prompts": len(outcomes),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done) - unfinished,
        "unfinished": unfinished,
        "later_arrived": arrived,
        "later_finished": finished,
        "total_input_tokens": sum(outcome.num_input for outcome in done),
        "total_cached_tokens": sum(outcome.num_cached for outcome in done),
        "total_output_tokens": sum(outcome.num_output for outcome in done),
        "request_throughput": len(ended) / duration_s,
        "request_goodput": good / duration_s if conditions.goodput else None,
        "goodput_share": good / max(1, len(outcomes)),
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_output_tokens_per_s": most_a_second(done),
        "max_concurrent_requests": most_at_once(done),
        "p99_start_lag_ms": 1e3 * percentile([o.start_s - o.due_s for o in outcomes], 99),
    }
    for name, values_ms in times_ms(done).items():
        values |= _statistics(name, values_ms)
    return values | {
        "input_lens": [outcome.num_input for outcome in outcomes],
        "output_lens": [outcome.num_output for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def later_half(outcomes: Sequence[Outcome], begin_s: float) -> tuple[int, int]:
    """How many requests arrived in the later half of the arrival period, and how many ended in it.

    A server that keeps up ends as many as arrive, unless a request takes longer than half a run.
    """
    last_s = max((outcome.due_s for outcome in outcomes), default=0.0)
    middle_s = (begin_s + last_s) / 2
    arrived = sum(middle_s < outcome.due_s <= last_s for outcome in outcomes)
    ends = (outcome.end_s for outcome in outcomes if not outcome.error)
    return arrived, sum(middle_s < end_s <= last_s for end_s in ends)


def times_ms(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Times of answered requests: a list for each of METRICS."""
    seconds = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done if outcome.num_output > 1],
        "itl": [gap for outcome in done for gap in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def _statistics(name: str, values_ms: list[float]) -> Values:
    found: Values = {
        f"mean_{name}_ms": statistics.fmean(values_ms) if values_ms else 0.0,
        f"median_{name}_ms": percentile(values_ms, 50),
        f"std_{name}_ms": statistics.pstdev(values_ms) if values_ms else 0.0,
    }
    return found | {f"p{p}_{name}_ms": percentile(values_ms, p) for p in PERCENTILES}


def percentile(values: Iterable[float], percent: float) -> float:
    """Interpolated between the two nearest values, as in numpy; 0 without values."""
    ranked = sorted(values)
    if not ranked:
        return 0.0
    place = (len(ranked) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Maximum number of requests under way at once."""
    changes = [(outcome.start_s, 1) for outcome in outcomes]
    changes += [(outcome.start_s + outcome.latency_s, -1) for outcome in outcomes]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def most_a_second(outcomes: Iterable[Outcome]) -> float:
    """Maximum pieces of text in one second, as vLLM counts: it takes a piece for a token."""
    seconds: dict[int, int] = {}
    for outcome in outcomes:
        first = outcome.start_s + outcome.ttft_s
        for at in itertools.accumulate(outcome.itls_s, initial=first):
            seconds[int(at)] = seconds.get(int(at), 0) + 1
    return float(max(seconds.values(), default=0))

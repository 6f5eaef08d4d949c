"""Reads result files of the open loop: a run is a file, or a folder with a file per rate.

Everything that is shown is computed from the requests' own times, by served.py. No clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .arrivals import knee
from .served import Outcome, times_ms

EACH = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")


class Result(msgspec.Struct, frozen=True):
    """One rate's file, as served.summary writes it. None, for a burstiness: evenly."""

    date: str
    label: str
    model_id: str
    request_rate: float | str
    burstiness: float | None
    goodput: dict[str, float]
    seed: int
    num_prompts: int
    completed: int
    failed: int
    duration: float
    request_throughput: float
    request_goodput: float | None
    goodput_share: float
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    total_input_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    p99_start_lag_ms: float
    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float]
    errors: list[str]
    max_model_len: int | None = None
    cut_prompts: int = 0
    cut_answers: int = 0
    dropped_turns: int = 0

    @classmethod
    def read(cls, file: Path) -> Result:
        """From JSON; ValueError names the file and the error in it. OSError if there is none."""
        try:
            result = msgspec.json.decode(file.read_bytes(), type=cls)
            float(result.request_rate)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None
        for name in EACH:
            if len(getattr(result, name)) != result.num_prompts:
                found = len(getattr(result, name))
                raise ValueError(f"{file}: {found} {name} of {result.num_prompts} requests")
        return result

    @property
    def rate(self) -> float:
        """Requests a second; infinite where all were sent at once."""
        return float(self.request_rate)

    def times_ms(self) -> dict[str, list[float]]:
        """Times of the answered requests, by the names of served.METRICS."""
        rows = zip(
            *(self.start_times, self.latencies, self.ttfts, self.itls),
            *(self.input_lens, self.output_lens, self.errors),
            strict=True,
        )
        done = [
            Outcome(at, at, latency, ttft, itls, num_in, 0, num_out)
            for at, latency, ttft, itls, num_in, num_out, error in rows
            if not error
        ]
        return times_ms(done)

    def lengths(self, kind: str) -> list[float]:
        """Tokens of the inputs or outputs (`kind` "input" or "output") of answered requests."""
        found = self.input_lens if kind == "input" else self.output_lens
        return [float(n) for n, error in zip(found, self.errors, strict=True) if not error]

    def failures(self) -> Counter[str]:
        """Error messages and their counts."""
        return Counter(error for error in self.errors if error)


class Run(msgspec.Struct, frozen=True):
    """Results of one server, from the lowest rate to the highest."""

    name: str
    results: list[Result]

    @classmethod
    def read(cls, place: Path, name: str = "") -> Run:
        """From a file or folder that the open loop wrote; raises as Result.read does."""
        files = sorted(place.glob("*qps.json")) if place.is_dir() else [place]
        if not files:
            raise ValueError(f"{place}: no result files (RATEqps.json) are in this folder")
        found = sorted((Result.read(file) for file in files), key=lambda result: result.rate)
        return cls(name or place.name.removesuffix(".json"), found)

    def at(self, rate: float) -> Result | None:
        """The result at a rate; None if it was not tried."""
        return next((result for result in self.results if result.rate == rate), None)

    @property
    def best(self) -> Result:
        """The result at the highest rate that held, else at the lowest that was tried."""
        held = knee([(result.rate, result.goodput_share) for result in self.results])
        return (self.at(held) if held is not None else None) or self.results[0]


Pair = tuple[Result, Result | None]


def pairs(runs: Sequence[Run]) -> list[Pair]:
    """Results to show side by side: all rates of one run, or those that both runs have.

    Without a common rate: each run at the highest rate that held.
    """
    first, second = runs[0], runs[1] if len(runs) > 1 else None
    if second is None:
        return [(result, None) for result in first.results]
    both = [(result, second.at(result.rate)) for result in first.results]
    return [pair for pair in both if pair[1] is not None] or [(first.best, second.best)]


def settings(result: Result) -> dict[str, str]:
    """A result's settings in words."""
    is_even = result.burstiness is None or math.isinf(result.burstiness)
    goals = ", ".join(f"{name} {ms:g} ms" for name, ms in result.goodput.items())
    return {
        "Model": result.model_id,
        "Workload": result.label,
        "Requests": f"{result.num_prompts}",
        "Rate": rate_words(result.rate),
        "Burstiness": "even" if is_even else f"{result.burstiness:g}",
        "Seed": f"{result.seed}",
        "Objectives": goals or "none",
        "Context": f"{result.max_model_len:,} tokens" if result.max_model_len else "not given",
        "Cut to fit it": f"{result.cut_prompts} prompts, {result.cut_answers} answers, "
        f"{result.dropped_turns} turns left out",
    }


def rate_words(rate: float) -> str:
    """A rate in words."""
    return f"{rate:.4g} requests/s" if math.isfinite(rate) else "all at once"

"""What a comparison has found: samples in, medians, ratios and verdicts out. No clock, no engine.

The file on disk is `Results` as JSON; everything that tables and charts show is computed from it,
so a finished run can be shown again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .engines import ENGINES, OURS
from .limit import Machine, ideal_tokens_s
from .workload import MODELS, WORKS

OFFLINE, ONE, STREAM = ("eq", "mix"), "one", "stream"
# The goals, as ratios to the best peer of a column, or to what the machine allows.
RATIO, LIMIT_SHARE, ONE_RATIO = 1.3, 0.85, 1.0
PEAK_RATIO = {"half": 1.0, "small": 1.5}


class Sample(msgspec.Struct, frozen=True):
    """One workload of one engine in one round. The times are of streams, else absent."""

    engine: str
    model: str
    work: str
    round: int
    tokens_s: float
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None


class Peak(msgspec.Struct, frozen=True):
    """Resident memory at its highest, of an engine's processes; `is_stream`: of the server."""

    engine: str
    model: str
    round: int
    is_stream: bool
    bytes: int


class Failure(msgspec.Struct, frozen=True):
    """What an engine could not do."""

    engine: str
    model: str
    round: int
    what: str


class Results(msgspec.Struct):
    """One run of compare; grows turn by turn.

    device    what the machine says of itself;  versions  of each engine
    settings  what all engines were given
    machine   its rates, measured once a round
    """

    date: str
    device: dict[str, str | int]
    versions: dict[str, str]
    settings: dict[str, str | int]
    machine: list[Machine] = []
    samples: list[Sample] = []
    peaks: list[Peak] = []
    failures: list[Failure] = []

    @classmethod
    def read(cls, file: Path) -> Results:
        """From JSON; raises msgspec.DecodeError if it is something else."""
        return msgspec.json.decode(file.read_bytes(), type=cls)

    def write(self, file: Path) -> None:
        """As JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        part.replace(file)

    @property
    def engines(self) -> list[str]:
        """Those that have samples, in the order of the table of engines."""
        return [name for name in ENGINES if any(s.engine == name for s in self.samples)]

    @property
    def models(self) -> list[str]:
        return [name for name in MODELS if any(s.model == name for s in self.samples)]

    @property
    def works(self) -> list[str]:
        return [name for name in WORKS if any(s.work == name for s in self.samples)]

    def of(self, engine: str, model: str, work: str) -> list[Sample]:
        """All rounds of one cell."""
        wanted = (engine, model, work)
        return [s for s in self.samples if (s.engine, s.model, s.work) == wanted]

    def median(self, engine: str, model: str, work: str, field: str = "tokens_s") -> float | None:
        """Over rounds; None where it was not measured."""
        return median(getattr(sample, field) for sample in self.of(engine, model, work))

    def peak_bytes(self, engine: str, model: str, is_stream: bool = False) -> float | None:
        """Median over rounds of the highest resident memory."""
        wanted = (engine, model, is_stream)
        return median(p.bytes for p in self.peaks if (p.engine, p.model, p.is_stream) == wanted)

    def limit(self, model: str, work: str) -> float | None:
        """Tokens a second that the machine allows, from the medians of its rates."""
        shape = MODELS[model]
        if not self.machine or not shape.vocabulary:
            return None
        return ideal_tokens_s(shape, median_machine(self.machine), WORKS[work])

    def best_peer(
        self, model: str, work: str, field: str = "tokens_s", least: bool = False
    ) -> tuple[str, float] | None:
        """The peer with the highest (or lowest) median of a column, and that."""
        found: list[tuple[float, str]] = [
            (value, name)
            for name in self.engines
            if name != OURS and (value := self.median(name, model, work, field)) is not None
        ]
        ranked = sorted(found, reverse=not least)
        value, name = ranked[0] if ranked else (math.nan, "")
        return (name, value) if name else None

    def leanest_peer(self, model: str) -> tuple[str, float] | None:
        """The peer with a KV pool that has the lowest peak of memory in process."""
        found: list[tuple[float, str]] = [
            (value, name)
            for name in self.engines
            if name != OURS and ENGINES[name].has_pool
            if (value := self.peak_bytes(name, model)) is not None
        ]
        value, name = min(found, default=(math.nan, ""))
        return (name, value) if name else None


class Verdict(msgspec.Struct, frozen=True):
    """One goal: what ours has, what it would need, and beside whom."""

    model: str
    what: str
    ours: float
    wanted: float
    peer: str
    ratio: float
    share: float | None = None
    is_less_better: bool = False

    @property
    def is_met(self) -> bool:
        if self.is_less_better:
            return self.ours <= self.wanted
        return self.ours >= self.wanted


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None of none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None


def median_machine(measured: list[Machine]) -> Machine:
    """Rate by rate."""
    rows = measured[0].gflops
    return Machine(
        statistics.median(m.read_gb_s for m in measured),
        {n: statistics.median(m.gflops[n] for m in measured) for n in rows},
    )


def verdicts(results: Results) -> list[Verdict]:
    """Every goal that can be judged by what was measured."""
    found: list[Verdict] = []
    for model in results.models:
        for work in results.works:
            found += _rate_verdicts(results, model, work)
        found += _peak_verdicts(results, model)
    return found


def _rate_verdicts(results: Results, model: str, work: str) -> Iterable[Verdict]:
    ours, best = results.median(OURS, model, work), results.best_peer(model, work)
    if ours is None or best is None:
        return
    limit = results.limit(model, work)
    wanted = best[1] * (ONE_RATIO if work == ONE else RATIO)
    if work in OFFLINE and limit is not None:
        wanted = min(wanted, LIMIT_SHARE * limit)
    share = ours / limit if limit else None
    yield Verdict(model, work, ours, wanted, best[0], ours / best[1], share)
    if work != STREAM:
        return
    first = results.median(OURS, model, work, "first_p50_ms")
    soonest = results.best_peer(model, work, "first_p50_ms", least=True)
    if first is not None and soonest is not None:
        peer, value = soonest
        what = "first token, ms"
        yield Verdict(model, what, first, value, peer, first / value, is_less_better=True)


def _peak_verdicts(results: Results, model: str) -> Iterable[Verdict]:
    ours, leanest = results.peak_bytes(OURS, model), results.leanest_peer(model)
    if ours is None or leanest is None or model not in PEAK_RATIO:
        return
    peer, value = leanest[0], leanest[1] / (1 << 20)
    ours /= 1 << 20
    wanted = value * PEAK_RATIO[model]
    yield Verdict(model, "peak, MiB", ours, wanted, peer, ours / value, is_less_better=True)

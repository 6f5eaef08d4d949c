"""A comparison's results: samples in, medians, verdicts, tables and pictures out. No clock.

The file on disk is `Results` as JSON; all that is shown is computed from it, so a finished run can
be shown again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from .. import plots
from ..markup import Markup
from ..table import Rows, number, plain
from .engines import ENGINES, OURS, WEIGHTS, Engine
from .limit import Machine, ideal_tokens_s
from .workload import KV_BYTES, MODELS, WORKS

MIB = 1 << 20
OFFLINE, ONE, PROMPT, STREAM = ("eq", "mix"), "one", "prompt", "stream"
# The goals, as ratios to the best peer of a column, or to what the machine allows.
RATIO, LIMIT_SHARE, ONE_RATIO = 1.3, 0.85, 1.0
PEAK_RATIO = {"half": 1.0, "small": 1.5}
# One stream against the limit; answers in 4 bits, and prompts, against our own bfloat16's.
ONE_LIMIT_SHARE, BF16_RATIO, PROMPT_RATIO = 0.85, 1.5, 1.3
START_S = 3.0  # to serve `half` in 4 bits
KINDS = (16, 8, 4)  # bits a weight, a table each


class Sample(msgspec.Struct, frozen=True):
    """One workload of one engine in one round. Times are only there for streams.

    read_gb_s  beside a single request: memory's mean rate right before, between and after
    """

    engine: str
    model: str
    work: str
    round: int
    tokens_s: float
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    read_gb_s: float | None = None


class Peak(msgspec.Struct, frozen=True):
    """Peak resident memory of an engine's processes; `is_stream`: of its server."""

    engine: str
    model: str
    round: int
    is_stream: bool
    bytes: int


class Start(msgspec.Struct, frozen=True):
    """Seconds from a server's start until it takes requests."""

    engine: str
    model: str
    round: int
    seconds: float


class Failure(msgspec.Struct, frozen=True):
    """An engine's failed turn."""

    engine: str
    model: str
    round: int
    what: str


class Results(msgspec.Struct):
    """One run of compare; grows turn by turn.

    device    the machine's description;  versions  of each engine
    settings  of all engines alike
    machine   its rates, measured once a round
    """

    date: str
    device: dict[str, str | int]
    versions: dict[str, str]
    settings: dict[str, str | int]
    machine: list[Machine] = []
    samples: list[Sample] = []
    peaks: list[Peak] = []
    starts: list[Start] = []
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
        """Engines that have samples, in the order of engines.py."""
        return [name for name in ENGINES if any(s.engine == name for s in self.samples)]

    @property
    def models(self) -> list[str]:
        return [name for name in MODELS if any(s.model == name for s in self.samples)]

    @property
    def works(self) -> list[str]:
        return [name for name in WORKS if any(s.work == name for s in self.samples)]

    def of(self, engine: str, model: str, work: str) -> list[Sample]:
        """All rounds of one cell."""
        key = (engine, model, work)
        return [s for s in self.samples if (s.engine, s.model, s.work) == key]

    def median(self, engine: str, model: str, work: str, field: str = "tokens_s") -> float | None:
        """The median over rounds; None where it was not measured."""
        return median(getattr(sample, field) for sample in self.of(engine, model, work))

    def peak_bytes(self, engine: str, model: str) -> float | None:
        """Median over rounds of the highest resident memory: in process where that was measured,
        else of the server."""
        mine = [p for p in self.peaks if (p.engine, p.model) == (engine, model)]
        is_stream = all(p.is_stream for p in mine)
        return median(p.bytes for p in mine if p.is_stream == is_stream)

    def start_s(self, engine: str, model: str) -> float | None:
        """Median over rounds of the seconds until the server takes requests."""
        mine = (s for s in self.starts if (s.engine, s.model) == (engine, model))
        return median(start.seconds for start in mine)

    def limit(self, model: str, work: str, engine: str = OURS) -> float | None:
        """The machine's limit in tokens a second with the engine's weights, from the medians of
        the machine's rates; of memory's beside the engine's own samples, where it was measured."""
        shape = MODELS[model]
        if not self.machine or not shape.vocabulary:
            return None
        machine = median_machine(self.machine)
        beside = self.median(engine, model, work, "read_gb_s")
        if beside is not None:
            machine = msgspec.structs.replace(machine, read_gb_s=beside)
        bits = WEIGHTS[ENGINES[engine].weights].mean_bits(shape)
        return ideal_tokens_s(shape, machine, WORKS[work], bits)

    def of_kind(self, model: str, kind: int, *, is_ours: bool | None = None) -> list[Engine]:
        """Engines that have samples of the model with that many bits per weight."""
        names = {s.engine for s in self.samples if s.model == model}
        found = [e for e in ENGINES.values() if e.name in names and e.kind == kind]
        return [e for e in found if is_ours is None or e.is_ours == is_ours]

    def best_peer(
        self,
        model: str,
        work: str,
        field: str = "tokens_s",
        *,
        kind: int = 16,
        is_lowest: bool = False,
    ) -> tuple[str, float] | None:
        """The peer with the highest (or lowest) median of a column, and that median."""
        found: list[tuple[float, str]] = [
            (value, peer.name)
            for peer in self.of_kind(model, kind, is_ours=False)
            if (value := self.median(peer.name, model, work, field)) is not None
        ]
        ranked = sorted(found, reverse=not is_lowest)
        value, name = ranked[0] if ranked else (math.nan, "")
        return (name, value) if name else None

    def leanest_peer(self, model: str, kind: int = 16) -> tuple[str, float] | None:
        """The peer with a KV pool that has the lowest peak of memory."""
        found: list[tuple[float, str]] = [
            (value, peer.name)
            for peer in self.of_kind(model, kind, is_ours=False)
            if peer.has_pool and (value := self.peak_bytes(peer.name, model)) is not None
        ]
        value, name = min(found, default=(math.nan, ""))
        return (name, value) if name else None


class Verdict(msgspec.Struct, frozen=True):
    """One goal: our value, the value it requires, and the peer or limit compared with."""

    model: str
    what: str
    ours: float
    target: float
    peer: str
    ratio: float
    share: float | None = None
    is_less_better: bool = False

    @property
    def is_met(self) -> bool:
        if self.is_less_better:
            return self.ours <= self.target
        return self.ours >= self.target


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None


def median_machine(measured: list[Machine]) -> Machine:
    """The median of each rate."""
    rows = measured[0].gflops
    return Machine(
        statistics.median(m.read_gb_s for m in measured),
        {n: statistics.median(m.gflops[n] for m in measured) for n in rows},
    )


def verdicts(results: Results) -> list[Verdict]:
    """Every goal that the measurements can judge."""
    found: list[Verdict] = []
    for model in results.models:
        for engine in (e for kind in KINDS for e in results.of_kind(model, kind, is_ours=True)):
            for work in results.works:
                found += _rate_verdicts(results, engine, model, work)
                found += _own_verdicts(results, engine, model, work)
            found += _peak_verdicts(results, engine, model)
            found += _start_verdicts(results, engine, model)
    return found


def _own_verdicts(results: Results, engine: Engine, model: str, work: str) -> Iterable[Verdict]:
    """One stream against the machine's memory; quantized weights against our own bfloat16."""
    ours, limit = results.median(engine.name, model, work), results.limit(model, work, engine.name)
    dense = results.median(OURS, model, work)
    if ours is None:
        return
    share = ours / limit if limit else None
    ratio = PROMPT_RATIO if work == PROMPT else BF16_RATIO
    if work == ONE and limit is not None:
        goal = ONE_LIMIT_SHARE * limit
        yield Verdict(
            model, _goal(engine, f"{work}, of the limit"), ours, goal, "", math.nan, share
        )
    elif dense is not None and (engine.kind == 4 or (engine.kind == 8 and work == PROMPT)):
        what = _goal(engine, f"{work}, against bfloat16")
        yield Verdict(model, what, ours, ratio * dense, OURS, ours / dense, share)


def _start_verdicts(results: Results, engine: Engine, model: str) -> Iterable[Verdict]:
    ours = results.start_s(engine.name, model)
    if ours is not None and (model, engine.kind) == ("half", 4):
        what = _goal(engine, "start, s")
        yield Verdict(model, what, ours, START_S, "", math.nan, is_less_better=True)


def _goal(engine: Engine, what: str) -> str:
    """A goal's name; that of bfloat16 goes without the engine's."""
    return what if engine.kind == 16 else f"{engine.label}, {what}"


def _rate_verdicts(results: Results, engine: Engine, model: str, work: str) -> Iterable[Verdict]:
    ours = results.median(engine.name, model, work)
    best = results.best_peer(model, work, kind=engine.kind)
    if ours is None or best is None or work == PROMPT:
        return
    limit = results.limit(model, work, engine.name)
    target = best[1] * (ONE_RATIO if work == ONE and engine.kind == 16 else RATIO)
    if work in OFFLINE and limit is not None:
        target = min(target, LIMIT_SHARE * limit)
    share = ours / limit if limit else None
    yield Verdict(model, _goal(engine, work), ours, target, best[0], ours / best[1], share)
    if work != STREAM:
        return
    first = results.median(engine.name, model, work, "first_p50_ms")
    soonest = results.best_peer(model, work, "first_p50_ms", kind=engine.kind, is_lowest=True)
    if first is not None and soonest is not None:
        peer, value = soonest
        what = _goal(engine, "first token, ms")
        yield Verdict(model, what, first, value, peer, first / value, is_less_better=True)


def _peak_verdicts(results: Results, engine: Engine, model: str) -> Iterable[Verdict]:
    ours = results.peak_bytes(engine.name, model)
    leanest = results.leanest_peer(model, engine.kind)
    if ours is None or leanest is None or model not in PEAK_RATIO:
        return
    peer, value = leanest[0], leanest[1] / (1 << 20)
    ours /= 1 << 20
    target = value * PEAK_RATIO[model]
    what = _goal(engine, "peak, MiB")
    yield Verdict(model, what, ours, target, peer, ours / value, is_less_better=True)


def model_rows(results: Results, model: str, kind: int = 16) -> Rows:
    """Medians: a row for each engine with `kind` bits per weight, a column for each workload; a *
    marks a single round among several."""
    works, engines = results.works, results.of_kind(model, kind)
    heading = [f"{model}, tokens/s" if kind == 16 else f"{model}, {kind} bits, tokens/s", *works]
    if STREAM in works:
        heading += ["first token p50 / p99, ms", "between p50 / p99, ms"]
    heading += ["peak, MiB", *(["start, s"] if results.starts else [])]
    rows = [heading]
    for engine in engines:
        row = [engine.label, *(_rate(results, engine.name, model, work) for work in works)]
        if STREAM in works:
            row += [_times(results, engine.name, model, what) for what in ("first", "gap")]
        peak = results.peak_bytes(engine.name, model)
        lean = "" if engine.has_pool or peak is None else " (no pool)"
        row.append(number(None if peak is None else peak / MIB) + lean)
        start = [number(results.start_s(engine.name, model))] if results.starts else []
        rows.append([*row, *start])
    blank = [""] * (len(heading) - 1 - len(works))
    for engine in (e for e in engines if e.is_ours):
        name = "ours" if kind == 16 else engine.label
        for label, value in (("best peer", _ratio), ("machine's limit", _share)):
            cells = (value(results, engine, model, work) for work in works)
            rows.append([f"{name} / {label}", *cells, *blank])
    if kind == 16:
        limits = [number(results.limit(model, work)) for work in works]
        rows.append(["machine's limit", *limits, *blank])
    return rows


def _rate(results: Results, engine: str, model: str, work: str) -> str:
    num_rounds = max((s.round for s in results.samples), default=0) + 1
    samples = results.of(engine, model, work)
    is_single = len(samples) == 1 and num_rounds > 1
    return number(results.median(engine, model, work)) + ("*" if is_single else "")


def _times(results: Results, engine: str, model: str, kind: str) -> str:
    values = [
        results.median(engine, model, STREAM, f"{kind}_{share}_ms") for share in ("p50", "p99")
    ]
    return "-" if values[0] is None else " / ".join(map(number, values))


def _ratio(results: Results, engine: Engine, model: str, work: str) -> str:
    ours = results.median(engine.name, model, work)
    best = results.best_peer(model, work, kind=engine.kind)
    return "-" if ours is None or best is None else f"{ours / best[1]:.2f}"


def _share(results: Results, engine: Engine, model: str, work: str) -> str:
    ours = results.median(engine.name, model, work)
    limit = results.limit(model, work, engine.name)
    return "-" if ours is None or not limit else f"{ours / limit:.2f}"


def verdict_rows(found: Sequence[Verdict]) -> Rows:
    """The goals, one a row."""
    rows = [["goal", "ours", "target", "best peer", "ratio", "of the limit", ""]]
    for v in found:
        target = ("<= " if v.is_less_better else ">= ") + number(v.target)
        share = "-" if v.share is None else f"{v.share:.2f}"
        met = "met" if v.is_met else "not met"
        label = ENGINES[v.peer].label if v.peer else "-"
        ratio = "-" if math.isnan(v.ratio) else f"{v.ratio:.2f}"
        name = f"{v.model} {v.what}"
        rows.append([name, number(v.ours), target, label, ratio, share, met])
    return rows


def conditions(results: Results) -> str:
    """A few lines on the machine, versions and settings."""
    device = ", ".join(str(value) for value in results.device.values())
    lines = [
        f"{results.date}, {device}; every engine on {results.settings['threads']} threads, "
        f"bfloat16 but where a table says otherwise, KV pools of {KV_BYTES >> 30} GiB; "
        f"medians of rounds ({results.settings['rounds']}), engines in turn in each.",
        "; ".join(f"{work}: {WORKS[work].says}" for work in results.works) + ".",
    ]
    if results.machine:
        machine = median_machine(results.machine)
        rates = ", ".join(f"{rate:.0f} at {rows}" for rows, rate in machine.gflops.items())
        lines.append(
            f"The machine, in the same run: {machine.read_gb_s:.1f} GB/s read; bfloat16 GEMM, "
            f"GFLOP/s by rows: {rates}."
        )
    beside = [
        f"{ENGINES[e].label} {rate:.1f}"
        for e in results.engines
        for model in results.models
        if (rate := results.median(e, model, ONE, "read_gb_s")) is not None
    ]
    if beside:
        lines.append(f"Memory's mean rate between requests of one, GB/s: {', '.join(beside)}.")
    versions = ", ".join(f"{ENGINES[e].label} {v}" for e, v in results.versions.items())
    return "\n".join([*lines, f"Versions: {versions}."])


def report(results: Results, draw: Callable[[Rows], str] = plain) -> str:
    """Everything, with tables drawn by `plain` or `markdown`."""
    parts = [conditions(results)]
    parts += [
        draw(model_rows(results, model, kind))
        for model in results.models
        for kind in KINDS
        if results.of_kind(model, kind)
    ]
    found = verdicts(results)
    if found:
        parts.append(draw(verdict_rows(found)))
    failures = [f"{f.engine}, {f.model}, round {f.round + 1}: {f.what}" for f in results.failures]
    if failures:
        parts.append("Failed:\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def svg(results: Results) -> str:
    """A panel of bars a model and workload."""
    cells = [panel(results, model, work) for model in results.models for work in results.works]
    device = ", ".join(map(str, results.device.values()))
    note = f"{results.date}, {device}; medians of rounds ({results.settings['rounds']})"
    height = plots.bars_height(len(results.engines))
    return plots.panels("Tokens a second of engines side by side", cells, height, note)


def panel(results: Results, model: str, work: str) -> list[Markup]:
    """One workload: ours in colour and bold."""
    rows = [
        plots.Bar(ENGINES[engine].label, rate, *(("s0", "bold") if ENGINES[engine].is_ours else ()))
        for engine in results.engines
        if (rate := results.median(engine, model, work)) is not None
    ]
    # The line is the limit of bfloat16, so there is none beside weights of fewer bits.
    is_dense = all(ENGINES[engine].kind == 16 for engine in results.engines)
    limit = results.limit(model, work) if is_dense else None
    return plots.bars(f"{model}, {work}: tokens/s", WORKS[work].says, rows, limit)

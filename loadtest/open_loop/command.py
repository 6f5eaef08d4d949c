"""`streamer loadtest open-loop`: requests arrive at times that do not depend on the server.

At given rates, or at rising rates until too few requests meet the objectives or fewer finish than
arrive (`--sweep`), or at a trace's times, or N at once (`--max-concurrency N`: a closed loop).
Prints a table; writes a file per rate in the field names of `vllm bench serve`, the table as
Markdown and CSV and the curves as SVG. For any OpenAI-compatible server that reports usage.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from .. import slo, table
from ..sse import BadAnswer
from ..target import Target
from . import sweep
from .arrivals import knee, next_rate, offsets
from .driving import Bounds, Driver, Ways, measured_scale
from .fitting import Cut, Scale, fitted
from .jobs import WORKLOADS, Job, WorkloadOptions, jobs, reworded, words
from .served import METRICS, OBJECTIVES, Conditions, Outcome, Values, percentile, summary

OK, FAILED, UNUSABLE = 0, 1, 2
NAMED_ERRORS = 3  # shown per rate
DURATION_S, WARMUP_S = 30.0, 5.0
TRACE_REQUESTS = 100
DRAIN_S = 10.0  # minimum wait for answers whose requests were sent in time
POOL = 1000  # jobs made in advance where their number is not known
RECENT = 100  # requests of the live figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add(
        "--url", default="http://127.0.0.1:8000", help="base URL of the server, with or without /v1"
    )
    add(
        "--api-key",
        metavar="KEY",
        default=argparse.SUPPRESS,
        help="API key, sent as a bearer token",
    )
    add(
        "--model",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="model name; default: the server's first",
    )
    says = "lengths like those of a data set (sharegpt, alpaca), sharegpt with shared prefixes "
    says += "(prefix), conversations (multiturn), nano-vllm's 256 requests (nano), or a --trace"
    add("--workload", choices=WORKLOADS, default="sharegpt", help=says)
    says = "for --workload trace: JSON lines of timestamp, input_length, output_length, hash_ids"
    add("--trace", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=says)
    add(
        "--time-scale", type=float, default=1.0, metavar="X", help="factor for the times of a trace"
    )
    says = f"seconds of arrivals at each rate; default: {DURATION_S:g}, unless --requests is given"
    add("--duration", type=float, metavar="S", default=argparse.SUPPRESS, help=says)
    says = "seconds of warm-up before that, not counted; 0 with --requests"
    add("--warmup", type=float, metavar="S", default=WARMUP_S, help=says)
    says = f"maximum number of requests at each rate; default for a trace: {TRACE_REQUESTS}"
    add("--requests", type=int, metavar="N", default=argparse.SUPPRESS, help=says)
    says = "arrival rates to measure in turn, in requests per second; inf: all at once; default: 1"
    add("--rates", type=float, nargs="+", metavar="R", default=argparse.SUPPRESS, help=says)
    says = "maximum requests at once: a closed loop, with --rates inf by default"
    add("--max-concurrency", type=int, metavar="N", default=argparse.SUPPRESS, help=says)
    says = "start at the first rate and search for the highest that the server sustains"
    add("--sweep", action="store_true", default=argparse.SUPPRESS, help=says)
    says = "shape of the gaps between requests; 1: Poisson; below 1: bursts; inf: evenly spaced"
    add("--burstiness", type=float, metavar="X", default=1.0, help=says)
    add("--seed", type=int, default=0, help="seed of lengths, words and arrivals")
    says = "limits of a good request, in ms, for any of " + ", ".join(OBJECTIVES)
    add("--goodput", nargs="+", metavar="NAME:MS", default=argparse.SUPPRESS, help=says)
    says = (
        "TOML file of objectives for TTFT, TPOT, ITL and E2EL; exit code 1 if any rate misses one, "
    )
    says += "with --sweep if the highest sustained rate does"
    add("--slo", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=says)
    says = "let answers end at the end token, for servers without ignore_eos"
    add("--stop-at-eos", action="store_true", default=argparse.SUPPRESS, help=says)
    says = "folder for a JSON file per rate, report.md, rates.csv and rates.svg"
    add("--out", type=Path, metavar="FOLDER", default=argparse.SUPPRESS, help=says)


class Options(msgspec.Struct, frozen=True):
    """The flags, with defaults filled in.

    requests    None: as many as arrive in `duration_s`
    duration_s  None: until `requests` have arrived
    """

    url: str
    api_key: str
    model: str
    workload: str
    trace: Path | None
    time_scale: float
    duration_s: float | None
    warmup_s: float
    requests: int | None
    rates: list[float]
    at_once: int | None
    is_sweep: bool
    burstiness: float
    seed: int
    goals: dict[str, float]
    slos: list[slo.Objective]
    is_ignoring_eos: bool
    out: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """The flags as Options; ValueError names an invalid combination."""
        given = vars(args)
        is_trace = args.workload == "trace"
        requests, duration_s = given.get("requests"), given.get("duration")
        if is_trace and requests is None:
            requests = TRACE_REQUESTS
        if requests is None and duration_s is None:
            duration_s = DURATION_S
        at_once = given.get("max_concurrency")
        rates = given.get("rates") or [1.0 if at_once is None else math.inf]
        file = given.get("slo")
        found = cls(
            args.url,
            given.get("api_key", ""),
            given.get("model", ""),
            args.workload,
            given.get("trace"),
            args.time_scale,
            duration_s,
            0.0 if duration_s is None else args.warmup,
            requests,
            rates,
            at_once,
            "sweep" in given,
            args.burstiness,
            args.seed,
            objectives(given.get("goodput", [])),
            [] if file is None else slo.read(file, map(str.upper, METRICS)),
            "stop_at_eos" not in given,
            given.get("out"),
        )
        found.check()
        return found

    def check(self) -> None:
        """ValueError names an invalid flag."""
        if self.is_sweep and not math.isfinite(self.rates[0]):
            raise ValueError("--sweep needs a finite rate to begin with")
        above: dict[str, float | None] = {
            "--rates": min(self.rates),
            "--burstiness": self.burstiness,
            "--time-scale": self.time_scale,
            "--requests": self.requests,
            "--duration": self.duration_s,
            "--max-concurrency": self.at_once,
        }
        for flag, value in above.items():
            if value is not None and not value > 0:
                raise ValueError(f"{flag} must be above 0, not {value:g}")
        if math.isinf(max(self.rates)) and self.requests is None and self.at_once is None:
            raise ValueError("--rates inf needs --requests or --max-concurrency")
        if self.warmup_s < 0:
            raise ValueError(f"--warmup must be 0 or more, not {self.warmup_s:g}")

    @property
    def end_s(self) -> float:
        """Seconds from the start within which requests may arrive."""
        return math.inf if self.duration_s is None else self.warmup_s + self.duration_s

    @property
    def bounds(self) -> Bounds:
        """The bounds of one rate's run."""
        if self.duration_s is None:
            return Bounds(self.at_once)
        return Bounds(self.at_once, self.end_s, max(DRAIN_S, self.duration_s))

    def count(self, rate: float) -> int | None:
        """Requests that arrive at a rate; None: as many as there is time for."""
        if math.isinf(self.end_s) or math.isinf(rate):
            return self.requests
        found = max(1, math.ceil(rate * self.end_s))
        return found if self.requests is None else min(found, self.requests)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run all rates.

    1 where a request failed or an objective of --slo is missed, 2 where no request could be sent.
    """
    try:
        options = Options.of(args)
        target = Target.of(options.url, options.api_key)
        try:
            model = options.model or target.first_model()
        except OSError as error:
            raise OSError(f"no server answers at {options.url}: {error}") from None
        ways = Ways(target, model, options.is_ignoring_eos)
        work, cut = make(options, ways)
        if not work:
            raise ValueError(f"{options.trace} has no requests")
        if says := cut.says(ways.model):
            console.out(says)
    except (BadAnswer, OSError, ValueError, LookupError) as error:
        console.out(f"Cannot start: {error}", highlight=False)
        return UNUSABLE
    results: list[Values] = []
    try:
        for result in measure(options, ways, work, cut, console):
            results.append(result)
            write(options.out, results)
    except KeyboardInterrupt:
        console.out("Interrupted; what was measured follows.")
    if not results:
        return FAILED
    console.out(sweep.report(results), highlight=False)
    are_met = judged(options, results, console)
    return OK if are_met and not any(result["failed"] for result in results) else FAILED


def judged(options: Options, results: Sequence[Values], console: Console) -> bool:
    """Whether the objectives of --slo are met; prints which are missed."""
    if not options.slos:
        return True
    rates = sweep.ordered(results)
    if options.is_sweep:
        held = knee(sweep.tried(rates))
        rates = [result for result in rates if result["request_rate"] == held]
        if not rates:
            console.out("No rate was sustained, so no objective of --slo is met.")
    are_met = bool(rates)
    for result in rates:
        verdicts = slo.judge(options.slos, lambda name, user: measured(result, name, user))  # noqa: B023
        are_met &= slo.is_met(verdicts)
        console.out(f"\nObjectives at {result['request_rate']} requests/s", highlight=False)
        console.out(table.plain(slo.table_rows(verdicts)), highlight=False)
    return are_met


def measured(result: Values, statistic: str, user: str) -> slo.Statistics | None:
    """A statistic of a rate's file; None for a user, since the file has no users."""
    if user:
        return None
    found = {name: float(str(value)) for name, value in result.items() if _is_number(value)}
    name = statistic.lower()
    p50, p95, p99 = (found[f"p{percent}_{name}_ms"] for percent in (50, 95, 99))
    num_prompts, num_good = int(found["num_prompts"]), int(found["completed"])
    share = 1 - num_good / max(1, num_prompts)
    rates = found["request_throughput"], found["output_throughput"]
    return slo.Statistics(num_good, p50, p95, p99, share, *rates)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def objectives(pairs: Sequence[str]) -> dict[str, float]:
    """Objectives in ms from NAME:MS; ValueError names an invalid one."""
    found = {}
    for pair in pairs:
        name, _, number = pair.partition(":")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if name not in OBJECTIVES or not found[name] > 0:
            raise ValueError(f"--goodput {pair}: NAME:MS with one of {', '.join(OBJECTIVES)}")
    return found


def make(options: Options, ways: Ways) -> tuple[list[Job], Cut]:
    """The workload, with text scaled to the server's tokens and cut to the model's context."""
    max_counts = [options.count(rate) or POOL for rate in options.rates]
    asked = WorkloadOptions(min(POOL, max(max_counts)), options.seed, trace=options.trace)
    if options.requests is not None:
        asked = msgspec.structs.replace(asked, count=options.requests)
    scale = Scale(1.0)
    if options.workload != "nano":
        source = random.Random(options.seed)
        scale = measured_scale(ways, lambda count: words(source, count))
        asked = msgspec.structs.replace(asked, words_per_token=scale.words_per_token)
    work = jobs(options.workload, asked)
    return fitted(work, scale, ways.target.max_model_len(ways.model))


def supply(work: Sequence[Job], seed: int) -> Iterator[Job]:
    """These jobs, then endlessly the same with their words reordered."""
    while True:
        yield from work
        work = reworded(work, seed)


def measure(
    options: Options, ways: Ways, work: list[Job], cut: Cut, console: Console
) -> Iterator[Values]:
    """A result per rate. Each rate has new prompts, which no earlier rate left in the cache."""
    tried: list[Values] = []
    is_trace = options.workload == "trace"
    waiting = list(options.rates[:1] if options.is_sweep else options.rates)
    times = [options.time_scale * (job.at_s or 0.0) for job in work]
    if is_trace:
        waiting = [len(work) / times[-1] if times[-1] else math.inf]
    endless = supply(work, options.seed)
    with RateProgress(console) as shown:
        while waiting:
            rate = waiting.pop(0)
            count = options.count(rate)
            due: Iterable[float] = times
            if not is_trace and count is None:
                due = itertools.repeat(0.0)
            elif not is_trace and count is not None:
                due = offsets(rate, options.burstiness, count, options.seed)
            date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            conditions = Conditions(
                date,
                options.workload,
                ways.model,
                rate,
                options.burstiness,
                options.goals,
                options.seed,
                cut,
                options.at_once,
                options.warmup_s,
                options.duration_s,
            )
            if options.requests is None:
                source: Iterable[Job] = endless
            else:
                source, work = work, reworded(work, options.seed)
            tried.append(one_rate(ways, source, due, conditions, options.bounds, shown))
            yield tried[-1]
            if options.is_sweep and not is_trace:
                then = next_rate(sweep.tried(tried))
                waiting += [] if then is None else [then]


class Figures(ProgressColumn):
    """A run's latest figures beside its progress bar; drawn twice a second."""

    max_refresh = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.driver: Driver | None = None
        self.outcomes: list[Outcome] = []
        self.num_failed = 0
        self.began = time.monotonic()

    def start(self, driver: Driver) -> None:
        """Begin the figures of another run."""
        self.driver, self.outcomes, self.num_failed = driver, [], 0
        self.began = time.monotonic()

    def render(self, task: Task) -> Text:
        """The figures of the current task."""
        if self.driver is None or task.finished:
            return Text("")
        seconds = max(1e-3, time.monotonic() - self.began)
        num_tokens = sum(outcome.num_output for outcome in self.outcomes)
        ttft_ms = 1e3 * percentile([o.ttft_s for o in self.outcomes[-RECENT:]], 50)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return Text(
            f"{self.driver.num_open} open, {len(self.outcomes) / seconds:.1f} done/s, "
            f"{num_tokens / seconds:.0f} tokens/s, TTFT p50 {ttft_ms:.0f} ms{failed}"
        )


class RateProgress(Progress):
    """A progress bar for each rate, with the latest figures."""

    def __init__(self, console: Console) -> None:
        self.figures = Figures()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), self.figures)
        super().__init__(*columns, console=console, refresh_per_second=2)


def one_rate(
    ways: Ways,
    work: Iterable[Job],
    times: Iterable[float],
    conditions: Conditions,
    bounds: Bounds,
    shown: RateProgress,
) -> Values:
    """Run one rate with a progress bar."""
    figures = shown.figures
    rate = conditions.request_rate
    at_once = "all" if bounds.max_at_once is None else str(bounds.max_at_once)
    says = f"{rate:.3g} requests/s" if math.isfinite(rate) else f"{at_once} at once"
    task = shown.add_task(says, total=bounds.end_s if math.isfinite(bounds.end_s) else None)
    errors: list[str] = []

    def done(outcome: Outcome) -> None:
        if outcome.error:
            errors.append(outcome.error)
            figures.num_failed += 1
        else:
            figures.outcomes.append(outcome)
        shown.update(task, completed=time.monotonic() - figures.began)

    driver = Driver(ways, done)
    figures.start(driver)
    outcomes, run_s = driver.run(work, times, bounds)
    shown.update(task, total=1, completed=1)
    for error in sorted(set(errors))[:NAMED_ERRORS]:
        shown.console.out(f"Failed: {error}", highlight=False)
    return summary(outcomes, conditions, run_s)


def write(folder: Path | None, results: Sequence[Values]) -> None:
    """Write the latest rate's file, and the tables and picture of all rates so far."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    rate = results[-1]["request_rate"]
    name = rate if isinstance(rate, str) else f"{rate:.4g}"
    data = msgspec.json.format(msgspec.json.encode(results[-1]), indent=1)
    (folder / f"{name}qps.json").write_bytes(data + b"\n")
    (folder / "report.md").write_text(sweep.report(results, True), encoding="utf-8")
    (folder / "rates.csv").write_text(sweep.rows_csv(results), encoding="utf-8")
    (folder / "rates.svg").write_text(sweep.svg(results), encoding="utf-8")

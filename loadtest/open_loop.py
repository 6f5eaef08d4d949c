"""`streamer loadtest open-loop`: requests come when they come, whatever the server does.

At given rates, or at rising ones until too few requests meet the objectives (`--sweep`), or as a
trace says. Prints a table; writes a file a rate in the field names of `vllm bench serve`, the table
as Markdown and the curves as SVG. Any OpenAI-compatible server that reports usage.
"""

from __future__ import annotations

import argparse
import datetime
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import sweep
from .arrivals import next_rate, offsets
from .driving import Driver, Ways, measured_scale
from .fitting import Cut, Scale, fitted
from .jobs import WORKLOADS, Asked, Job, jobs, reworded
from .prompts import words
from .served import OBJECTIVES, Conditions, Outcome, Values, summary
from .sse import BadAnswer
from .target import Target

OK, FAILED, UNUSABLE = 0, 1, 2
NAMED_ERRORS = 3  # that are shown of a rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--api-key", default="", help="bearer token")
    add("--model", default="", help="the server's first, if absent")
    add("--workload", choices=WORKLOADS, default="sharegpt", help="described in jobs.py")
    add("--trace", type=Path, metavar="FILE", help="JSON lines, for --workload trace")
    add("--time-scale", type=float, default=1.0, help="stretches a trace's times")
    add("--requests", type=int, default=100, metavar="N", help="a rate; of a trace at most")
    add("--rates", type=float, nargs="+", default=[1.0], help="requests a second; inf: all at once")
    add("--sweep", action="store_true", help="from the first rate on to the knee")
    says = "1: Poisson; less: bursts; inf: evenly"
    add("--burstiness", type=float, default=1.0, help=says)
    add("--seed", type=int, default=0)
    says = "ms: " + ", ".join(OBJECTIVES)
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help=says)
    add("--stop-at-eos", action="store_true", help="for servers that do not know ignore_eos")
    add("--out", type=Path, metavar="FOLDER", help="result files, report.md and rates.svg")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run what the flags say: 1 where a request failed, 2 where nothing could be asked."""
    try:
        goals = objectives(args.goodput)
        if args.sweep and (not goals or not math.isfinite(args.rates[0])):
            raise ValueError("--sweep needs --goodput and a finite rate to begin with")
        if args.requests < 1 or min(args.rates) <= 0 or min(args.burstiness, args.time_scale) <= 0:
            raise ValueError("--requests, --rates, --burstiness and --time-scale are above 0")
        target = Target.of(args.url, args.api_key)
        ways = Ways(target, args.model or target.first_model(), not args.stop_at_eos)
        work, cut = make(args, ways)
        if not work:
            raise ValueError(f"{args.trace} has no requests")
        if says := cut.says(ways.model):
            console.out(says)
    except (BadAnswer, OSError, ValueError, LookupError) as error:
        console.out(f"Can't begin: {error}", highlight=False)
        return UNUSABLE
    results: list[Values] = []
    try:
        for result in measure(args, ways, work, cut, goals, console):
            results.append(result)
            write(args.out, results)
    except KeyboardInterrupt:
        console.out("Interrupted; what was measured follows.")
    if results:
        console.out(sweep.report(results), highlight=False)
    return OK if results and not any(result["failed"] for result in results) else FAILED


def objectives(said: Sequence[str]) -> dict[str, float]:
    """From NAME:MS; ValueError names one that is none."""
    found = {}
    for pair in said:
        name, _, number = pair.partition(":")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if name not in OBJECTIVES or not found[name] > 0:
            raise ValueError(f"--goodput {pair}: NAME:MS with one of {', '.join(OBJECTIVES)}")
    return found


def make(args: argparse.Namespace, ways: Ways) -> tuple[list[Job], Cut]:
    """The workload, its text as long as this server's tokens make it, within its context."""
    asked, scale = Asked(args.requests, args.seed, trace=args.trace), Scale(1.0)
    if args.workload != "nano":
        source = random.Random(args.seed)
        scale = measured_scale(ways, lambda count: words(source, count))
        asked = msgspec.structs.replace(asked, words_per_token=scale.words_per_token)
    work = jobs(args.workload, asked)
    return fitted(work, scale, ways.target.max_model_len(ways.model))


def measure(
    args: argparse.Namespace,
    ways: Ways,
    work: list[Job],
    cut: Cut,
    goals: dict[str, float],
    console: Console,
) -> Iterator[Values]:
    """A result a rate. Each rate asks anew, or the second would find the first's prompts cached."""
    tried: list[tuple[float, float]] = []
    waiting = list(args.rates[:1] if args.sweep else args.rates)
    if args.workload == "trace":
        times = [args.time_scale * (job.at_s or 0.0) for job in work]
        waiting = [len(work) / times[-1] if times[-1] else math.inf]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2) as shown:
        while waiting:
            rate = waiting.pop(0)
            if args.workload != "trace":
                times = offsets(rate, args.burstiness, len(work), args.seed)
            date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            conditions = Conditions(
                date, args.workload, ways.model, rate, args.burstiness, goals, args.seed, cut
            )
            yield (result := one_rate(ways, work, times, conditions, shown))
            work = reworded(work, args.seed)
            if args.sweep and args.workload != "trace":
                tried.append((rate, float(str(result["goodput_share"]))))
                if (then := next_rate(tried)) is not None:
                    waiting.append(then)


def one_rate(
    ways: Ways, work: list[Job], times: list[float], conditions: Conditions, shown: Progress
) -> Values:
    """Run it, with a line that moves."""
    says = f"{conditions.request_rate:.3g} requests/s"
    task = shown.add_task(says, total=sum(len(job.turns) for job in work))
    errors: list[str] = []

    def done(outcome: Outcome) -> None:
        if outcome.error:
            errors.append(outcome.error)
        failed = f", {len(errors)} failed" if errors else ""
        shown.update(task, advance=1, description=says + failed)

    outcomes, duration_s = Driver(ways, done).run(work, times)
    for error in sorted(set(errors))[:NAMED_ERRORS]:
        shown.console.out(f"Failed: {error}", highlight=False)
    return summary(outcomes, conditions, duration_s)


def write(folder: Path | None, results: Sequence[Values]) -> None:
    """The latest rate's file, and everything so far as a page and a picture."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    rate = results[-1]["request_rate"]
    name = rate if isinstance(rate, str) else f"{rate:.4g}"
    data = msgspec.json.format(msgspec.json.encode(results[-1]), indent=1)
    (folder / f"{name}qps.json").write_bytes(data + b"\n")
    (folder / "report.md").write_text(sweep.report(results, True), encoding="utf-8")
    (folder / "rates.svg").write_text(sweep.svg(results), encoding="utf-8")

"""`streamer loadtest compare`: ours and every installed peer, on the same workloads.

Every round measures the machine, then runs each engine in its own process, in an order that rotates
by one per round. Prints medians, ratios to the best peer and the share of the machine's limit,
draws the chart, and writes everything as JSON after each workload, from which `--resume` goes on.
engines.py has the engines' paths and settings, workload.py the workloads, limit.py the machine's
limit.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from streamer.errors import ConfigError

from .. import table
from ..processes import EngineFailed
from .engines import ENGINES, LLAMA, OURS, WEIGHTS, Engine, Places, environment
from .install import PACKAGES, install
from .limit import Machine
from .results import KINDS, Failure, Peak, Results, Sample, Start, report, svg
from .turns import Outcome, Turn
from .turns import run as take_turn
from .workload import KV_BYTES, MAX_LEN, MAX_SEQS, MODELS, WORKS, Model

OK, FAILED = 0, 1
ROUNDS, THREADS = 5, 2
SLOW = 3.0  # an engine this many times slower than the best in round 1 is not measured again
RESULTS = Path(__file__).resolve().parents[1] / "results"


class Plan(NamedTuple):
    """What to run."""

    engines: tuple[Engine, ...]
    models: tuple[str, ...]
    works: tuple[str, ...]
    rounds: int
    threads: int
    keeps_slow: bool
    is_served: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--engines", nargs="+", choices=ENGINES, help="engines to compare; default: all installed")
    add("--bits", nargs="+", type=int, choices=KINDS, default=[16], help="bits per weight")
    add("--models", nargs="+", choices=MODELS, default=["small", "half"])
    add("--work", nargs="+", choices=WORKS, default=list(WORKS))
    add("--rounds", type=int, default=ROUNDS)
    add("--threads", type=int, default=THREADS, help="compute threads of each engine")
    add(
        "--keep-slow",
        action="store_true",
        help=f"keep measuring engines that are {SLOW:.0f} times slower",
    )
    add(
        "--served",
        action="store_true",
        help="measure all of an engine that has a server over HTTP, in one process a round",
    )
    add(
        "--out",
        type=Path,
        help="write the results to this JSON file; default: loadtest/results/DATE.json",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the run in --out: measure what it lacks",
    )
    add("--svg", type=Path, help="write the chart to this file")
    add("--markdown", type=Path, help="write the tables as Markdown to this file")
    add("--logs", type=Path, help="write the engines' output to this folder")
    add(
        "--show",
        type=Path,
        metavar="JSON",
        help="show the results of an earlier run and measure nothing",
    )
    add(
        "--install",
        nargs="+",
        choices=PACKAGES,
        metavar="NAME",
        default=[],
        help="install these peers first",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run a comparison or show an earlier one; 1 where nothing could be measured."""
    if args.show:
        show(Results.read(args.show), args, console)
        return OK
    places = Places.found()
    for name in args.install:
        console.out(f"Installed {install(name, places.home)}")
    engines = choose(args.engines or columns(args.bits), places, console)
    make_models([MODELS[name] for name in args.models], engines, places, console)
    plan = Plan(
        engines,
        tuple(args.models),
        tuple(args.work),
        args.rounds,
        args.threads,
        args.keep_slow,
        args.served,
    )
    results = new_results(plan)
    out = args.out or RESULTS / f"{results.date.replace(':', '').replace(' ', '-')}.json"
    if args.resume and out.exists():
        results = resumed(out, results)
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        # On SIGTERM, end the running engine too.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            measure(plan, results, places, logs.resolve(), out, console)
        except KeyboardInterrupt:
            console.out("Interrupted; what was measured follows.")
        finally:
            signal.signal(signal.SIGTERM, before)
    show(results, args, console)
    if out.exists():
        console.out(f"Written to {out}")
    return OK if results.samples else FAILED


def columns(kinds: Sequence[int]) -> list[str]:
    """The engines with that many bits per weight; ours with bfloat16 is always among them."""
    return [name for name, engine in ENGINES.items() if engine.kind in kinds or name == OURS]


def choose(names: Sequence[str], places: Places, console: Console) -> tuple[Engine, ...]:
    """The installed engines; prints which are missing."""
    requested = [ENGINES[name] for name in names]
    missing = [engine for engine in requested if not places.is_installed(engine)]
    for engine in missing:
        console.out(f"Left out, not installed: {engine.name} (--install {engine.home})")
    if len(missing) == len(requested):
        raise ConfigError("--engines: none of these is installed", param="engines")
    return tuple(engine for engine in requested if engine not in missing)


def make_models(
    models: Sequence[Model], engines: Sequence[Engine], places: Places, console: Console
) -> None:
    """Make missing checkpoints and their quantized forms, each in its own process."""
    env = environment(ENGINES[OURS], places, THREADS)
    folder = Path(places.home / "models")
    _check_makers(models, engines, places)
    for model in models:
        if model.vocabulary and not Path(places.checkpoint(model)).exists():
            console.out(f"Making the checkpoint {model.name}")
            command = [
                sys.executable,
                "-m",
                "streamer.loadtest.compare.models",
                str(folder),
                model.name,
            ]
            subprocess.run(command, check=True, env=env)
        if model.vocabulary:
            _make_gguf(model, engines, places, console)
            _write_quantized(model, engines, places, console)


def _check_makers(models: Sequence[Model], engines: Sequence[Engine], places: Places) -> None:
    """ConfigError before anything is made, where llama.cpp has to make a file and is missing."""
    llama = ENGINES[LLAMA]
    for model, engine in itertools.product(models, engines):
        file = Path(places.source(engine, model))
        is_missing = model.vocabulary and file.suffix == ".gguf" and not file.exists()
        if is_missing and not places.is_installed(llama):
            message = f"{file.name} is made by llama.cpp's programs: add --install {llama.home}"
            raise ConfigError(message, param="engines")


def _write_quantized(
    model: Model, engines: Sequence[Engine], places: Places, console: Console
) -> None:
    """Make the checkpoints of codes that the engines read, mostly by `streamer quantize`."""
    for engine in engines:
        target = places.written(model, engine.weights)
        if places.source(engine, model) == str(target) and not target.exists():
            console.out(f"Making {target.name}")
            weights = WEIGHTS[engine.weights]
            if weights.form:
                _to_int4(engine, places.checkpoint(model), target, places)
                continue
            words = ["quantize", places.checkpoint(model), "--to", f"int{weights.kind}"]
            words += ["--group-size", str(weights.group)] if weights.group else []
            command = [sys.executable, "-m", "streamer", *words, "--out", str(target)]
            env = environment(ENGINES[OURS], places, THREADS)
            subprocess.run(command, check=True, env=env, stdout=sys.stderr)


def _to_int4(engine: Engine, source: str, target: Path, places: Places) -> None:
    """Make a checkpoint in a form that `streamer quantize` does not write."""
    script = Path(__file__).resolve().parent / "peers" / "to_int4.py"
    form = WEIGHTS[engine.weights].form
    command = [str(places.python(engine)), str(script), source, str(target), form]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _make_gguf(model: Model, engines: Sequence[Engine], places: Places, console: Console) -> None:
    """Make the GGUF files that the engines read, quantized ones by llama.cpp's own program."""
    llama, whole = ENGINES[LLAMA], places.gguf(model)
    files = {Path(places.source(engine, model)): engine.weights for engine in engines}
    for target, weights in files.items():
        if target.suffix != ".gguf" or target.exists():
            continue
        console.out(f"Making {target.name}")
        if not whole.exists():
            script = Path(__file__).resolve().parent / "peers" / "to_gguf.py"
            source = places.checkpoint(model)
            subprocess.run(
                [places.python(llama), script, source, whole], check=True, stdout=sys.stderr
            )
        if target != whole:
            part = target.with_suffix(".part")
            program = places.program(llama, "llama-quantize")
            subprocess.run([program, whole, part, weights], check=True, stdout=sys.stderr)
            part.rename(target)


def new_results(plan: Plan) -> Results:
    """Results without samples: device, versions and settings."""
    settings: dict[str, str | int] = {"rounds": plan.rounds, "threads": plan.threads}
    settings |= {"kv_bytes": KV_BYTES, "max_len": MAX_LEN, "max_seqs": MAX_SEQS}
    date = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return Results(date, device(), {}, settings)


def resumed(file: Path, new: Results) -> Results:
    """The results in `file`, to be completed; ConfigError if they are of other settings."""
    found = Results.read(file)
    if (found.settings, found.device) != (new.settings, new.device):
        was = f"{found.settings} on {found.device}"
        raise ConfigError(f"--resume: {file} was measured with {was}")
    found.failures.clear()
    return found


def lacking(turn: Turn, results: Results) -> Turn:
    """The turn without the workloads that have been measured."""
    name, model = turn.engine.name, turn.model.name
    done = {
        s.work for s in results.samples if (s.engine, s.model, s.round) == (name, model, turn.round)
    }
    works = tuple(work for work in turn.works if work.name not in done)
    return msgspec.structs.replace(turn, works=works)


def device() -> dict[str, str | int]:
    """The processor, its usable cores, the memory, Python's version."""
    found: dict[str, str | int] = {"cpu": cpu_name(), "cores": f"{num_cores()} cores"}
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{memory / (1 << 30):.0f} GiB"
    return found | {"python": f"Python {platform.python_version()}"}


def num_cores() -> int:
    """Cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name from Linux, else from Python."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def turns(plan: Plan, round: int) -> Iterator[Turn]:
    """A round's turns, engine by engine for each model; each round begins with another engine."""
    works = [WORKS[name] for name in plan.works]
    offline = tuple(work for work in works if not work.is_stream)
    streams = tuple(work for work in works if work.is_stream)
    shift = round % max(1, len(plan.engines))
    order = plan.engines[shift:] + plan.engines[:shift]
    for model in plan.models:
        for engine in order:
            is_served = engine.serves and (plan.is_served or not engine.runner)
            if offline and not is_served:
                yield Turn(engine, MODELS[model], round, offline, False)
            over_http = (*offline, *streams) if is_served else streams
            if over_http and engine.serves:
                yield Turn(engine, MODELS[model], round, over_http, True)


def without_slow(turn: Turn, results: Results) -> Turn:
    """The turn without the workloads in which the engine was SLOW in the first round."""
    name, model = turn.engine.name, turn.model.name

    def is_kept(work: str) -> bool:
        mine = results.of(name, model, work)
        best = max((r for e in results.engines for r in _rates(results, e, model, work)), default=0)
        return not mine or mine[0].tokens_s * SLOW >= best or turn.engine.is_ours

    works = tuple(work for work in turn.works if is_kept(work.name))
    return msgspec.structs.replace(turn, works=works)


def _rates(results: Results, engine: str, model: str, work: str) -> list[float]:
    return [sample.tokens_s for sample in results.of(engine, model, work)]


def measure(
    plan: Plan, results: Results, places: Places, logs: Path, out: Path, console: Console
) -> None:
    """Run all rounds; samples go into `results`, and each to disk at once."""
    total = sum(1 for round in range(plan.rounds) for _ in turns(plan, round))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Redrawn between turns only: while an engine computes, it has all the cores.
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,
    ) as progress:
        task = progress.add_task("", total=total)
        for round in range(plan.rounds):
            if len(results.machine) <= round:
                measure_machine(plan, results, places, round)
            for planned in turns(plan, round):
                turn = lacking(planned, results)
                if round and not plan.keeps_slow:
                    turn = without_slow(turn, results)
                what = "served" if turn.is_served else "in process"
                says = f"round {round + 1}: {turn.engine.label}, {turn.model.name}, {what}"
                progress.update(task, description=says, refresh=True)
                if turn.works and not _has_failed(turn, results):
                    outcomes = take_turn(turn, places, plan.threads, logs)
                    take(turn, outcomes, results, out, progress.console)
                progress.update(task, advance=1, refresh=True)


def _has_failed(turn: Turn, results: Results) -> bool:
    """Whether the engine failed with this model before, in either kind of turn."""
    mine = (turn.engine.name, turn.model.name)
    return any((f.engine, f.model) == mine and f.round < turn.round for f in results.failures)


def take(
    turn: Turn, outcomes: Iterable[Outcome], results: Results, out: Path, console: Console
) -> None:
    """Run one turn; its outcomes, or its failure, go into `results` and to disk."""
    try:
        for outcome in outcomes:
            if isinstance(outcome, Sample):
                results.samples.append(outcome)
                console.out(
                    f"{turn.model.name} {outcome.work}: {turn.engine.label} "
                    f"{table.number(outcome.tokens_s)} tokens/s"
                )
            elif isinstance(outcome, Peak):
                results.peaks.append(outcome)
            elif isinstance(outcome, Start):
                results.starts.append(outcome)
            else:
                results.versions[turn.engine.name] = outcome
            results.write(out)
    except EngineFailed as error:
        what = str(error)
        results.failures.append(Failure(turn.engine.name, turn.model.name, turn.round, what))
        results.write(out)
        console.out(f"Failed: {turn.engine.label}, {turn.model.name}: {what}")


def measure_machine(plan: Plan, results: Results, places: Places, round: int) -> None:
    """Measure the machine's rates in a separate process; without them no limit is shown."""
    command = [sys.executable, "-m", "streamer.loadtest.compare.machine", str(plan.threads)]
    env = environment(ENGINES[OURS], places, plan.threads)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        results.failures.append(Failure("machine", "", round, last[0]))
        return
    results.machine.append(msgspec.convert(json.loads(done.stdout), Machine, strict=False))


def show(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Print the tables, and write the files that the flags name."""
    console.out(report(results), highlight=False)
    if args.svg:
        args.svg.write_text(svg(results), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(report(results, table.markdown), encoding="utf-8")

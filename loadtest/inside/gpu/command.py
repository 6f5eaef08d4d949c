"""`streamer bench gpu`: a GPU's figures, each beside its target, in one command under ten minutes.

Runs sections one after the other, each in its own process, since an error on a GPU can end its
process: a section that fails, hangs or dies is reported, its figures so far are kept, and the
others run. Models have known shapes and random weights, made on the device. With --tiny every
section runs on any machine, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from streamer.errors import ConfigError
from streamer.loadtest.processes import run_apart

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.loadtest.inside.gpu.models import Where
    from streamer.loadtest.inside.gpu.report import Part, Report


class Section(NamedTuple):
    """A part of the bench: its time limit in seconds, and what it measures."""

    budget_s: float
    help: str


SECTIONS = {
    "bandwidth": Section(10, "memory's rate"),
    "single": Section(90, "one stream, three models, two also in 4 bits"),
    "batch": Section(65, "nano-vllm's 256 requests"),
    "step": Section(79, "a step's time on host and device: decodes, and chunks beside them"),
    "attention": Section(60, "beside torch's SDPA on contiguous K and V"),
    "tune": Section(50, "weights in 4 and 8 bits and FP8; kernels with other tiles and stages"),
    "swap": Section(15, "beside a plain pinned copy"),
    "served": Section(40, "arrivals through the server"),
    "transformers": Section(55, "nano-vllm's requests with transformers' continuous batching"),
}
GRACE_S = 15.0  # for a process to start, and to end by itself when the section's time is over


def _function(name: str) -> Callable[[Where, Report], None]:
    """The function that measures a section."""
    from streamer.loadtest.inside.gpu import engine as gpu_engine
    from streamer.loadtest.inside.gpu import kernels as gpu_kernels
    from streamer.loadtest.inside.gpu import peer as gpu_peer
    from streamer.loadtest.inside.gpu import served as gpu_served
    from streamer.loadtest.inside.gpu import tune as gpu_tune

    return {
        "bandwidth": gpu_kernels.bandwidth,
        "single": gpu_engine.single,
        "batch": gpu_engine.batch,
        "transformers": gpu_peer.transformers,
        "step": gpu_engine.step,
        "swap": gpu_kernels.swap,
        "attention": gpu_kernels.attention,
        "tune": gpu_tune.tune,
        "served": gpu_served.served,
    }[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, where, and where to write it."""
    listed = "; ".join(f"{name}: {section.help}" for name, section in SECTIONS.items())
    parser.add_argument(
        "--only", metavar="NAMES", help=f"only these sections, comma-separated: {listed}"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, to try the code")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file (loadtest/results/gpu-<device>.json; none with --tiny)",
    )
    parser.add_argument(
        "--here", action="store_true", help="run everything in one process, for debuggers"
    )
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the chosen sections; 1 if one of them failed."""
    from streamer.loadtest.inside.gpu import report as gpu_report

    names = _sections(args.only)
    where = _where(args.device, is_tiny=args.tiny)
    for logger in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # a failure is raised, and reported
    if args.part is not None:
        with _trace_of(args.part).open("w", encoding="utf-8") as file:
            hangs_s = SECTIONS[names[0]].budget_s + GRACE_S / 2  # it is killed soon
            faulthandler.dump_traceback_later(hangs_s, file=file)
            part = _run_here(names[0], where, console, args.part)
            faulthandler.cancel_dump_traceback_later()
        return 1 if part.failure else 0
    out = args.out or (None if where.is_tiny else gpu_report.default_out(where.device))
    parts: dict[str, Part] = {}
    seconds: dict[str, float] = {}
    for name in names:
        began = time.perf_counter()
        if args.here:
            parts[name] = _run_here(name, where, console, None)
        else:
            parts[name] = _run_apart(name, where)
        seconds[name] = round(time.perf_counter() - began, 2)
        if parts[name].failure:
            console.print(f"[red]{name} failed:[/red] {parts[name].failure}", highlight=False)
            console.print(parts[name].traceback, highlight=False, markup=False)
        found = gpu_report.results(where.device, parts, seconds, is_tiny=where.is_tiny)
        if out is not None:  # after each section: what ends the bench leaves those before it
            gpu_report.write(found, out)
    gpu_report.print_table(console, found)
    if out is not None:
        console.print(f"written to {out}", highlight=False)
    return 1 if found.failures else 0


def _run_apart(name: str, where: Where) -> Part:
    """Run a section in its own process, which shares this one's terminal."""
    from streamer.loadtest.inside.gpu.report import Part

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        limit_s = SECTIONS[name].budget_s + GRACE_S
        failure = run_apart(_command(name, where, file), limit_s)
        part = msgspec.json.decode(file.read_bytes(), type=Part) if file.exists() else Part([])
        trace = part.traceback
        if failure and not trace and _trace_of(file).exists():
            trace = _trace_of(file).read_text(encoding="utf-8")
    return Part(part.figures, part.failure or failure, trace)


def _trace_of(file: Path) -> Path:
    """Where a section that hangs writes what its threads are at; `file` is its part's."""
    return file.with_suffix(".trace")


def _command(name: str, where: Where, file: Path) -> list[str]:
    """The command line that runs a section and writes its part to a file."""
    command = [sys.executable, "-m", "streamer", "bench", "gpu", "--only", name]
    command += ["--device", where.device.type, "--part", str(file)]
    return command + (["--tiny"] if where.is_tiny else [])


def _run_here(name: str, where: Where, console: Console, file: Path | None) -> Part:
    """Run a section in this process; each figure is written to `file` at once."""
    from streamer.loadtest.inside.gpu import report as gpu_report

    section = SECTIONS[name]
    status = console.status(name) if console.is_terminal else nullcontext()
    with status as shown:
        say = shown.update if shown is not None else _unseen
        report = gpu_report.Report(
            name, section.budget_s, say, console, has_targets=not where.is_tiny, file=file
        )
        try:
            _function(name)(where, report)
        except Exception as error:  # of any kind: the other sections are still to be run
            report.fail(error)
    return report.part


def _unseen(what: str) -> None:
    """Ignores progress, where there is no terminal; figures are printed all the same."""


def _sections(only: str | None) -> list[str]:
    """The chosen sections, in the bench's order; ConfigError names an unknown one."""
    requested = [name.strip() for name in only.split(",")] if only else list(SECTIONS)
    for name in requested:
        if name not in SECTIONS:
            raise ConfigError(f"--only: {name!r} is not one of {', '.join(SECTIONS)}", param="only")
    return [name for name in SECTIONS if name in requested]


def _where(device: str, *, is_tiny: bool) -> Where:
    """The device; ConfigError where it is missing, or only supports --tiny."""
    import torch

    from streamer.loadtest.inside.gpu.models import Where

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("torch.cuda.is_available() is false: no GPU here", param="device")
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if device == "cpu" and not is_tiny:
        raise ConfigError(
            "there is no GPU to measure; --device cpu --tiny only tries the code", param="device"
        )
    if device == "cuda":
        return Where(torch.device("cuda", torch.cuda.current_device()), is_tiny)
    return Where(torch.device("cpu"), is_tiny)

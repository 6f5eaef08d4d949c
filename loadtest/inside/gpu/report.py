"""The output of `streamer bench gpu`: figures beside their targets, as lines, a table and JSON.

Values and their printing; measures nothing. Used by command.py and the sections beside it.
"""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.errors import StreamerError
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

PACKAGES = ("torch", "triton", "transformers", "numpy")
TINY = "tiny shapes: they exercise the code and say nothing about speed"


class OutOfTime(StreamerError):
    """A section has reached its time limit."""


class AtMost(float):
    """A target that is a maximum."""


class Figure(msgspec.Struct, frozen=True):
    """One measured number.

    what       the model or shape
    measure    the measured quantity;  unit  its unit
    note       what it is compared with, or how it was taken
    target     its minimum, or its maximum where `is_ceiling`; None: no target
    """

    section: str
    what: str
    measure: str
    value: float
    unit: str
    note: str = ""
    target: float | None = None
    is_ceiling: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.is_ceiling else self.value >= self.target


class Part(msgspec.Struct, frozen=True):
    """A section's figures, and its error with the traceback, or ""."""

    figures: list[Figure]
    failure: str = ""
    traceback: str = ""


class Results(msgspec.Struct, frozen=True):
    """A run so far, as written to JSON. `failures`: section -> error; `tracebacks` likewise."""

    device: str
    date: str
    is_tiny: bool
    note: str
    versions: dict[str, str]
    seconds: dict[str, float]
    figures: list[Figure]
    met: dict[str, bool]
    failures: dict[str, str]
    tracebacks: dict[str, str]


class Report:
    """Collects one section's progress and figures, and enforces its time limit."""

    def __init__(
        self,
        section: str,
        budget_s: float,
        show: Callable[[str], None],
        console: Console,
        *,
        has_targets: bool = True,
        file: Path | None = None,
    ) -> None:
        """Without `has_targets` targets are dropped (tiny shapes). `file` gets the latest part."""
        self.part = Part([])
        self._file = file
        self._section = section
        self._budget_s = budget_s
        self._began = time.perf_counter()
        self._show = show
        self._console = console
        self._has_targets = has_targets

    def doing(self, what: str) -> None:
        """Show progress; OutOfTime after the section's time limit."""
        self.check()
        self._show(f"{self._section}: {what}")

    def check(self) -> None:
        """OutOfTime after the section's time limit."""
        if self.left_s <= 0:
            raise OutOfTime(f"not done within its {self._budget_s:g} s")

    @property
    def left_s(self) -> float:
        """Seconds that the section has left."""
        return self._budget_s - (time.perf_counter() - self._began)

    def add(
        self,
        what: str,
        measure: str,
        value: float,
        unit: str,
        note: str = "",
        target: float | None = None,
    ) -> None:
        """Add a figure; it is kept even if the section fails later."""
        target = target if self._has_targets else None
        is_ceiling = isinstance(target, AtMost)
        plain = None if target is None else float(target)  # msgspec writes no AtMost
        figure = Figure(self._section, what, measure, float(value), unit, note, plain, is_ceiling)
        self._keep(Part([*self.part.figures, figure]))
        self._console.print(
            f"{figure.section}: {what}, {measure}: {number(value)} {unit}", highlight=False
        )

    def fail(self, error: BaseException) -> None:
        """Record why the section failed, and where."""
        where = "".join(traceback.format_exception(error))
        self._keep(Part(self.part.figures, describe(error), where))

    def _keep(self, part: Part) -> None:
        """Write the part to the file at once, for a process that dies later. A part that can't be
        written is none, so that `fail` can write why."""
        written = msgspec.json.encode(part)
        self.part = part
        if self._file is not None:
            self._file.write_bytes(written)


def number(value: float) -> str:
    """Three significant digits, grouped by thousands."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's kind."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def versions() -> dict[str, str]:
    """Versions of Python, the driver's CUDA and the packages used."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def results(
    device: torch.device, parts: dict[str, Part], seconds: dict[str, float], *, is_tiny: bool
) -> Results:
    """The results of the sections so far, dated now."""
    figures = [figure for part in parts.values() for figure in part.figures]
    return Results(
        device=device_name(device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        is_tiny=is_tiny,
        note=TINY if is_tiny else "",
        versions=versions(),
        seconds=seconds,
        figures=figures,
        met={
            f"{f.section}: {f.what}, {f.measure}": f.is_met for f in figures if f.is_met is not None
        },
        failures={name: part.failure for name, part in parts.items() if part.failure},
        tracebacks={name: part.traceback for name, part in parts.items() if part.traceback},
    )


def print_table(console: Console, found: Results) -> None:
    """All figures; where a target is set, whether it was met."""
    title = f"{found.device}, {found.date[:10]}" + (f" ({found.note})" if found.note else "")
    rows = [("section", "what", "measure", "value", "target", "met", "beside")]
    for f in found.figures:
        target, met = "", ""
        if f.target is not None:
            target = f"{'<=' if f.is_ceiling else '>='} {number(f.target)}"
            met = "yes" if f.is_met else "no"
        value = f"{number(f.value)} {f.unit}"
        rows.append((f.section, f.what, f.measure, value, target, met, f.note))
    for section, why in found.failures.items():
        rows.append((section, "", "failed", "", "", "", why))
    console.print(terminal(rows, title, words=(0, 1, 2, 5, 6)))


def write(found: Results, out: Path) -> None:
    """Write indented JSON."""
    out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def default_out(device: torch.device) -> Path:
    """gpu-<device>.json in a checkout's loadtest/results, else in the folder it is run from."""
    folder = Path(__file__).resolve().parents[2] / "results"
    slug = "-".join(device_name(device).lower().replace("/", " ").split())
    return (folder if folder.is_dir() else Path()) / f"gpu-{slug}.json"


def describe(error: BaseException) -> str:
    """An error in a line, with its kind unless it is one of ours."""
    kind = "" if isinstance(error, StreamerError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0] if str(error) else type(error).__name__

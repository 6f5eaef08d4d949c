"""Objectives in a TOML file, and whether what was measured meets them. No clock, no server.

    [[objective]]
    statistic = "TTFT"
    user = "SseChat"      # absent: all users that measure it, together
    p95_ms = 500

An objective may set several of p50_ms, p95_ms, p99_ms (at most), error_share (at most), requests_s
and tokens_s (at least). An objective whose users did not run is not judged, and the table says so;
one whose users ran and measured nothing is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from .table import Rows, number

AT_MOST = ("p50_ms", "p95_ms", "p99_ms", "error_share")
AT_LEAST = ("requests_s", "tokens_s")


class Statistics(msgspec.Struct, frozen=True):
    """A statistic's measured values, in the units of the objectives."""

    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    error_share: float
    requests_s: float
    tokens_s: float


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits set for one statistic."""

    statistic: str
    user: str = ""
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    error_share: float | None = None
    requests_s: float | None = None
    tokens_s: float | None = None

    @property
    def label(self) -> str:
        return f"{self.statistic} {self.user}".strip()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    objective: list[Objective]


class Verdict(msgspec.Struct, frozen=True):
    """One row: `measured` is None where nothing was; `is_met` is None where no user ran for it."""

    label: str
    field: str
    target: float
    measured: float | None
    is_met: bool | None


def read(file: Path, statistics: Iterable[str]) -> list[Objective]:
    """The objectives; ValueError names what is wrong with the file, OSError if there is none."""
    known = set(statistics)
    try:
        found = msgspec.toml.decode(file.read_bytes(), type=_File).objective
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    for objective in found:
        if objective.statistic not in known:
            names = ", ".join(sorted(known))
            raise ValueError(
                f"{file}: unknown statistic {objective.statistic!r}; choose from {names}"
            )
        if all(getattr(objective, field) is None for field in AT_MOST + AT_LEAST):
            raise ValueError(f"{file}: the objective {objective.label} sets no limit")
    return found


def judge(
    objectives: Iterable[Objective], measure: Callable[[str, str], Statistics | None]
) -> list[Verdict]:
    """A row for each limit of each objective.

    measure  (statistic, user or "") -> what was measured; None where no user that measures it ran
    """
    rows = []
    for objective in objectives:
        found = measure(objective.statistic, objective.user)
        for field in AT_MOST + AT_LEAST:
            target = getattr(objective, field)
            if target is None:
                continue
            value = getattr(found, field) if found is not None and found.count else None
            is_met = None if found is None else _is_met(field, target, value)
            rows.append(Verdict(objective.label, field, target, value, is_met))
    return rows


def _is_met(field: str, target: float, value: float | None) -> bool:
    if value is None:
        return False
    return value <= target if field in AT_MOST else value >= target


def is_met(verdicts: Iterable[Verdict]) -> bool:
    """Whether every judged objective is met, and at least one was judged."""
    counted = [verdict.is_met for verdict in verdicts if verdict.is_met is not None]
    return bool(counted) and all(counted)


def table_rows(verdicts: Iterable[Verdict]) -> Rows:
    """For table.plain or table.markdown."""
    says = {True: "met", False: "missed", None: "did not run"}
    rows = [["objective", "", "target", "measured", ""]]
    for v in verdicts:
        sign = "<= " if v.field in AT_MOST else ">= "
        target = sign + number(v.target)
        rows.append([v.label, v.field, target, number(v.measured), says[v.is_met]])
    return rows

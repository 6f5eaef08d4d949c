"""Objectives from TOML, and the verdicts on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer.loadtest import slo
from streamer.loadtest.users.options import SLO

KNOWN = ("TTFT", "E2E", "ITL", "TPOT", "CANCEL", "RESUME")
FOUND = slo.Statistics(10, 5.0, 9.0, 10.0, 0.1, 2.0, 64.0)


def verdicts(text: str, folder: Path, found: slo.Statistics | None = FOUND) -> list[slo.Verdict]:
    file = folder / "slo.toml"
    file.write_text(text)
    return slo.judge(slo.read(file, KNOWN), lambda statistic, user: found)


@pytest.mark.parametrize(
    ("limits", "is_met"),
    [
        ("p50_ms = 5", True),
        ("p50_ms = 4.9", False),
        ("p95_ms = 9", True),
        ("p99_ms = 9.9", False),
        ("error_share = 0.1", True),
        ("error_share = 0.09", False),
        ("requests_s = 2", True),
        ("requests_s = 2.1", False),
        ("tokens_s = 64", True),
        ("tokens_s = 65", False),
        ("p50_ms = 9\ntokens_s = 65", False),
    ],
)
def test_limits_are_met_or_missed(limits: str, is_met: bool, tmp_path: Path) -> None:
    found = verdicts(f'[[objective]]\nstatistic = "E2E"\n{limits}\n', tmp_path)
    assert slo.is_met(found) is is_met
    assert len(found) == limits.count("=")


def test_an_objective_without_measurements_is_missed_and_an_absent_user_is_not_counted(
    tmp_path: Path,
) -> None:
    text = '[[objective]]\nstatistic = "E2E"\nuser = "Lanes"\np50_ms = 5\n'
    nothing = slo.Statistics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert [v.is_met for v in verdicts(text, tmp_path, nothing)] == [False]
    absent = verdicts(text, tmp_path, None)
    assert [v.is_met for v in absent] == [None]
    assert not slo.is_met(absent)  # nothing was measured, so the exit code must not be 0
    assert slo.is_met([*absent, slo.Verdict("", "p50_ms", 1.0, 1.0, True)])
    assert slo.table_rows(absent)[1] == ["E2E Lanes", "p50_ms", "<= 5", "-", "did not run"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[objective]]\nstatistic = "E2E"\np51_ms = 5\n', "p51_ms"),
        ('[[objective]]\nstatistic = "E2F"\np50_ms = 5\n', "unknown statistic 'E2F'"),
        ('[[objective]]\nstatistic = "E2E"\n', "sets no limit"),
        ("[[objective]\n", "slo.toml"),
    ],
)
def test_mistakes_in_the_file_are_reported(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        verdicts(text, tmp_path)


def test_the_file_that_comes_along() -> None:
    assert {o.statistic for o in slo.read(SLO, KNOWN)} == set(KNOWN)

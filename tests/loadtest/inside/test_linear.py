"""bench linear: its rates by hand, and one small run."""

from __future__ import annotations

import pytest

from streamer.cli import main
from streamer.loadtest.inside.linear import FORMS, Measured, table


def test_rates_are_those_worked_out_by_hand() -> None:
    dense = Measured("bfloat16", 10**9, 2 * 10**9, {1: 0.05, 32: 0.1}, 50e9)
    codes = Measured("Q4_0", 10**9, 5 * 10**8, {1: 0.02, 32: 0.05}, 25e9)
    heading, first, second = table([dense, codes])
    assert heading[2:] == ("1 row, GB/s", "of a sum's", "32 rows, GOP/s", "/ bf16")
    assert first == ("bfloat16", "16.00", "40.0", "0.80", "640", "1.00")
    assert second == ("Q4_0", "4.00", "25.0", "1.00", "1,280", "2.00")


def test_every_form_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "1", "--rows", "1", "2", "--seconds", "0", "--threads", "1"]
    assert main(["bench", "linear", *flags]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("bfloat16", *FORMS))

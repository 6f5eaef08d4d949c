"""bench load: its rates by hand, and one small run of every format."""

from __future__ import annotations

import pytest

from streamer.cli import main
from streamer.loadtest.inside.loading import Measured, schemes, table


def test_rates_are_those_worked_out_by_hand() -> None:
    heading, row = table([Measured("Q4_0", 10**9, 0.5, 0.2, 0.1, 0.05, 0.2, 0.4)])
    assert heading[:6] == ("format", "MB", "plain, GB/s", "new", "read", "parse")
    assert heading[6:] == ("pack", "both", "/ new", "load", "/ plain")
    assert row[:6] == ("Q4_0", "1000", "2.0", "5.0", "10.0", "20.0")
    assert row[6:] == ("5.0", "4.0", "0.80", "2.5", "1.2")
    assert table([Measured("dense", 10**9, 0.5, 0.2, 0.1, 0.0001, 0.2, 0.4)])[1][5] == "-"


def test_every_format_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "1", "--repeats", "1", "--threads", "1"]
    assert main(["bench", "load", *flags]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in schemes())
    assert main(["bench", "load", "--formats", "Q9"]) == 1
    assert "Q9 is none of: GGUF Q4_0; GGUF Q4_1; " in capsys.readouterr().err
    for flag in ("--layers", "--scale", "--repeats", "--threads"):
        assert main(["bench", "load", flag, "0"]) == 1
        assert f"{flag} must be at least 1" in capsys.readouterr().err

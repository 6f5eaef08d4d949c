"""bench linear: its rates by hand, and one small run."""

from __future__ import annotations

import pytest

from streamer.cli import main
from streamer.loadtest.inside import prompts
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


def test_prompts_are_paired_by_round() -> None:
    times = {form: [1.0, 1.0, 2.0] for form in prompts.FORMS}
    times |= {"bfloat16": [2.0, 4.0, 2.0], "int4": [0.5, 2.0, 1.0]}
    heading, row = prompts.table({512: times})
    assert heading[2:5] == ("int8", "/ bf16", "lowest")
    assert row[:5] == ("512", "256", "512", "2.00", "1.00")
    assert row[8:11] == ("512", "2.00", "2.00")


def test_whole_prompts_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    """Of more than one step, too."""
    words = ["bench", "linear", "--rows", "--threads", "1"]
    assert main([*words, "--prompts", "40", "600"]) == 0
    shown = capsys.readouterr().out
    assert "layers" not in shown
    assert [line.split()[0] for line in shown.splitlines()[-2:]] == ["40", "600"]
    assert main([*words, "--model", "anything"]) == 1
    assert "--model: only --prompts reads one" in capsys.readouterr().err

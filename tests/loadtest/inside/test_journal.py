"""The journal's benchmark: pairs of short runs, and the interval of their ratios."""

from __future__ import annotations

import re

import pytest

from streamer.cli import main
from streamer.loadtest.inside.journal import median_and_interval


def test_two_pairs_with_the_fake_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "fake:tokens_per_s=200", "--pairs", "2", "--seconds", "1"]
    assert main(["bench", "journal", *flags, "--streams", "4", "--tokens", "20"]) == 0
    output = capsys.readouterr().out
    found = re.search(r"\| tokens/s \| ([\d,.]+) \| ([\d,.]+) \|", output)
    assert found, output
    assert all(0 < float(value.replace(",", "")) <= 4 * 200 * 1.5 for value in found.groups())


def test_the_interval_of_twenty_pairs_is_between_their_sixth_and_fifteenth() -> None:
    assert median_and_interval([float(i) for i in range(1, 21)]) == (10.5, 6.0, 15.0)
    assert median_and_interval([3.0]) == (3.0, 3.0, 3.0)

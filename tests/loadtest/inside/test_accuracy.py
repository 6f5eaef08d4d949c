"""bench accuracy: its figures against ones worked out by hand, and one small run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from streamer.cli import main
from streamer.errors import ConfigError
from streamer.loadtest.inside.accuracy import command as accuracy


def test_figures_are_those_worked_out_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.25, 0.75], [0.8, 0.2]]).log()
    found = accuracy.score("case", [[0, 0, 1, 0]], [p], [q])
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert found.kl_mean == pytest.approx((first + second) / 2, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-(math.log(0.75) + math.log(0.8)) / 2))
    assert found.same_best == 0.5
    assert found.num_tokens == 2


def test_windows_are_whole_and_at_most_as_many_as_requested() -> None:
    assert accuracy.cut(range(10), 4, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert accuracy.cut(range(10), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match="3 tokens"):
        accuracy.cut(range(3), 4, 1)


def test_the_bundled_model_loses_no_more_than_its_table_says(tmp_path: Path) -> None:
    """docs/quantization.md has the figures of more text: int8 0.0001, int4 0.004.

    The text is right, too: a model that never saw such stories has a perplexity of thousands.
    """
    out = tmp_path / "scores.json"
    flags = ["--windows", "2", "--context", "256", "--quantization", "int8", "int4"]
    assert main(["bench", "accuracy", *flags, "--json", str(out)]) == 0
    dense, int8, int4 = json.loads(out.read_text())
    assert dense["num_tokens"] == 2 * 127
    assert 1 < dense["perplexity"] < 20
    assert dense["kl_mean"] == 0
    assert 0 < int8["kl_mean"] < 0.0005
    assert int8["kl_mean"] < int4["kl_mean"] < 0.015
    assert int4["same_best"] > 0.95

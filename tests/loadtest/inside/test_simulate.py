"""`streamer simulate`: its figures against arithmetic done by hand, and its picture."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from streamer.cli.arguments import UsageError
from streamer.core.plan import Facts
from streamer.errors import ContextLengthExceeded
from streamer.loadtest.inside.simulate import (
    Workload,
    add_arguments,
    contiguous,
    paged_waste,
    run,
    simulate,
    static_batching,
    workload_from,
)

SWAP = Facts(prefill_s=1.0, swap_bytes_per_s=1e12, swap_fixed_s=0.0)
RECOMPUTE = Facts(prefill_s=1e-12, swap_bytes_per_s=1.0)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_textbook_batch() -> None:
    work = Workload(lengths=(32, 128, 64, 256))
    assert static_batching(work) == (256, 480 / 1024)
    outcome = simulate(work, SWAP, 1 << 20)
    assert outcome.samples == 480
    assert outcome.slot_efficiency == 1.0
    assert outcome.preemptions_swap == outcome.preemptions_recompute == outcome.saved == 0
    assert paged_waste(outcome, 16) < 0.1 < contiguous(work)[1]


def test_freed_rows_are_given_to_waiting_requests() -> None:
    work = Workload(lengths=(10, 100, 10, 100), rows=2)
    assert static_batching(work)[0] == 200
    assert sum(1 for s in simulate(work, SWAP, 1).steps if s.samples) <= 121


def test_16_choices_of_a_200_token_prompt_save_195_blocks() -> None:
    work = Workload(lengths=(8,), n=16, prompt=10, shared_prefix=190)
    outcome = simulate(work, SWAP, 1)
    assert outcome.steps[0].listed == 208
    assert outcome.steps[0].held == 13
    assert outcome.saved == 195
    assert outcome.copied_blocks == 15


@pytest.mark.parametrize(("costs", "is_swap"), [(SWAP, True), (RECOMPUTE, False)])
def test_a_small_pool_preempts_as_the_costs_say(costs: Facts, is_swap: bool) -> None:
    work = Workload(lengths=(60,) * 8, pool=24)
    outcome = simulate(work, costs, 1)
    assert outcome.samples == 480
    assert (outcome.preemptions_swap > 0) == is_swap
    assert (outcome.preemptions_recompute > 0) != is_swap
    assert outcome.peak_held <= 24


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """16 prompt and 49 output tokens are 5 blocks of 16; 48 would be 4."""
    says = r"16 prompt and 49 output tokens need 5 blocks of 16 tokens; the KV pool has 4"
    with pytest.raises(ContextLengthExceeded, match=says):
        run(parse("--lengths", "5,49", "--pool", "4"), Console(record=True))
    assert simulate(Workload(lengths=(5, 48), pool=4), SWAP, 1).samples == 53


def test_flags_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="--lengths must be numbers"):
        workload_from(parse("--lengths", "a,b"))
    with pytest.raises(UsageError, match="--block-size must be from 1"):
        workload_from(parse("--lengths", "5", "--block-size", "0"))


def test_the_reports_figures_are_those_of_a_calculation_by_hand() -> None:
    """Prompts of 16 and outputs of 32, 128, 64 and 256, in blocks of 16.

    Reserved: 4 rows of (16 + 256) / 16 = 17 blocks, 68; used 64 + 480 of their 1088 tokens.
    Held: when n tokens are drawn, the KV of 15 + n is there. Of the last steps in which 4, 3, 2
    and 1 requests run (n = 32, 64, 128, 256), that is 4 x 3, 3 x 5, 2 x 9 and 17 blocks: 18.
    Computed: all tokens but the last of each answer, 64 + 480 - 4.
    """
    console = Console(record=True, width=120)
    assert run(parse("--lengths", "32,128,64,256"), console) == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]
    rows = {first: rest for first, *rest in lines}
    assert rows["steps that draw tokens"] == ["256", "256"]
    assert rows["slot efficiency"] == ["46.9%", "100.0%"]
    assert rows["KV blocks, at most"] == ["68", "18 of 69"]
    assert rows["of their room wasted"][0] == "50.0%"
    assert rows["tokens computed"] == ["540"]
    assert rows["preemptions by swap"] == rows["preemptions by recompute"] == ["0"]


def test_the_report_and_the_plot(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    file = tmp_path / "run.svg"
    words = ("--lengths", "32,128,64,256", "--pool", "20", "--shared-prefix", "40")
    assert run(parse(*words, "--plot", str(file)), console) == 0
    text = console.export_text()
    assert "46.9%" in text
    assert "blocks saved by sharing" in text
    root = ElementTree.fromstring(file.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) > 8
    with pytest.raises(UsageError, match="--plot"):
        run(parse(*words, "--plot", str(tmp_path / "no" / "such.svg")), console)

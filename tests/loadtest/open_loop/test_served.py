"""Figures computed from outcomes, by hand; their tables and curves."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from streamer.loadtest.open_loop import sweep
from streamer.loadtest.open_loop.fitting import Cut
from streamer.loadtest.open_loop.served import (
    UNFINISHED,
    Conditions,
    Outcome,
    Values,
    percentile,
    summary,
)

GOALS = {"ttft": 100.0, "tpot": 60.0}
OUTCOMES = [
    Outcome(0.0, 0.0, 0.3, 0.1, [0.1, 0.1], 10, 4, 5),
    Outcome(0.5, 0.5, 1.0, 0.2, [0.8], 20, 0, 3),
    Outcome(0.6, 0.7, 0.1, 0.1, [], 30, 0, 1),
    Outcome(1.0, 1.0, error="503"),
]


def result(rate: float = 2.0, outcomes: list[Outcome] = OUTCOMES) -> Values:
    conditions = Conditions("20261122-010203", "alpaca", "m", rate, 1.0, GOALS, 0, Cut(1024, 2, 1))
    return summary(outcomes, conditions, 2.0)


def test_sums_and_rates() -> None:
    values = result()
    expected = {
        "completed": 3,
        "failed": 1,
        "num_prompts": 4,
        "request_rate": 2.0,
        "total_input_tokens": 60,
        "total_cached_tokens": 4,
        "total_output_tokens": 9,
        "request_throughput": 1.5,
        "output_throughput": 4.5,
        "total_token_throughput": 34.5,
        "request_goodput": 1.0,  # the first and the third
        "goodput_share": 0.5,
        "max_concurrent_requests": 2,
        "max_output_tokens_per_s": 5.0,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["mean_ttft_ms"] == pytest.approx(400 / 3)
    assert values["median_tpot_ms"] == pytest.approx((50 + 400) / 2)  # the third has one token
    assert values["median_itl_ms"] == pytest.approx(100)
    assert values["p99_start_lag_ms"] == pytest.approx(97)
    assert values["errors"] == ["", "", "", "503"]
    assert result(float("inf"))["request_rate"] == "inf"


def test_the_names_of_vllm_bench_serve() -> None:
    names = "date backend label model_id num_prompts request_rate burstiness duration completed "
    names += "failed total_input_tokens total_output_tokens request_throughput request_goodput "
    names += "output_throughput total_token_throughput max_output_tokens_per_s "
    names += (
        "max_concurrent_requests input_lens output_lens ttfts itls latencies start_times errors"
    )
    for metric in ("ttft", "tpot", "itl", "e2el"):
        names += "".join(f" {kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99"))
    assert set(names.split()) <= set(result())


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count: int) -> None:
    values = [float(value) for value in np.random.default_rng(count).normal(size=count)]
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], 50) == 0.0


def test_nothing_but_failures() -> None:
    values = result(outcomes=OUTCOMES[3:])
    assert (values["completed"], values["goodput_share"], values["p99_ttft_ms"]) == (0, 0.0, 0.0)


def test_a_rate_is_held_only_if_what_finishes_keeps_up() -> None:
    """A hundred requests within a second are a burst: all good, but more than finish per second."""

    def answered(rate: float, done_s: float) -> Values:
        """Each within its time; `done_s` of them finish per second."""
        outcomes = [Outcome(i / rate, i / rate, (i + 1) / done_s - i / rate) for i in range(100)]
        conditions = Conditions("d", "alpaca", "m", rate, 1.0, {}, 0, Cut(1024, 0, 0))
        return summary(outcomes, conditions, 100 / done_s)

    burst, steady = answered(117.0, 8.9), answered(8.0, 8.0)
    assert burst["goodput_share"] == 1.0
    assert burst["request_throughput"] == pytest.approx(8.9)
    assert "Sustained up to 8 requests/s (90% of requests are answered" in sweep.report(
        [burst, steady]
    )
    assert "No rate sustained" in sweep.report([burst])


def test_only_requests_after_the_warm_up_count_and_only_answers_within_the_time() -> None:
    outcomes = [Outcome(float(i), float(i), 1.5, 0.5, [0.5, 0.5], 10, 0, 3) for i in range(6)]
    outcomes += [Outcome(5.5, 5.5, error=UNFINISHED)]
    conditions = Conditions(
        "d", "alpaca", "m", 1.0, 1.0, {}, 0, Cut(1024, 0, 0), warmup_s=2.0, asked_s=4.0
    )
    values = summary(outcomes, conditions, 9.0)
    counts = [values[name] for name in ("num_prompts", "completed", "failed", "unfinished")]
    assert counts == [5, 4, 0, 1]
    assert values["duration"] == 4.0
    assert values["request_throughput"] == 1.0  # those of 1 to 4 end from 2.5 to 5.5
    assert values["output_throughput"] == 3.0
    assert values["start_times"] == [2.0, 3.0, 4.0, 5.0, 5.5]


def test_tables_and_curves() -> None:
    results = [result(4.0), result(2.0, OUTCOMES[:1]), result(float("inf"))]
    page = sweep.report(results, is_markdown=True)
    assert (
        "sustained up to 2 requests/s (90% of requests meet them, and completions keep up" in page
    )
    lines = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert lines == ["| requests/s", "| ---", "| 2", "| 4", "| inf"]
    root = ElementTree.fromstring(sweep.svg(results))
    curves = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(curve.attrib["points"].split()) for curve in curves] == [2] * 4
    assert "eld" not in sweep.report([result(float("inf"))])
    assert "the highest that was tried" in sweep.report([result(2.0, OUTCOMES[:1])])

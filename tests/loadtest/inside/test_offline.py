"""`streamer bench offline` with the fake model: its sums, its files, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamer.cli import main
from streamer.loadtest.inside.offline.report import Latency, Pool, Results, Swap, Throughput, report

FLAGS = ["bench", "offline", "--model", "fake", "--input-len", "40", "--output-len", "24"]


def test_all_parts_and_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 sequences of 64 tokens need 48 blocks of 16; half of them is 24, which is too few."""
    file = tmp_path / "found.json"
    sizes = ["--num-prompts", "12", "--batch-size", "3", "--num-iters", "4"]
    assert main([*FLAGS, *sizes, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["model"], found["settings"]["input_len"]) == ("fake", 40)
    whole = found["throughput"]
    assert whole["total_num_tokens"] == 12 * 64
    assert whole["requests_per_second"] == pytest.approx(12 / whole["elapsed_time"])
    assert whole["output_tokens_per_second"] == pytest.approx(12 * 24 / whole["elapsed_time"])
    assert len(found["latency"]["latencies"]) == 4
    assert {len(rates) for rates in found["grammar"]["tokens_per_second"].values()} == {3}
    times = found["latency"]["percentiles"]
    assert 0 < times["50"] <= times["90"] <= times["99"] <= max(found["latency"]["latencies"])
    large, small = found["swap"]["large"], found["swap"]["small"]
    assert (large["num_blocks"], small["num_blocks"]) == (54, 24)
    assert large["preemptions_swap"] == large["swapped_blocks"] == 0
    assert small["preemptions_swap"] > 0 < small["swapped_blocks"]
    assert small["swapped_bytes"] == small["swapped_blocks"] * 16 << 14
    assert found["swap"]["num_equal"] == 12
    output = capsys.readouterr().out
    assert "| batch of 3, 4 iterations |" in output
    assert "| 12 answers: half, step by step |" in output
    assert "| small pool, 24 blocks of 16 |" in output
    assert "equal with both: 12 of 12." in output


def test_parts_by_name(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    sizes = ["--only", "latency", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert main([*FLAGS, *sizes, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["throughput"] is found["swap"] is None
    assert len(found["latency"]["latencies"]) == 1


def test_a_pool_without_room_to_swap_recomputes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--only", "swap", "--num-prompts", "8", "--swap-space", "0"]
    assert main(flags) == 0
    assert "Nothing was swapped" in capsys.readouterr().out


def test_differing_answers_are_reported() -> None:
    pool = Pool(8, 1.0, 100.0, 2, 0, 40, 4_000_000_000, 0.5)
    results = Results(date="", settings={"num_prompts": 3, "input_len": 1, "output_len": 2})
    results.swap = Swap(large=pool, small=pool, num_equal=2)
    assert pool.gb_s == 8.0
    assert "equal with both: 2 of 3." in report(results)


def test_sums_by_hand() -> None:
    found = Throughput.of(4.0, 8, 30, 10)
    assert (found.requests_per_second, found.total_num_tokens) == (2.0, 320)
    assert (found.input_tokens_per_second, found.output_tokens_per_second) == (60.0, 20.0)
    assert found.tokens_per_second == 80.0
    latency = Latency.of([1.0, 2.0, 3.0], 5)
    assert (latency.avg_latency, latency.percentiles[50]) == (2.0, 2.0)
    assert latency.percentiles[99] == pytest.approx(2.98)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--only", "speed"], "'speed' is not one of throughput, latency, grammar, swap"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--pool-share", "2"], "--pool-share must be above 0"),
        (["--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0"),
        (["--max-model-len", "50", "--only", "latency"], "maximum context length is 50"),
    ],
)
def test_what_is_refused(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *flags]) == 1
    assert says in " ".join(capsys.readouterr().err.split())

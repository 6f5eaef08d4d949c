"""The open loop on a real server: requests that come when they are due, files, exit codes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from streamer.cli import main
from streamer.loadtest.open_loop import arrivals
from streamer.loadtest.open_loop import command as program
from streamer.loadtest.open_loop.driving import NOT_SENT, Driver, Ways, ask, measured_scale, request
from streamer.loadtest.open_loop.jobs import Job, Turn, WorkloadOptions, jobs, words
from streamer.loadtest.open_loop.served import Outcome
from streamer.loadtest.responses import check_counting
from streamer.loadtest.target import Target
from tests.loadtest.locusts import peer
from tests.server.support.running import Running

EASY = ["--goodput", "ttft:60000", "e2el:60000"]


def open_loop(flags: list[str]) -> int:
    return main(["loadtest", "open-loop", *flags])


def read(folder: Path, name: str) -> dict[str, Any]:
    found = json.loads((folder / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def ways(server: Running) -> Ways:
    return Ways(Target.of(server.url), "fake")


def test_rates_files_and_tokens(slow: Running, tmp_path: Path) -> None:
    """The server gives every answer exactly the number of tokens asked for."""
    flags = ["--url", slow.url, "--workload", "alpaca", "--requests", "12", "--out", str(tmp_path)]
    assert open_loop([*flags, "--rates", "20", "inf", *EASY]) == 0
    twenty, whole = read(tmp_path, "20qps.json"), read(tmp_path, "infqps.json")
    expected = jobs("alpaca", WorkloadOptions(12, 0))
    for result in (twenty, whole):
        assert result["output_lens"] == [job.turns[0].max_tokens for job in expected]
        assert result["completed"] == 12
        assert result["goodput_share"] == 1.0
        assert result["total_output_tokens"] == sum(result["output_lens"])
        assert result["errors"] == [""] * 12
    assert twenty["start_times"][-1] >= 11 / 20  # sent when it was due, not before
    assert all(abs(n - 20) < 100 for n in twenty["input_lens"])
    assert "| 20 |" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "rates.svg").read_text(encoding="utf-8").startswith("<svg")
    slow.wait_idle()


def test_arrivals_do_not_wait_for_earlier_answers(slow: Running) -> None:
    """All are sent while the first answer is still streaming."""
    work = [Job((Turn("count", 80),)) for _ in range(6)]
    done: list[Outcome] = []
    outcomes, _ = Driver(ways(slow), done.append).run(work, [0.01 * i for i in range(6)])
    assert max(outcome.start_s for outcome in outcomes) < outcomes[0].latency_s
    assert len(done) == 6


async def test_answers_are_whole(slow: Running) -> None:
    turn = Turn("count", 30)
    messages = [{"role": "user", "content": turn.prompt}]
    reply = await ask(ways(slow), request(ways(slow), messages, turn))
    check_counting(reply.text, 30)
    ids = await ask(ways(slow), request(ways(slow), [], Turn([1, 2, 3], 7)))
    check_counting(ids.text, 7)
    assert (ids.num_prompt_tokens, ids.num_tokens) == (3, 7)


def test_turns_follow_one_another(slow: Running) -> None:
    """Each has everything before it in its prompt, and begins when the one before has ended."""
    job = Job((Turn("one", 4), Turn("two", 5), Turn("three", 6)), "be brief")
    outcomes, _ = Driver(ways(slow), lambda _: None).run([job], [0.0])
    assert [outcome.num_output for outcome in outcomes] == [4, 5, 6]
    for before, after in itertools.pairwise(outcomes):
        assert after.start_s >= before.start_s + before.latency_s
        assert after.num_input > before.num_input + before.num_output


def test_turns_that_are_never_sent_fail_too() -> None:
    """Otherwise a conversation that fails at once weighs less than one that goes on to its end."""
    done: list[Outcome] = []
    job = Job(tuple(Turn("one", 4) for _ in range(3)))
    with peer() as url:
        outcomes, _ = Driver(Ways(Target.of(url), "unknown"), done.append).run([job], [0.0])
    assert outcomes == done
    assert outcomes[0].error.startswith("404")
    assert [outcome.error for outcome in outcomes[1:]] == [NOT_SENT] * 2


def test_words_and_tokens(slow: Running) -> None:
    """The fake model has one token per byte; the last word has no space after it."""
    scale = measured_scale(ways(slow), lambda count: " ".join(["four"] * count))
    assert scale.words_per_token == 1 / 5
    assert 0 < scale.frame < 20
    assert len(words(random.Random(0), 9).split()) == 9


def test_a_sweep_ends_by_itself(
    slow: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server answers in 0.0001 ms, so every rate is too high."""
    monkeypatch.setattr(arrivals, "MIN_RATE", 20.0)
    flags = ["--url", slow.url, "--workload", "alpaca", "--requests", "3", "--out", str(tmp_path)]
    flags += ["--rates", "50", "--burstiness", "inf", "--sweep", "--goodput", "ttft:0.0001"]
    assert open_loop(flags) == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["25qps.json", "50qps.json"]
    assert "no rate sustained" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_rates_run_for_a_duration_after_a_warm_up(slow: Running, tmp_path: Path) -> None:
    flags = ["--url", slow.url, "--workload", "alpaca", "--out", str(tmp_path), "--rates", "20"]
    assert open_loop([*flags, "--duration", "1", "--warmup", "0.5", "--burstiness", "inf"]) == 0
    result = read(tmp_path, "20qps.json")
    assert (result["duration"], result["warmup_s"]) == (1.0, 0.5)
    assert abs(result["num_prompts"] - 20) <= 1
    assert min(result["start_times"]) >= 0.5
    header, line = (tmp_path / "rates.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(header.split(","), line.split(","), strict=True))
    assert row["request_rate"] == "20.0"
    assert float(row["p99_ttft_ms"]) == result["p99_ttft_ms"]


def test_concurrency_is_a_closed_loop(slow: Running, tmp_path: Path) -> None:
    flags = ["--url", slow.url, "--workload", "alpaca", "--out", str(tmp_path)]
    assert open_loop([*flags, "--max-concurrency", "2", "--requests", "7"]) == 0
    result = read(tmp_path, "infqps.json")
    assert (result["completed"], result["max_concurrent_requests"]) == (7, 2)
    assert open_loop([*flags, "--max-concurrency", "3", "--duration", "0.5", "--warmup", "0"]) == 0
    result = read(tmp_path, "infqps.json")
    assert result["max_concurrent_requests"] == 3
    assert max(result["start_times"]) <= 0.6
    slow.wait_idle()


def test_what_is_late_when_the_run_is_over_is_unfinished(
    slow: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "DRAIN_S", 0.05)
    flags = ["--url", slow.url, "--workload", "sharegpt", "--out", str(tmp_path), "--rates", "400"]
    assert open_loop([*flags, "--duration", "0.1", "--warmup", "0"]) == 0
    result = read(tmp_path, "400qps.json")
    assert result["unfinished"] > 0
    assert result["completed"] + result["unfinished"] == result["num_prompts"] == 40
    assert "No rate sustained" in (tmp_path / "report.md").read_text(encoding="utf-8")
    slow.wait_idle()


@pytest.mark.parametrize(("most_ms", "code"), [(60_000, 0), (0.0001, 1)])
def test_objectives_in_a_file_are_the_exit_code(
    slow: Running,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    most_ms: float,
    code: int,
) -> None:
    file = tmp_path / "slo.toml"
    file.write_text(f'[[objective]]\nstatistic = "TTFT"\np95_ms = {most_ms}\nerror_share = 0\n')
    flags = ["--url", slow.url, "--workload", "alpaca", "--requests", "3", "--rates", "inf"]
    assert open_loop([*flags, "--slo", str(file)]) == code
    assert ("missed" in capsys.readouterr().out) == bool(code)


def test_help_says_the_defaults_and_names_no_file_of_the_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert open_loop(["--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "(default: http://127.0.0.1:8000)" in output
    assert "default: 30, unless --requests is given" in output
    assert ".py" not in output


def test_a_trace_is_replayed(slow: Running, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %s, "input_length": 40, "output_length": %d}\n'
    trace.write_text(line % (100, 3) + line % (102, 4))
    flags = ["--url", slow.url, "--workload", "trace", "--trace", str(trace)]
    assert open_loop([*flags, "--time-scale", "0.1", "--out", str(tmp_path / "out")]) == 0
    result = read(tmp_path / "out", "10qps.json")
    assert result["output_lens"] == [3, 4]
    assert result["start_times"][1] >= 0.2


def test_failures_are_counted_and_reported(
    slow: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", slow.url, "--model", "fake", "--workload", "nano", "--requests", "2"]
    flags += ["--rates", "inf", "--out", str(tmp_path)]
    with peer() as url:
        assert open_loop([*flags, "--url", url]) == 1
    result = read(tmp_path, "infqps.json")
    assert (result["completed"], result["failed"]) == (0, 2)
    assert "404" in result["errors"][0]
    assert "Failed: 404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--goodput", "itl:5"], "--goodput itl:5"),
        (["--goodput", "ttft:x"], "--goodput ttft:x"),
        (["--sweep", "--rates", "inf"], "--sweep needs a finite rate"),
        (["--rates", "0"], "--rates must be above 0, not 0"),
        (["--duration", "-1"], "--duration must be above 0, not -1"),
        (["--rates", "inf"], "--rates inf needs --requests or --max-concurrency"),
        (["--slo", "/nowhere.toml"], "/nowhere.toml"),
        (["--url", "nowhere"], "'nowhere' is not an http"),
        (["--url", "http://127.0.0.1:9"], "refused"),
    ],
)
def test_invalid_flags_are_refused_with_a_message(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_loop(flags) == 2
    assert says in capsys.readouterr().out

"""Public tools against a server: their command lines, what counts as a failure, what is kept.

The tools themselves are not installed here: programs of a few lines replace them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamer.loadtest.compare.engines import Places
from streamer.loadtest.tools import __main__ as tools
from streamer.loadtest.tools import kept, with_guidellm, with_lm_eval, with_locust
from streamer.loadtest.tools.parts import MODEL, Command, Setting, Tool, Verdict
from streamer.loadtest.users.options import USERS
from tests.loadtest.locusts import peer
from tests.server.support.running import Running

OURS = Setting("http://127.0.0.1:8000", "m", True, 1024, 20)
OTHER = msgspec.structs.replace(OURS, is_ours=False)
TABLE = "|    Tasks    |Value|\n|---|\n|streamer_text|  2.4|"


def flags_of(command: Command) -> dict[str, str]:
    """--flag -> the word after it."""
    return dict(zip(command.flags, command.flags[1:], strict=False))


def test_every_command_asks_the_server_and_names_no_place_of_this_machine() -> None:
    for tool in tools.TOOLS.values():
        for command in tool.commands(OURS):
            assert OURS.url in command.line or command.name == "hf"
            assert "/tmp" not in command.line
            assert str(Path.home()) not in command.line
    for command in with_guidellm.TOOL.commands(OURS):
        assert flags_of(command)["--tokenizer"] == f"kind=hf_auto,model={MODEL}"


def test_a_line_can_be_pasted_into_a_shell() -> None:
    command = Command("n", "s", "tool", ("--a", "b c", '{"d": 1}', "e=f,g"))
    assert command.line == "tool --a 'b c' '{\"d\": 1}' e=f,g"


def test_only_our_server_gets_the_users_that_need_it() -> None:
    ours, other = (with_locust.TOOL.commands(s)[0].flags for s in (OURS, OTHER))
    assert ours[-len(USERS) :] == USERS
    assert other == (*ours[: -len(USERS)], "SseChat", "MultiTurn")


def test_both_runs_of_lm_eval_cut_texts_alike() -> None:
    served, oracle = with_lm_eval.TOOL.commands(OURS)
    assert "max_length=1024," in flags_of(served)["--model_args"]
    assert flags_of(oracle)["--model_args"].endswith("max_length=1022")
    assert flags_of(served)["--tasks"] == flags_of(oracle)["--tasks"]


def test_the_tasks_are_whole() -> None:
    folder = tools.HERE / "tasks"
    for name in ("choice", "text", "answer"):
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"task: streamer_{name}\n" in text
        assert f"tasks/{name}.json" in text
        rows = json.loads((folder / f"{name}.json").read_bytes())
        assert len(rows) > 5
        for row in rows if name == "choice" else ():
            assert row["answer"] in range(len(row["choices"]))
            assert len(set(row["choices"])) == 4


# ---------------------------------------------------------------- what counts as a failure


def locust_csv(*rows: tuple[str, str, int, int]) -> str:
    lines = ["Type,Name,Request Count,Failure Count"]
    return "\n".join([*lines, *(",".join(map(str, row)) for row in rows)])


@pytest.mark.parametrize(
    ("rows", "failure"),
    [
        ([("E2E", "SseChat", 9, 0), ("", "Aggregated", 9, 0)], None),
        ([("E2E", "SseChat", 9, 2), ("", "Aggregated", 9, 2)], "2 of 9 failed: E2E SseChat"),
        ([("", "Aggregated", 0, 0)], "no request was made"),
    ],
)
def test_locust_is_judged_by_its_csv(
    tmp_path: Path, rows: list[tuple[str, str, int, int]], failure: str | None
) -> None:
    (tmp_path / "run_stats.csv").write_text(locust_csv(*rows))
    verdict = with_locust.judge(tmp_path, {"run": "[now] INFO/locust: begins\nType  Name\n"})
    assert [failure] * bool(failure) == [f.removeprefix("run: ") for f in verdict.failures]
    assert verdict.parts[0] == ("run", "Type  Name")


def strategy(successful: int, errored: int) -> dict[str, Any]:
    numbers = {"mean": 5.0, "percentiles": {"p50": 4.0, "p95": 6.0, "p99": 7.0}}
    totals = {"successful": successful, "errored": errored, "incomplete": 1}
    metrics = {name: {"successful": numbers} for name in (*with_guidellm.RATES, "request_latency")}
    shape = {"type_": "constant", "rate": 3.5}
    return {"config": {"strategy": shape}, "metrics": {**metrics, "request_totals": totals}}


@pytest.mark.parametrize(
    ("report", "failure"),
    [
        ({"benchmarks": [strategy(8, 0)]}, None),
        ({"benchmarks": [strategy(8, 0), strategy(8, 1)]}, "'errored': 1"),
        ({"benchmarks": [strategy(0, 0)]}, "'successful': 0"),
        ({}, "measured nothing"),
    ],
)
def test_guidellm_is_judged_by_its_report(
    tmp_path: Path, report: Mapping[str, object], failure: str | None
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(report))
    output = "begins\nRun Summary Info\nfirst\nRun Summary Info\nsecond\nBenchmarking complete\n"
    verdict = with_guidellm.judge(tmp_path, {"run": output})
    assert len(verdict.failures) == (failure is not None)
    assert (failure or "") in "".join(verdict.failures)
    assert verdict.parts == (("run", "Run Summary Info\nsecond"),)
    if failure is None:
        kept_run: Any = verdict.data
        assert kept_run["run"][0]["output_tokens_per_second"]["p95"] == 6.0
        assert verdict.line == "run: up to 5 output tokens/s"


def lm_eval_run(folder: Path, likelihood: float, acc: float, answer: str) -> None:
    """The files of a finished lm-eval run."""
    place = folder / "m"
    place.mkdir(parents=True)
    scores = {"streamer_choice": {"alias": "c", "acc,none": acc, "acc_stderr,none": 0.1}}
    (place / "results_now.json").write_text(json.dumps({"results": scores}))
    answers = {
        "streamer_choice": [[str(likelihood), "False"], ["-3.5", "True"]],
        "streamer_text": [str(likelihood)],
        "streamer_answer": [answer],
    }
    for task, values in answers.items():
        row = json.dumps({"doc_id": 0, "filtered_resps": values})
        (place / f"samples_{task}_now.jsonl").write_text(row + "\n")


@pytest.mark.parametrize(
    ("oracle", "num_failures"),
    [
        ((-436.04533, 0.98, "yes"), 0),
        ((-436.05533, 0.98, "yes"), 2),
        ((-436.04530, 0.96, "yes"), 1),
        ((-436.04530, 0.98, "no"), 1),
    ],
)
def test_lm_eval_is_judged_by_transformers(
    tmp_path: Path, oracle: tuple[float, float, str], num_failures: int
) -> None:
    lm_eval_run(tmp_path / with_lm_eval.SERVED, -436.04530, 0.98, "yes")
    lm_eval_run(tmp_path / with_lm_eval.ORACLE, *oracle)
    verdict = with_lm_eval.judge(tmp_path, {"local-completions": f"noise\narguments\n{TABLE}\n"})
    assert len(verdict.failures) == num_failures, verdict.failures
    assert "streamer_choice acc" in verdict.parts[0][1]
    assert "stderr" not in verdict.line
    assert verdict.parts[1] == ("local-completions", f"arguments\n{TABLE}")


def test_a_run_of_lm_eval_that_left_nothing_is_a_failure(tmp_path: Path) -> None:
    lm_eval_run(tmp_path / with_lm_eval.ORACLE, -1.0, 1.0, "yes")
    assert "results" in with_lm_eval.judge(tmp_path, {}).failures[0]


def test_what_is_kept_has_no_colours_bars_hosts_or_paths() -> None:
    output = (
        "\x1b[1mbold\x1b[0m\r\nhalf\rdone\n[5] box-7/INFO/locust: /home/me/peers/x in /home/me\n"
    )
    places = {"/home/me": "~", "/home/me/peers": "PEERS"}
    assert kept.cleaned(output, places) == "bold\ndone\n[5] INFO/locust: PEERS/x in ~\n"


# ---------------------------------------------------------------- a whole run, with a stand-in


def stand_in(code: int, version: str = "1.2.3", failures: Sequence[str] = ()) -> Tool:
    """A tool whose program prints where it runs and ends with this code."""
    script = f"import os, sys; print(*sorted(os.listdir())); print(os.getcwd()); sys.exit({code})"
    return Tool(
        name="standin",
        packages=((f"standin=={version}",),),
        shown=("standin",),
        server=(),
        commands=lambda setting: [Command("only", setting.model, "python", ("-c", script))],
        judge=lambda folder, outputs: Verdict(
            tuple(failures), (("only", outputs["only"]),), {"n": 1}, "a line"
        ),
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Peers' home, with an environment in which the stand-in is recorded as installed."""
    place = tmp_path / "peers" / "standin" / "bin"
    place.mkdir(parents=True)
    program = place / "python"
    lines = ["#!/bin/sh", 'case "$2" in *importlib.metadata*) echo 1.2.3; exit 0;; esac']
    program.write_text("\n".join([*lines, f'exec {sys.executable} "$@"\n']))
    program.chmod(0o755)
    monkeypatch.setenv("PEERS_HOME", str(tmp_path / "peers"))
    return tmp_path / "peers"


def run_main(monkeypatch: pytest.MonkeyPatch, tool: Tool, out: Path, *more: str) -> int:
    monkeypatch.setitem(tools.TOOLS, tool.name, tool)
    with peer() as url:
        return tools.main(["--tools", tool.name, "--url", f"{url}/v1", "--out", str(out), *more])


def test_a_tool_runs_beside_its_files_and_what_it_printed_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_main(monkeypatch, stand_in(0), tmp_path / "out") == tools.OK
    text = (tmp_path / "out" / "standin.txt").read_text()
    assert "# versions: standin 1.2.3\n# python -c" in text
    assert "locust_plain.py locust_users.py model only.log slo.toml tasks\n.\n" in text
    assert "/tmp" not in text
    data = json.loads((tmp_path / "out" / "standin.json").read_bytes())
    assert data["found"] == {"n": 1}
    assert data["about"]["versions"] == {"standin": "1.2.3"}


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (stand_in(3), "only: exit code 3"),
        (stand_in(0, failures=["half of it failed"]), "half of it failed"),
    ],
)
def test_a_tool_that_fails_fails_the_run_and_its_output_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Tool, says: str
) -> None:
    assert run_main(monkeypatch, tool, tmp_path / "out") == tools.FAILED
    assert f"FAILED: {says}" in (tmp_path / "out" / "standin.txt").read_text()


def test_another_version_is_installed_anew_and_a_failure_is_reported(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[Path, object]] = []

    def no_network(folder: Path, rows: object) -> list[str]:
        asked.append((folder, rows))
        raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(tools, "make_environment", no_network)
    tool = stand_in(0, version="1.3.0")
    assert run_main(monkeypatch, tool, tmp_path / "out") == tools.FAILED
    assert asked == [(home / "standin", tool.packages)]
    assert "Failed: standin" in capsys.readouterr().out
    assert not tools.versions_of(with_locust.TOOL, Places(home))  # there is no such environment


def test_an_unreachable_server_is_reported(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tools.TOOLS, "standin", stand_in(0))
    flags = ["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]
    assert tools.main(["--tools", "standin", *flags]) == tools.FAILED
    assert not list(tmp_path.glob("standin.*"))


def test_the_plain_locustfile_runs(slow: Running, tmp_path: Path) -> None:
    """With the Locust of this environment, on a server with the fake model."""
    setting = msgspec.structs.replace(OURS, url=slow.url, seconds=6)
    (command,) = with_locust.TOOL.commands(setting)[1:]
    source = tools.HERE / "locust_plain.py"
    (tmp_path / source.name).write_text(source.read_text(encoding="utf-8"))
    line = [sys.executable, "-m", command.program, *command.flags]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = with_locust.read_rows(tmp_path / "locust_plain_stats.csv")
    names = {row["Name"] for row in rows if row["Type"] == "POST"}
    assert names >= {"/v1/chat/completions", "/v1/chat/completions, streamed"}
    assert not with_locust.judge(tmp_path, {command.name: ""}).failures
    slow.wait_idle()

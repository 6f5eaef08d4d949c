"""Locust itself on real servers: names and counts of statistics, whole answers, exit codes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.loadtest.users.options import USERS
from tests.loadtest.locusts import PEER_TOKENS, ROOT, locust, peer
from tests.server.support.running import Running

TOKENS = 24
ANSWER = ("TTFT", "ITL", "TPOT", "E2E")
MEASURED = {
    "SseChat": ANSWER,
    "SocketChat": ANSWER,
    "Lanes": ANSWER,
    "MultiTurn first turn": ANSWER,
    "MultiTurn later turns": ANSWER,
    "Fork": (*ANSWER, "FORK"),
    "Cancel": ("TTFT", "E2E", "CANCEL"),
    "Flaky sse": (*ANSWER, "RESUME"),
    "Flaky ws": (*ANSWER, "RESUME"),
    "SlowReader": ("TTFT", "E2E", "PAUSED"),
}
EASY = """
[[objective]]
statistic = "E2E"
p99_ms = 60000
error_share = 0
requests_s = 0.1
[[objective]]
statistic = "RESUME"
p50_ms = 60000
"""


def test_every_user_measures_and_loses_nothing(slow: Running, tmp_path: Path) -> None:
    """Each user verifies its answers: the model counts, and failures would be reported."""
    slo = tmp_path / "slo.toml"
    slo.write_text(EASY)
    flags = ["-u", "8", "-r", "8", "-t", "4s", "--max-tokens", str(TOKENS), "--counting"]
    flags += ["--reader-tokens-s", "50", "--lanes", "3", "--turns", "2", "--slo", str(slo)]
    run = locust(tmp_path, slow.url, *USERS, *flags)
    assert run.code == 0, run.text
    found = {(kind, name) for kind, name in run.rows if kind}
    assert found == {(kind, name) for name, kinds in MEASURED.items() for kind in kinds}
    assert all(row["Failure Count"] == "0" for row in run.rows.values())
    for name, kinds in MEASURED.items():
        assert name == "Cancel" or run.tokens(name) == TOKENS
        if "TPOT" in kinds:
            assert run.count("TPOT", name) == run.count("E2E", name) > 0
            assert run.count("TTFT", name) >= run.count("E2E", name)
    for name in ("Flaky sse", "Flaky ws"):
        answers, resumes = run.count("E2E", name), run.count("RESUME", name)
        assert answers <= resumes <= 2 * (answers + 1)  # the end of the run may have cut one more
    assert run.count("FORK", "Fork") >= run.count("E2E", "Fork")
    assert run.tokens("Cancel") < 100 * TOKENS
    slow.wait_idle()


def test_a_missed_objective_is_the_exit_code(slow: Running, tmp_path: Path) -> None:
    slo = tmp_path / "slo.toml"
    slo.write_text(EASY + '[[objective]]\nstatistic = "TTFT"\nuser = "SseChat"\np50_ms = 0.0001\n')
    run = locust(tmp_path, slow.url, "SseChat", "-t", "1s", "--max-tokens", "3", "--slo", str(slo))
    assert run.code == 1, run.text
    assert re.search(r"TTFT SseChat +p50_ms +<= 0.0001 +\S+ +missed", run.text)
    assert re.search(r"E2E +error_share +<= 0 +0 +met", run.text)
    assert re.search(r"RESUME +p50_ms +<= 60,000 +- +did not run", run.text)
    output = run.out.rstrip().splitlines()
    assert output[-1].startswith("TTFT SseChat"), "the verdict is printed last"
    assert {name for kind, name in run.rows if kind} == {"SseChat"}


def test_a_refusal_is_a_failure_with_the_servers_words(slow: Running, tmp_path: Path) -> None:
    run = locust(tmp_path, slow.url, "SseChat", "-t", "1s", "--model", "unknown")
    assert run.code == 1
    assert (
        run.rows["E2E", "SseChat"]["Failure Count"] == run.rows["E2E", "SseChat"]["Request Count"]
    )
    assert "model_not_found" in run.text


def test_users_that_a_peer_cannot_serve_are_refused(tmp_path: Path) -> None:
    with peer() as url:
        flags = ["-u", "2", "-r", "2", "-t", "1s", "--counting"]
        run = locust(tmp_path, url + "/v1", "SseChat", "MultiTurn", *flags)
        assert run.code == 0, run.text
        assert run.tokens("SseChat") == run.tokens("MultiTurn later turns") == PEER_TOKENS
        lacking = locust(tmp_path, url, "Lanes", "-t", "1s")
        assert lacking.code == 2
        assert "Cannot start: Lanes needs a WebSocket at ws://" in lacking.text
        resume = locust(tmp_path, url, "Flaky", "-t", "1s")
        assert resume.code == 1
        assert "Flaky needs " in resume.text


def test_shapes_and_tags(slow: Running, tmp_path: Path) -> None:
    flags = ["-u", "5", "-t", "3s", "--max-tokens", "3", "--shape", "steps", "--tags", "sse"]
    run = locust(tmp_path, slow.url, "SseChat", "Flaky", "--drops", "1", *flags)
    assert run.code == 0, run.text
    assert "Shape test updating to 2 users" in run.text
    assert run.count("E2E", "Flaky sse") > 0 < run.count("E2E", "SseChat")
    assert not run.count("E2E", "Flaky ws")


def test_the_page_names_every_user() -> None:
    tree = ast.parse((ROOT / "loadtest/users/locustfile.py").read_text(encoding="utf-8"))
    (names,) = (n.value for n in tree.body if isinstance(n, ast.Assign))
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    rows = page.split("\n| user |")[1].split("\n\n")[0].splitlines()[2:]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(documented) == sorted(ast.literal_eval(names)) == sorted(USERS)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamer", "loadtest", "locust", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_shows_its_own_flags_with_defaults() -> None:
    done = run("--help")
    output = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "Usage: streamer loadtest locust" in output
    for flag in ("--think-s", "--reader-tokens-s", "--shape", "--counting", "--slo", "--lanes"):
        assert flag in output
    assert "tokens per answer (default: 64)" in output
    assert f"users that run, of {', '.join(USERS)} (default: SseChat)" in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["Nobody"], "unknown user class 'Nobody'; choose from SseChat, "),
        (["--shape", "soak"], "--shape needs --users"),
        (["--host", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_a_run_that_cannot_begin_exits_with_2_and_a_message(words: list[str], says: str) -> None:
    done = run("--headless", "-t", "1s", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_listens_on_this_machine_alone() -> None:
    with peer() as url:
        flags = ["--web-port", "0", "--autostart", "--autoquit", "0", "-t", "1s", "-u", "1"]
        done = run("--host", url, *flags)
    assert "Starting web interface at http://127.0.0.1:0" in done.stderr
    assert "Traceback" not in done.stderr

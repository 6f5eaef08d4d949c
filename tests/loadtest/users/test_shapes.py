"""What needs no server, in a process that imports Locust: shapes, exit codes, rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.loadtest.locusts import ROOT

SCRIPT = """
from streamer.loadtest.users.shapes import users_at
shares = [i / 10 for i in range(10)]
for shape in ("steps", "spike", "soak"):
    print(shape, *(users_at(shape, share, 10) for share in shares), users_at(shape, 0.0, 1))

from types import SimpleNamespace
from locust.env import Environment
from streamer.loadtest.users.chats import SseChat
from streamer.loadtest.users.judging import judge
from streamer.loadtest.users.options import SLO
environment = Environment(user_classes=[SseChat])
environment.parsed_options = SimpleNamespace(slo=SLO)
runner = environment.create_local_runner()
codes = []
for statistic in ("TTFT", "ITL", "TPOT", "E2E"):
    judge(environment)
    codes.append(environment.process_exit_code)
    environment.stats.log_request(statistic, "SseChat", 1, 1)
judge(environment)
codes.append(environment.process_exit_code)
runner.log_exception("local", "a mistake of ours", "traceback")
judge(environment)
print("codes", *codes, environment.process_exit_code)

import sys
from streamer.loadtest.users.judging import prepare
from streamer.loadtest.users.options import Options
flags = dict.fromkeys(Options.__struct_fields__, 1)
for slo, shape in ((sys.argv[1], ""), (SLO, "spike")):
    environment.parsed_options = SimpleNamespace(
        **flags, slo=slo, shape=shape, run_time=None, num_users=1
    )
    try:
        prepare(environment)
    except SystemExit as error:
        print("refused", error.code)
"""


def test_shapes_exit_codes_and_refusals(tmp_path: Path) -> None:
    """In a subprocess: Locust patches sockets and threads of the process that imports it."""
    slo = tmp_path / "slo.toml"
    slo.write_text('[[objective]]\nstatistic = "TTFF"\np50_ms = 1\n')
    command = [sys.executable, "-c", SCRIPT, str(slo)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Cannot start" in done.stderr
    assert "unknown statistic 'TTFF'" in done.stderr
    assert "--shape needs --users" in done.stderr
    kinds = ("steps", "spike", "soak", "codes", "refused")
    assert [line for line in done.stdout.splitlines() if line.startswith(kinds)] == [
        "steps 2 2 4 4 6 6 8 8 10 10 1",
        "spike 2 2 2 2 10 10 2 2 2 2 1",
        "soak 1 10 10 10 10 10 10 10 10 10 1",
        "codes 1 1 1 1 0 1",  # nothing met till all are; and a user's own mistake is none
        "refused 2",
        "refused 2",
    ], done.stderr


def test_times_keep_two_digits() -> None:
    from streamer.loadtest.users.meter import bucket

    given = (0.0, 0.04567, 0.4567, 4.567, 45.67, 456.7, 4567.0)
    assert [bucket(ms) for ms in given] == [0, 0.046, 0.46, 4.6, 46, 460, 4600]

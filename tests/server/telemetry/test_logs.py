"""The log's lines: in JSON every line is an object, whatever wrote it. A reader that stops reading
delays nothing, and lost lines are counted.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from streamer.errors import NotFound
from streamer.server.telemetry import logs
from streamer.server.telemetry.logs import LineHandler
from streamer.server.telemetry.refusals import REFUSALS_A_SECOND, Refusals, Refused
from tests.chaos.killable import free_port
from tests.server.support.running import DEADLINE_S
from tests.test_cli_run import server as serving


class Pipe:
    """A full pipe: no write fits until it is read."""

    def __init__(self, stack: ExitStack) -> None:
        self.read_end, self.write_end = os.pipe()
        stack.callback(self.close)
        stack.callback(os.close, self.write_end)
        os.set_blocking(self.write_end, False)
        self.num_filled = 0
        try:
            while True:
                self.num_filled += os.write(self.write_end, b"." * 1024)
        except BlockingIOError:
            os.set_blocking(self.write_end, True)

    def close(self) -> None:
        """Close the reader's end."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def read(self, num_bytes: int) -> bytes:
        """Exactly `num_bytes`, however long that takes."""
        data = b""
        while len(data) < num_bytes:
            data += os.read(self.read_end, num_bytes - len(data))
        return data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with ExitStack() as stack:
        yield Pipe(stack)


def write(handler: LineHandler, *texts: str) -> None:
    for text in texts:
        handler.handle(logging.LogRecord("a", logging.INFO, "f", 1, text, None, None))


def test_lines_wait_for_the_reader_in_order_and_long_ones_are_whole(pipe: Pipe) -> None:
    handler = LineHandler(pipe.write_end)
    texts = [*map(str, range(1000)), "x" * 200_000, "last"]
    write(handler, *texts)
    assert pipe.read(pipe.num_filled) == b"." * pipe.num_filled
    whole = "".join(text + "\n" for text in texts).encode()
    assert pipe.read(len(whole)) == whole
    handler.flush()
    write(handler, "here and now")
    os.set_blocking(pipe.read_end, False)
    assert os.read(pipe.read_end, 100) == b"here and now\n"


def test_lines_beyond_the_limit_are_lost_and_counted_where_they_are_missing(pipe: Pipe) -> None:
    handler = LineHandler(pipe.write_end, max_bytes=40)
    write(handler, "first")  # the thread soon takes it
    end = time.monotonic() + DEADLINE_S
    while handler.num_waiting_bytes:
        assert time.monotonic() < end
        time.sleep(0.001)
    write(handler, *["123456789"] * 7, "?")
    pipe.read(pipe.num_filled)
    expected = b"first\n" + b"123456789\n" * 4 + b"4 lines were lost: the log was not read\n"
    assert pipe.read(len(expected)) == expected
    handler.flush()
    write(handler, "after")
    assert pipe.read(6) == b"after\n"


def test_flush_does_not_wait_for_a_closed_pipe(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LEAVE_S", DEADLINE_S)
    handler = LineHandler(pipe.write_end)
    write(handler, "one", "two")
    pipe.close()
    began = time.monotonic()
    handler.flush()
    assert time.monotonic() - began < DEADLINE_S / 2


def test_a_server_whose_log_is_not_read_serves_on_and_stops() -> None:
    body = {"prompt": ["x" * 900] * 20, "max_tokens": 1}  # more than 18 KB a line, a pipe has 64
    with serving("fake", "--log-prompts") as (process, url, _), httpx.Client() as client:
        assert process.stderr is not None
        assert "started" in process.stderr.readline()
        url += "/v1/completions"
        asked = [client.post(url, json=body, timeout=DEADLINE_S).json()["id"] for _ in range(5)]
        for name in asked:
            line = process.stderr.readline()
            assert f"id={name}" in line
            assert line.count("x" * 900) == 20
        for _ in asked:
            assert client.post(url, json=body, timeout=DEADLINE_S).status_code == 200
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full here")
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_a_log_that_can_not_be_written_stops_nothing(tmp_path: Path, is_full: bool) -> None:
    """Neither the start, whose announcement is lost as well, nor answers, nor an orderly end."""
    port = free_port()
    (tmp_path / "log").touch()
    command = [sys.executable, "-m", "streamer", "serve", "fake", "--port", str(port)]
    with Path("/dev/full").open("w") if is_full else (tmp_path / "log").open() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            end = time.monotonic() + DEADLINE_S
            while True:
                assert process.poll() is None
                assert time.monotonic() < end
                with suppress(httpx.ConnectError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.01)
            for max_tokens in (3, -1):  # each has a line
                body = {"prompt": "x", "max_tokens": max_tokens}
                assert client.post("/v1/completions", json=body).is_success == (max_tokens > 0)
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


PAST_THE_LOG = """
import gc, logging, sys, threading, warnings
from streamer.server.telemetry.logs import setup

setup("info", "json")
print("a banner", "of two words")
warnings.warn("old\\nway", FutureWarning)
library = logging.getLogger("library")
library.propagate = False
library.addHandler(logging.StreamHandler())
library.warning("two\\nlines")
for share in (0, 50, 100):
    print(f"\\r{share}%", end="", file=sys.stderr)
print(file=sys.stderr)
logging.getLogger("a").warning("half of a pair: %s", "\\ud800")
logging.getLogger("a").warning("%d wrong", "argument")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a").exception("caught")
thread = threading.Thread(target=lambda: [][0])
thread.start()
thread.join()

class Broken:
    def __del__(self):
        raise KeyError("del")

Broken()
raise RuntimeError("the end")
"""


def test_what_is_printed_warned_or_raised_past_the_log_is_a_json_line_too() -> None:
    done = subprocess.run([sys.executable, "-c", PAST_THE_LOG], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    output = [json.loads(line) for line in done.stderr.splitlines()]
    messages = {(line["logger"], line["message"]) for line in output}
    assert ("stdout", "a banner of two words") in messages
    assert ("py.warnings", "FutureWarning: old\nway (<string>:7)") in messages
    assert ("stderr", "two\nlines") in messages
    assert ("stderr", "100%") in messages
    assert ("a", "half of a pair: \\ud800") in messages
    assert any("wrong" in line["message"] for line in output if line["logger"] == "stderr")
    raised = [line["exception"] for line in output if "exception" in line]
    names = ("ZeroDivisionError", "IndexError", "KeyError", "RuntimeError: the end")
    assert len(raised) == len(names)
    for text, name in zip(raised, names, strict=True):
        assert text.startswith("Traceback")
        assert name in text


def test_refusals_are_lines_and_a_flood_of_them_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = iter([*[1.5] * (REFUSALS_A_SECOND + 3), 2.0])
    refusals = Refusals(lambda: next(clock))
    with caplog.at_level(logging.INFO, "streamer.refused"):
        for n in range(REFUSALS_A_SECOND + 4):
            refusals.count(NotFound("no model\n'x'" + "y" * 9000, param="model"), f"req_{n}")
    lines = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert len(lines) == REFUSALS_A_SECOND + 1
    assert all(isinstance(line, Refused) and len(line.error) == 500 for line in lines)
    assert [line.unlogged for line in lines] == [None] * REFUSALS_A_SECOND + [3]
    assert str(lines[0]).startswith("id=req_0 status=404 code=not_found error=\"no model\\n'x'yyy")

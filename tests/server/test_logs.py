"""The log's reader may stop reading: nobody who logs waits for it, and what is lost is counted."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from streamer.server.logs import LineHandler
from tests.server.running import DEADLINE_S
from tests.test_cli_run import server as serving


class Pipe:
    """Its ends, as long as they are open; nothing more fits in until it is read."""

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
        """Nobody reads any more."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def read(self, num_bytes: int) -> bytes:
        """Exactly so many, however long that takes."""
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
    write(handler, "first")  # in the thread's hands, soon
    end = time.monotonic() + DEADLINE_S
    while handler.num_waiting_bytes:
        assert time.monotonic() < end
        time.sleep(0.001)
    write(handler, *["123456789"] * 7, "?")
    pipe.read(pipe.num_filled)
    wanted = b"first\n" + b"123456789\n" * 4 + b"4 lines were lost: the log was not read\n"
    assert pipe.read(len(wanted)) == wanted
    handler.flush()
    write(handler, "after")
    assert pipe.read(6) == b"after\n"


def test_a_reader_that_is_gone_is_waited_for_no_more(pipe: Pipe) -> None:
    handler = LineHandler(pipe.write_end)
    write(handler, "one", "two")
    pipe.close()
    began = time.monotonic()
    handler.flush()
    assert time.monotonic() - began < 0.9  # else it was given up after a second


def test_a_server_whose_log_is_not_read_serves_on_and_stops() -> None:
    body = {"prompt": ["x" * 900] * 20, "max_tokens": 1}  # more than 18 KB a line, a pipe has 64
    with serving("fake", "--log-prompts") as (process, url, _), httpx.Client() as client:
        assert process.stderr is not None
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

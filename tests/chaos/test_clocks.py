"""The wall clock of a real server jumps by a day, both ways, while it streams and while it is away.

A library before libc adds the seconds in a file to the wall clock, of native code as of Python.
"""

from __future__ import annotations

import shlex
import struct
import subprocess
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from streamer.kernels.cpu.library import _compiler
from tests.chaos.killable import Killable
from tests.chaos.test_faults import DEADLINE_S, WATCHDOG_S, count, during, is_idle, wait_for

DAY_S = 86_400
RETAIN_S = 600.0
SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *ahead_s;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
    void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) abort();
    ahead_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long status = syscall(SYS_clock_gettime, clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead_s ? *ahead_s : 0;
    return (int)status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *kept) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (kept) *kept = fine.tv_sec;
    return fine.tv_sec;
}
"""


class Clock:
    """The wall clock of processes that begin while it is there: `set` moves it."""

    def __init__(self, folder: Path) -> None:
        (folder / "clock.c").write_text(SOURCE)
        command = [*_compiler(), *shlex.split("-shared -fPIC -O1 clock.c -o clock.so")]
        subprocess.run(command, cwd=folder, check=True)
        self._file = folder / "ahead"
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_AHEAD": str(self._file)}

    def set(self, ahead_s: int) -> None:
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", ahead_s))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def process(clock: Clock, tmp_path: Path) -> Iterator[Killable]:
    settings = {"model": "fake:tokens_per_s=100", "journal": tmp_path / "journal"}
    settings |= {"watchdog_s": WATCHDOG_S, "max_wait_s": 0.0, "retain_s": RETAIN_S}
    clock.set(0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        server = Killable(tmp_path / "log", **settings).__enter__()
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.__exit__(None, None, None)


def now_of(process: Killable) -> float:
    """The server's wall clock, from its Date header."""
    return parsedate_to_datetime(httpx.get(process.url + "/health").headers["date"]).timestamp()


def create(process: Killable) -> dict[str, object]:
    body = {"model": "fake", "input": "Count.", "max_output_tokens": 8}
    found = httpx.post(process.url + "/v1/responses", json=body, timeout=DEADLINE_S)
    kept: dict[str, object] = found.raise_for_status().json()
    return kept


def is_kept(process: Killable, response: dict[str, object]) -> bool:
    """Once it has ended: a kill may have lost its last tokens, which are drawn again."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = httpx.get(f"{process.url}/v1/responses/{response['id']}")
        if found.status_code != 200 or found.json()["status"] != "in_progress":
            break
        time.sleep(0.02)
    return found.status_code == 200 and found.json()["output"] == response["output"]


@pytest.mark.parametrize("jumps", [(DAY_S, 0), (-DAY_S, 0)], ids=["forward", "back"])
async def test_streams_and_what_is_kept_go_on_beneath_jumps(
    process: Killable, clock: Clock, jumps: tuple[int, ...]
) -> None:
    """And the clock's return; no deadline passes and nothing young is deleted."""
    kept = create(process)
    before = now_of(process)
    for jump in jumps:
        await during(process, 8, lambda jump=jump: clock.set(jump))  # type: ignore[misc]
        assert abs(now_of(process) - before - jump) < 600  # it did jump
        assert is_kept(process, kept)
        await count(process.url, 20)
    wait_for(lambda: is_idle(process), "the server is not idle")
    lines = process.lines()
    assert "Traceback" not in lines
    assert "hangs" not in lines


def background(process: Killable) -> str:
    body = {"model": "fake", "input": "Count.", "max_output_tokens": 150, "ignore_eos": True}
    body |= {"background": True}
    found = httpx.post(process.url + "/v1/responses", json=body, timeout=DEADLINE_S)
    name: str = found.raise_for_status().json()["id"]
    return name


def test_a_start_after_the_clock_went_back_keeps_all(process: Killable, clock: Clock) -> None:
    """And one after it went a day ahead deletes what is too old by it, and serves."""
    kept, running = create(process), background(process)
    clock.set(-DAY_S)
    process.restart()
    assert is_kept(process, kept)
    wait_for(lambda: ended(process, running), "the answer did not end")
    younger = create(process)
    process.restart()
    assert is_kept(process, kept)
    assert is_kept(process, younger)
    clock.set(DAY_S)
    process.restart()
    assert not is_kept(process, kept)
    assert is_kept(process, create(process))


def ended(process: Killable, name: str) -> bool:
    found = httpx.get(f"{process.url}/v1/responses/{name}").raise_for_status().json()
    assert found["status"] in ("queued", "in_progress", "incomplete"), found
    if found["status"] == "incomplete":
        assert found["usage"]["output_tokens"] == 150
    return bool(found["status"] == "incomplete")

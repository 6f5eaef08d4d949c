"""Processes of ranks on this host: each finds the first rank by what is on its standard input.

That pipe stays open: a rank whose starter is gone ends, whatever it does. The secret is on no
command line and in no environment. Called by leader.py and node.py.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

PROGRAM = "import sys; from streamer.build import run_rank; sys.exit(run_rank())"
END_S = 5.0
STDIN = 0
SIZE = struct.Struct("<I")
MAX_TRIES: Final = 3  # within TRIES_S
TRIES_S: Final = 60.0


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a process is, and where the first one listens.

    on_host     ranks on its host
    is_far      the first rank is on another host, which may not have started yet
    model, draft_model  checkpoints on this host, where it is not the first rank's
    """

    index: int
    on_host: int
    address: str
    port: int
    secret: bytes
    is_far: bool = False
    model: str | None = None
    draft_model: str | None = None


def start(rendezvous: Rendezvous) -> subprocess.Popen[bytes]:
    """The process of a rank, which gets no signal that is meant for this one."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    data = msgspec.msgpack.encode(rendezvous)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(SIZE.pack(len(data)) + data)
            process.stdin.flush()
    return process


def rendezvous() -> Rendezvous:
    """In a rank's process: what it was started with. From here on it ends with its starter."""
    (size,) = SIZE.unpack(_given(SIZE.size))
    found = msgspec.msgpack.decode(_given(size), type=Rendezvous)

    def watch() -> None:
        os.read(STDIN, 1)
        os._exit(0)

    threading.Thread(target=watch, name="streamer-starter", daemon=True).start()
    return found


def _given(size: int) -> bytes:
    """Not by sys.stdin, whose lock a thread that waits would keep at the end of the process."""
    data = b""
    while len(data) < size:
        more = os.read(STDIN, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def end(processes: Sequence[subprocess.Popen[bytes]], wait_s: float = END_S) -> None:
    """Wait until they have ended; those that do not are killed."""
    deadline = time.monotonic() + wait_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def may_try_again(failures: Sequence[float], now: float) -> bool:
    """Whether a set that failed at these times, `now` the last, is started once more."""
    return sum(now - failure < TRIES_S for failure in failures) <= MAX_TRIES


def pause_s(failures: Sequence[float], now: float) -> float:
    """How long to wait before: not at all at first, then longer."""
    recent = sum(now - failure < TRIES_S for failure in failures)
    return float((1 << max(0, recent - 1)) - 1)

"""Processes: engines that are started, asked, measured and ended, and commands with a time limit.

An engine's process leads a process group, so that its children end with it. Its output goes to a
log file; the error of a failure has the log's last lines.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Self

LOAD_S, ANSWER_S, END_S = 600.0, 1800.0, 10.0
POLL_S = 0.05


class EngineFailed(Exception):
    """An engine did not start, ended, or gave an unexpected answer; has the end of its log."""


class Process:
    """One engine's process and log; a context manager."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        is_asked: bool = False,
    ) -> None:
        """`is_asked`: standard input and output are pipes to this process, not the log."""
        self._log = log
        self._file: BinaryIO = log.open("wb")
        # Not this folder: Python would look for modules there before all others.
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stderr=self._file,
            start_new_session=True,
            bufsize=0,
            stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_asked else self._file,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code once the process has ended; negative for a signal."""
        return self._process.poll()

    def peak_bytes(self) -> int:
        """Peak resident memory of the process and its descendants, added up."""
        return sum(map(peak_of, family(self._process.pid)))

    def resident_bytes(self) -> int:
        """Resident memory now, of the process and its descendants."""
        return sum(kept(pid, "VmRSS:") for pid in family(self._process.pid))

    def failure(self, what: str) -> EngineFailed:
        """An EngineFailed that says `what`, with the end of the log."""
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
        return EngineFailed(f"{what}: " + " | ".join(line[:300] for line in tail))

    def close(self) -> None:
        """End the whole process group and wait for it."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._signal(signal.SIGKILL)  # the rest of the group
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._file):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Server(Process):
    """An engine's own HTTP server; `wait` returns once it takes requests."""

    def __init__(self, command: Sequence[str], port: int, env: dict[str, str], log: Path) -> None:
        super().__init__(command, env, log)
        self._port = port

    def wait(self, path: str, timeout_s: float = LOAD_S) -> None:
        """Ask `path` until it answers 200."""
        deadline = time.monotonic() + timeout_s
        while not self._answers(path):
            if not self.is_running:
                raise self.failure("the server ended")
            if time.monotonic() > deadline:
                raise self.failure(f"the server did not start in {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def family(pid: int) -> list[int]:
    """The ids of a process and all its descendants."""
    found = [pid]
    for parent in found:  # grows while it is read
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:  # the thread has ended
                continue
    return found


def peak_of(pid: int) -> int:
    """Peak resident memory of one process, in bytes; 0 if it has ended."""
    return kept(pid, "VmHWM:")


def kept(pid: int, field: str) -> int:
    """Bytes in this field of /proc/PID/status; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def run_apart(
    command: Sequence[str], limit_s: float, show: Callable[[str], None] | None = None
) -> str:
    """Run a command; returns why it failed, or "". It is killed when its time is over, with all
    that it started: an engine leads a process group of its own.

    Each line it prints goes to `show`; without `show` it shares this process's terminal.
    """
    output = None if show is None else subprocess.PIPE
    process = subprocess.Popen(command, stdout=output, text=True)
    timer = threading.Timer(limit_s, _kill, [process])
    timer.start()
    try:
        if show is not None:
            for line in process.stdout or ():
                show(line.strip())
        code = process.wait()
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
        _kill(process)
        process.communicate()
    if is_late:
        return f"killed after {limit_s:g} s"
    return f"its process ended with {code}" if code else ""


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants, unless it has ended."""
    if process.poll() is None:
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

"""A server in a process of its own that is killed, and started again in the same place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
START_S, POLL_S = 120.0, 0.02


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _flags(settings: dict[str, Any]) -> list[str]:
    found = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found


class Killable:
    """One server at a time, always on the same port and with the same settings."""

    def __init__(self, log: Path, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.pid = 0
        flags = {"host": "127.0.0.1", "port": self.port, "load_progress": False, **settings}
        self._command = ["serve", *_flags(flags)]
        self._forker: subprocess.Popen[str]
        self._readying: asyncio.Task[None] | None = None

    def __enter__(self) -> Killable:
        with self.log.open("a") as log:
            self._forker = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.forker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._forker.stdin.close()  # type: ignore[union-attr]
        self._forker.wait(START_S)
        self._forker.stdout.close()  # type: ignore[union-attr]

    def start(self, dies_at: int | None = None, **settings: Any) -> None:
        """Begin a start, once the process before it has ended; `settings` are of this one alone.

        dies_at  the step of its restoring at which it is killed
        """
        pipe, answer = self._forker.stdin, self._forker.stdout
        if pipe is None or answer is None:
            raise RuntimeError("it was not entered")
        dies = [] if dies_at is None else [dies_at]
        pipe.write(json.dumps([*dies, *self._command, *_flags(settings)]) + "\n")
        pipe.flush()
        self.pid = int(answer.readline())
        self._readying = None  # it waited for the process before

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the running process a signal, if there is one."""
        if self.pid:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                self.pid = 0

    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z"  # until the next start

    def wait_ready(self) -> None:
        """Wait until requests are taken."""
        end = time.monotonic() + START_S
        while not self.is_ready():
            assert time.monotonic() < end, self.lines()[-2000:]
            time.sleep(POLL_S)

    async def ready(self) -> None:
        """The same, for a program with a loop: all that wait ask together."""
        if self._readying is None or self._readying.done():
            self._readying = asyncio.create_task(asyncio.to_thread(self.wait_ready))
        await asyncio.shield(self._readying)

    def is_ready(self) -> bool:
        """Whether requests are taken."""
        # not httpx.get: it reads the certificates each time, 49 ms that the server starts later
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        with closing(connection), contextlib.suppress(OSError, HTTPException):
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        return False

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End the process by this signal, and wait for the next one."""
        self.kill(number)
        self.start()
        self.wait_ready()

    def lines(self) -> str:
        """Its log."""
        return self.log.read_text()

"""Processes: replicas on this machine, each a process, started again with its name when it ends.

For tests and benchmarks, and wherever Ray is not wanted. A replica gets its settings and the secret
on its standard input, prints its address, and ends when its input does: none outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from streamer.config import Config
from streamer.engine.refusals import CLOSE_S
from streamer.errors import EngineDead
from streamer.replicas.messages import Member

RESTART_S: Final = 1.0
SECRET_BYTES: Final = 32

log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What a process is told on its first line of input; it answers with its Member."""

    config: dict[str, Any]
    name: str
    secret: bytes
    host: str = "127.0.0.1"


class Processes:
    """`count` replicas.

    processes  those that run now, by the name of the replica
    """

    def __init__(self, config: Config, count: int, *, restarts: bool = True) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._config = config
        self._count = count
        self._restarts = restarts
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def members(self) -> Sequence[Member]:
        """A directory (cluster.py): those that have loaded."""
        return tuple(self._members.values())

    async def start(self) -> None:
        """Return when the first replica has loaded; EngineDead if it can't be started."""
        names = [f"r{number}" for number in range(self._count)]
        await asyncio.gather(*(self.add(name) for name in names))

    async def add(self, name: str) -> None:
        """One more replica, when it has loaded."""
        process = await self._launch(name)
        self._tasks[name] = asyncio.create_task(self._keep(name, process))

    async def remove(self, name: str) -> None:
        """Let a replica drain, and wait until it has ended."""
        task, process = self._tasks.pop(name), self.processes[name]
        task.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
        self._forget(name)

    async def stop(self) -> None:
        """End them all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        processes = list(self.processes.values())
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(process.wait() for process in processes))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Start a replica again whenever it ends."""
        while True:
            code = await process.wait()
            self._forget(name)
            log.error("replica %s (process %d) ended with code %s", name, process.pid, code)
            if not self._restarts:
                return
            while True:
                await asyncio.sleep(RESTART_S)
                try:
                    process = await self._launch(name)
                except EngineDead as error:
                    log.error("%s", error.message)
                else:
                    break

    async def _launch(self, name: str) -> asyncio.subprocess.Process:
        config = msgspec.to_builtins(self._config)
        order = Order(config, name, self.secret)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamer.replicas"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.processes[name] = process
        if process.stdin is None or process.stdout is None:
            raise EngineDead(f"replica {name} has no pipes")
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise EngineDead(f"replica {name} ended with code {await process.wait()}")
        self._members[name] = msgspec.json.decode(line, type=Member)
        return process

    def _forget(self, name: str) -> None:
        self.processes.pop(name, None)
        self._members.pop(name, None)

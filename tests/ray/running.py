"""An application of Ray Serve, or `streamer serve --replicas`, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.killable import ROOT, free_port

START_S = 120.0
REPLICA, INGRESS = ":Replica", ":Ingress"


def descendants(pid: int) -> dict[int, str]:
    """Command lines of the processes below one, by id."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
            names[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    found, todo = {}, [pid]
    while todo:
        parent = todo.pop()
        below = [child for child, of in parents.items() if of == parent]
        found |= {child: names.get(child, "") for child in below}
        todo += below
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Those of them that have not ended."""
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]


def wait_for(is_so: Callable[[], bool], what: str, seconds: float = START_S) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class UnderRay:
    """A command that serves on `url`, with Ray below it."""

    def __init__(self, folder: Path, command: list[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self._command = command
        self._process: subprocess.Popen[bytes]

    @classmethod
    def application(cls, folder: Path, settings: dict[str, Any], **replicas: Any) -> UnderRay:
        """Two ingresses, and replicas with these options of their deployment."""
        port = free_port()
        options = {"ray_actor_options": {"num_cpus": 0.1}, **replicas}
        app = {
            "name": "streamer",
            "route_prefix": "/",
            "import_path": "streamer.replicas.application:build",
            "args": {"allow_public_bind": True, **settings},
            "deployments": [
                {"name": "Ingress", "num_replicas": 2},
                {"name": "Replica", **options},
            ],
        }
        http = {"host": "127.0.0.1", "port": port}
        file = folder / "serve.json"  # JSON is YAML
        file.write_text(json.dumps({"http_options": http, "applications": [app]}))
        command = ["-m", "ray.serve.scripts", "run", str(file)]
        return cls(folder, command, port)

    @classmethod
    def alone(cls, folder: Path, model: str, *flags: str) -> UnderRay:
        """`streamer serve`, which is the ingress itself."""
        port = free_port()
        command = ["-m", "streamer", "serve", model, "--port", str(port), *flags]
        return cls(folder, command, port)

    def __enter__(self) -> UnderRay:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        }
        environment.pop("RAY_ADDRESS", None)
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._command],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        try:
            wait_for(self.is_ready, "it did not start")
        except AssertionError:
            self.__exit__(None, None, None)
            raise AssertionError(self.log.read_text()[-4000:]) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        below = descendants(self._process.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20.0)
        for pid in (self._process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._process

    def is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(self.log.read_text()[-4000:])
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + "/ready", timeout=5.0).status_code == 200
        return False

    def pids(self, role: str) -> list[int]:
        """Processes of one deployment."""
        below = descendants(self._process.pid).items()
        return sorted(pid for pid, name in below if name.startswith("ray::") and role in name)

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Values of a metric by the label `replica`, as one of the ingresses has them."""
        found: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=10.0).text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                replica = line.partition('replica="')[2].partition('"')[0]
                found[replica] = found.get(replica, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

"""Ranks on two hosts, started as an operator would, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamer.kernels import ops
from tests.chaos.clients import Server, response_by_sse
from tests.chaos.killable import ROOT, free_port

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

DEADLINE_S = 90.0
HOSTS = ("127.0.0.1", "127.0.0.2")  # the first rank's address is the second one
SECRET = "only these hosts know this"
BODY = {"model": "streamer-demo", "input": "Tell a story.", "max_output_tokens": 400, "seed": 5}


class Host:
    """One `streamer serve` of a set."""

    def __init__(self, folder: Path, *flags: object) -> None:
        self.log = folder / "log"
        folder.mkdir(exist_ok=True)
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "streamer", "serve", *map(str, flags)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def ranks(self) -> list[int]:
        """Processes of ranks that it has started."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)]
        table = subprocess.run(command, capture_output=True, text=True).stdout
        assert SECRET not in table
        return [int(line.split()[0]) for line in table.splitlines() if "run_rank" in line]

    def lines(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        ranks = self.ranks()
        self.process.kill()
        self.process.wait()
        for rank in ranks:  # they end with who started them
            while Path(f"/proc/{rank}/stat").exists():
                time.sleep(0.01)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, str]]:
    """The second host first, which waits; then the first, its address behind them."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_text(SECRET + "\n")
    flags: list[object] = ["--tensor-parallel-size", 2, "--nnodes", 2, "--master-addr", HOSTS[1]]
    flags += ["--master-port", free_port(), "--ranks-secret-file", secret]
    second = Host(tmp_path / "1", *flags, "--node-rank", 1)
    serve = ["--port", port, "--journal", tmp_path / "journal", "--num-gpu-blocks-override", 64]
    first = Host(tmp_path / "0", *flags, *serve)
    try:
        yield first, second, f"http://127.0.0.1:{port}"
    finally:
        first.close()
        second.close()


async def test_a_killed_rank_of_another_host_is_named_and_answers_go_on(
    hosts: tuple[Host, Host, str],
) -> None:
    first, second, url = hosts

    async def ready() -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"{url}/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                assert first.process.poll() is None, first.lines()
                await asyncio.sleep(0.05)

    async def kill_in_the_middle(server: Server) -> None:
        while server.num_read < 40:
            await asyncio.wait_for(server.more.wait(), DEADLINE_S)
            server.more.clear()
        os.kill(killed, signal.SIGKILL)

    async with asyncio.timeout(DEADLINE_S):
        await ready()
        (killed,) = second.ranks()
        assert not first.ranks()
        undisturbed = await response_by_sse(Server(url, ready), BODY)
        server = Server(url, ready)
        killing = asyncio.create_task(kill_in_the_middle(server))
        answer = await response_by_sse(server, BODY)
        await killing
    assert server.num_resumed == 1
    assert answer.outcome == undisturbed.outcome
    assert second.ranks() != [killed]
    said = first.lines()
    assert f"rank 1 (process {killed} on {os.uname().nodename}) closed its connection" in said
    assert "the ranks are started again in 0 s" in said
    for host in (first, second):
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(DEADLINE_S) == 0, host.lines()

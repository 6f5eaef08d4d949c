"""No connection leaves the machine that was not asked for: a server from its start to its end.

Python's audit hook sees every address that is looked up, connected, bound or sent to.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.chaos.killable import ROOT, free_port

PROGRAM = """
import sys

def seen(event, args):
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        about = args[:2] if event == "socket.getaddrinfo" else args[1:]
        print("SEEN", event, repr(about), flush=True)

sys.addaudithook(seen)
from streamer.cli import main
sys.exit(main({command!r}))
"""
LOCAL = ("127.0.0.1", "'::1'", "'localhost'", "/", "(None,")


def strangers(output: str) -> list[str]:
    """The audited events whose address is not this machine's."""
    lines = [line for line in output.splitlines() if line.startswith("SEEN")]
    assert lines, "nothing was audited"
    return [line for line in lines if not any(name in line for name in LOCAL)]


def run(folder: Path) -> str:
    """What a server printed that answered a request of each face and was stopped."""
    port = free_port()
    command = ["serve", "--port", str(port), "--no-load-progress", "--dtype", "float32"]
    command += ["--num-gpu-blocks-override", "64", "--journal", str(folder / "journal")]
    program = PROGRAM.format(command=command)
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=log, stderr=log, cwd=ROOT
        )
    try:
        with httpx.Client(base_url=url, timeout=20.0) as client:
            while True:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.ConnectError:
                    continue
            chat = {"messages": [{"role": "user", "content": "http://example.com/x"}]}
            short = {"max_tokens": 4, "model": "streamer-demo"}
            client.post("/v1/chat/completions", json={**chat, **short}).raise_for_status()
            body = {"model": "streamer-demo", "input": "x", "max_output_tokens": 4}
            client.post("/v1/responses", json=body).raise_for_status()
            client.get("/")
    finally:
        process.terminate()
        assert process.wait(30.0) == 0
    return (folder / "log").read_text()


def test_a_server_speaks_to_its_clients_alone(tmp_path: Path) -> None:
    assert strangers(run(tmp_path)) == []


def test_the_hook_sees_a_stranger() -> None:
    program = PROGRAM.partition("from streamer")[0]
    program += "import socket\ntry:\n socket.getaddrinfo('example.invalid', 80)\n"
    program += "except OSError:\n pass\n"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert len(strangers(found.stdout)) == 1

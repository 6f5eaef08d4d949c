"""Runs Locust on our users in a subprocess (it patches the process that imports it), and reads what
it measured; and a peer that has chat completions and nothing else.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PEER_TOKENS = 3


class Run(NamedTuple):
    """A finished run: (statistic, name) -> Locust's row of the CSV."""

    code: int
    text: str
    out: str
    rows: dict[tuple[str, str], dict[str, str]]

    def count(self, statistic: str, name: str) -> int:
        return int(self.rows.get((statistic, name), {}).get("Request Count", 0))

    def tokens(self, name: str) -> float:
        """Mean number of tokens of an answer."""
        return float(self.rows["E2E", name]["Average Content Size"])


def locust(folder: Path, url: str, *flags: str) -> Run:
    """A headless run with almost no pause; `folder` takes the CSV."""
    command = [sys.executable, "-m", "streamer", "loadtest", "locust", "--host", url]
    command += [
        "--headless",
        "--csv",
        str(folder / "run"),
        "--think-s",
        "0.01",
        "--only-summary",
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    file, rows = folder / "run_stats.csv", {}
    if file.exists():
        with file.open(encoding="utf-8") as lines:
            rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(lines)}
    return Run(done.returncode, done.stdout + done.stderr, done.stdout, rows)


class _Peer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "peer"}]}).encode()
        self._say(200 if self.path == "/v1/models" else 404, "application/json", body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or body["model"] != "peer" or not body["stream"]:
            self._say(404, "application/json", b'{"error": "no such thing"}')
            return
        chunks: list[object] = [
            {"choices": [{"index": 0, "delta": {"content": f" {i + 1}"}}]}
            for i in range(PEER_TOKENS)
        ]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 9, "completion_tokens": PEER_TOKENS}
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._say(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _say(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def peer() -> Iterator[str]:
    """The URL of a server without our extensions."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Peer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

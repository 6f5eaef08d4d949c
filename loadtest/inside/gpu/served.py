"""The section of `streamer bench gpu` with arrivals at the real server, over HTTP.

Starts `streamer serve` on the device with the bundled model, which needs no download, and lets the
open-loop generator send requests at a rate. What it shows beside the other sections is the way from
a socket to a step and back; the model is small.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from streamer.loadtest.inside.gpu.models import Where
from streamer.loadtest.inside.gpu.report import Report
from streamer.loadtest.processes import Server, free_port

RATE, REQUESTS = 64.0, 640  # arrivals a second, and how many
START_S = 30.0
FIGURES = (  # of the open loop's result: measure, unit
    ("output_throughput", "tokens/s"),
    ("median_ttft_ms", "ms"),
    ("p99_ttft_ms", "ms"),
    ("median_tpot_ms", "ms"),
    ("p99_tpot_ms", "ms"),
)


def served(where: Where, report: Report) -> None:
    """Poisson arrivals of chats: tokens a second, time to the first token and between tokens."""
    rate, requests = (20.0, 4) if where.is_tiny else (RATE, REQUESTS)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        command = [sys.executable, "-m", "streamer", "serve", "--device", where.device.type]
        command += ["--port", str(port), "--log-level", "warning"]
        report.doing("starting the server")
        with Server(command, port, dict(os.environ), folder / "server.log") as server:
            server.wait("/ready", min(START_S, report.left_s))
            report.doing(f"{requests} requests at {rate:g} a second")
            result = _arrivals(f"http://127.0.0.1:{port}", rate, requests, folder)
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {requests} requests failed")
    for measure, unit in FIGURES:
        note = f"{requests} chats at {rate:g} a second"
        report.add("the bundled model, served", measure, result[measure], unit, note)


def _arrivals(url: str, rate: float, requests: int, folder: Path) -> dict[str, Any]:
    """The open loop's result for one rate."""
    from rich.console import Console

    from streamer.loadtest.open_loop import command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = ["--url", url, "--workload", "alpaca", "--requests", str(requests)]
    flags += ["--rates", str(rate), "--out", str(folder / "rates")]
    output = io.StringIO()
    command.run(parser.parse_args(flags), Console(file=output))
    files = list((folder / "rates").glob("*.json"))
    if not files:
        raise RuntimeError(f"the generator measured nothing: {output.getvalue()}")
    result: dict[str, Any] = msgspec.json.decode(files[0].read_bytes())
    return result

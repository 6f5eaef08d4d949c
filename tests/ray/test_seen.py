"""What Ray's dashboard and metrics show of replicas, and a program that drives them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.killable import ROOT
from tests.ray.running import UnderRay, wait_for
from tests.server.support.counting import check_counting

FAKE = {"model": "fake:tokens_per_s=100", "num_gpu_blocks_override": 4096, "replicas": 2}
NUM_TOKENS = 40
PROGRAM = f"""
import asyncio, json

from streamer import SamplingParams
from streamer.config import Config
from streamer.replicas.launch import RayCluster


async def main():
    params = SamplingParams(max_tokens={NUM_TOKENS}, ignore_eos=True)
    async with RayCluster(Config(**{FAKE})) as engine:

        async def answer(number):
            return "".join([d.text async for d in engine.generate(f"answer {{number}}", params)])

        while len(engine.counts) < 2:
            await asyncio.sleep(0.05)
        texts = await asyncio.gather(*map(answer, range(8)))
        while min(each.generated_tokens for each in engine.counts.values()) == 0:
            await asyncio.sleep(0.05)
        print(json.dumps(texts))


asyncio.run(main())
"""


def test_a_program_has_answers_of_both_replicas() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        timeout=120.0,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-4000:]
    texts = json.loads(ran.stdout.splitlines()[-1])
    assert [len(check_counting(text)) for text in texts] == [NUM_TOKENS] * 8


def dashboard_of(app: UnderRay) -> httpx.Client:
    """Of the Ray that it began, with Ray's token."""
    found = re.search(r"http://[\d.]+:\d+", app.log.read_text())
    assert found, app.log.read_text()[-4000:]
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    return httpx.Client(base_url=found[0], headers=headers, timeout=20.0)


def exported(dashboard: httpx.Client) -> str:
    """What Ray has for Prometheus on every machine of its cluster."""
    nodes = dashboard.get("/nodes?view=summary").json()["data"]["summary"]
    ports = [(n["raylet"]["nodeManagerAddress"], n["raylet"]["metricsExportPort"]) for n in nodes]
    texts = [httpx.get(f"http://{host}:{port}/metrics", timeout=20.0).text for host, port in ports]
    return "".join(texts)


def test_the_dashboard_and_the_metrics_have_replicas_and_their_counts(tmp_path: Path) -> None:
    with UnderRay.application(tmp_path, FAKE) as app, dashboard_of(app) as dashboard:
        wait_for(lambda: len(app.metric("streamer_steps_total")) == 2, "no second replica")
        body: dict[str, Any] = {"input": "count", "ignore_eos": True, "max_output_tokens": 20}
        answer = httpx.post(app.url + "/v1/responses", json=body, timeout=20.0)
        assert answer.status_code == 200
        shown = dashboard.get("/api/serve/applications/").json()
        found = shown["applications"]["streamer"]
        assert found["status"] == "RUNNING"
        assert {name: len(d["replicas"]) for name, d in found["deployments"].items()} == {
            "Ingress": 2,
            "Replica": 2,
        }

        def num_generated() -> float:
            lines = exported(dashboard).splitlines()
            mine = [x for x in lines if x.startswith("ray_streamer_generated_tokens_total{")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

        wait_for(lambda: num_generated() == 20.0, "Ray does not export what was drawn")

        def num_pools() -> int:
            lines = exported(dashboard).splitlines()
            used = [
                x for x in lines if x.startswith("ray_streamer_blocks{") and 'state="used"' in x
            ]
            return len([x for x in used if 'pool="device"' in x and 'deployment="Replica"' in x])

        wait_for(lambda: num_pools() == 2, "Ray does not export the other replica's blocks")

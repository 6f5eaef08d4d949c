"""An idle engine uses no CPU, also after real steps: no thread that computes goes on spinning."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

PROGRAM = """
import asyncio, sys, time
from streamer.fake.model import load_fake_tokenizer
from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.engine.engine import AsyncEngine
from streamer.model.runner.load import load_runner

async def main():
    config = Config(model=sys.argv[1], load_progress=False, num_gpu_blocks_override=16)
    async with AsyncEngine(lambda _: load_runner(config), load_fake_tokenizer, config) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        worked_s = -time.process_time()
        async for _ in engine.generate([5, 6, 7] * 40, params):
            pass
        worked_s += time.process_time()
        idle_s = -time.process_time()
        await asyncio.sleep(1.0)
        idle_s += time.process_time()
    print(worked_s, idle_s)

asyncio.run(main())
"""


def test_an_idle_second_after_real_steps_uses_no_cpu(checkpoint: Any) -> None:
    """A checkpoint large enough for two threads; CPU time of the whole process, all threads."""
    folder = checkpoint("llama", hidden_size=640, intermediate_size=1792)
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    worked_s, idle_s = (float(word) for word in done.stdout.split())
    assert worked_s > 0
    assert idle_s < 0.1, f"{idle_s} s of CPU in an idle second"

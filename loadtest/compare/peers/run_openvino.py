"""OpenVINO GenAI's continuous batching pipeline, in process.

Needs the model in OpenVINO's own format, which `optimum-cli` of the same environment writes beside
the checkpoint the first time. The option `kv` is the precision of the cache: bf16, or u8, which is
OpenVINO's default.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .talk import Generate, PeerSetup, serve

INT4 = ("--sym", "--group-size", "128", "--ratio", "1.0")
STEP_TOKENS = 1024  # computed in a step; OpenVINO's default of 256 is slower here


def exported(model: str, weights: str) -> str:
    """The folder with the converted model, made if missing.

    weights  fp16, int8 (a scale an output) or int4 (symmetric, groups of 128; optimum's defaults
             leave the embedding and the head in 8 bits)
    """
    target = Path(model).with_name(f"{Path(model).name}-openvino-{weights}")
    if not (target / "openvino_model.xml").exists():
        tool = Path(sys.executable).with_name("optimum-cli")
        what = ["export", "openvino", "--task", "text-generation-with-past"]
        more = INT4 if weights == "int4" else ()
        subprocess.run(
            [tool, *what, "--model", model, "--weight-format", weights, *more, target], check=True
        )
    return str(target)


def load(setup: PeerSetup) -> tuple[Generate, str]:
    """The pipeline with paged KV and prompts cut into chunks beside running answers."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = setup.kv_bytes >> 30
    scheduler.max_num_seqs = setup.max_seqs
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": setup.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": setup.options["kv"],
    }
    pipeline = genai.ContinuousBatchingPipeline(
        exported(setup.model, setup.options.get("weights", "fp16")), scheduler, "CPU", properties
    )

    def config(length: int) -> object:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = length
        settings.ignore_eos = True
        settings.do_sample = False
        return settings

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        asked = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        answers = pipeline.generate(asked, [config(n) for n in lengths])
        return sum(len(answer.m_generation_ids[0]) for answer in answers)

    return generate, str(genai.__version__)


if __name__ == "__main__":
    serve(load)

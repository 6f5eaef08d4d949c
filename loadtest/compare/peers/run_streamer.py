"""This engine through its public API, as any program would use it.

The only file in peers/ that imports the rest of the package.
"""

from __future__ import annotations

from typing import Any

from streamer import LLM, SamplingParams, __version__

from .talk import Generate, Job, serve

BLOCK = 16  # tokens


def load(job: Job) -> tuple[Generate, str]:
    """The engine with a KV pool of the job's bytes."""
    options: Any = job.options
    llm = LLM(
        job.model,
        dtype="bfloat16",
        max_model_len=job.max_len,
        max_num_seqs=job.max_seqs,
        enable_prefix_caching=False,
        load_progress=False,
        block_size=BLOCK,
        num_gpu_blocks_override=job.kv_bytes // (BLOCK * job.kv_token_bytes),
        **options,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        answers = llm.generate(prompts, params, progress=False)
        return sum(len(answer.token_ids) for answer in answers)

    return generate, __version__


if __name__ == "__main__":
    serve(load)

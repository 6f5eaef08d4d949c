"""This engine through its public API, as any program would use it.

The only file in peers/ that imports the rest of the package.
"""

from __future__ import annotations

from typing import Any

from streamer import LLM, SamplingParams, __version__

from .talk import Generate, PeerSetup, serve

BLOCK = 16  # tokens


def load(setup: PeerSetup) -> tuple[Generate, str]:
    """The engine with a KV pool of the setup's bytes."""
    options: Any = setup.options
    llm = LLM(
        setup.model,
        dtype="bfloat16",
        max_model_len=setup.max_len,
        max_num_seqs=setup.max_seqs,
        enable_prefix_caching=False,
        load_progress=False,
        block_size=BLOCK,
        num_gpu_blocks_override=setup.kv_bytes // (BLOCK * setup.kv_token_bytes),
        **options,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        answers = llm.generate(prompts, params, progress=False)
        return sum(len(answer.token_ids) for answer in answers)

    return generate, __version__


if __name__ == "__main__":
    serve(load)

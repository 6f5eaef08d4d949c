"""vLLM's build for the CPU, in process.

The parent process sets the environment (threads, pool, libraries to preload). Runs in vLLM's own
interpreter, never in ours.
"""

from __future__ import annotations

from .talk import Generate, PeerSetup, serve


def load(setup: PeerSetup) -> tuple[Generate, str]:
    """vLLM with its own defaults except for the setup's fields; no prefix cache."""
    import vllm

    llm = vllm.LLM(
        setup.model,
        dtype="bfloat16",
        max_model_len=setup.max_len,
        max_num_seqs=setup.max_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate, str(vllm.__version__)


if __name__ == "__main__":
    serve(load)

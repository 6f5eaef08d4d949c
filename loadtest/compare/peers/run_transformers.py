"""transformers, in process: `generate` on one static batch, or its continuous batching.

The option `mode` selects one. A static batch has no pool: it runs until the longest answer ends,
and only the requested tokens count.
"""

from __future__ import annotations

import os
from typing import Any

from .talk import Generate, PeerSetup, serve

BLOCK, STEP_TOKENS, PAD = 256, 1024, 2


def load(setup: PeerSetup) -> tuple[Generate, str]:
    """The model in bfloat16 with torch's own attention."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.set_num_threads(setup.threads)
    torch.set_grad_enabled(False)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.eval()
    make = static if setup.options["mode"] == "static" else continuous
    return make(model, setup), str(transformers.__version__)


def static(model: Any, setup: PeerSetup) -> Generate:
    """All prompts as one batch; they must have the same length."""
    import torch

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        ids = torch.tensor(prompts)
        longest = max(lengths)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=PAD,
        )
        came = int(out.shape[1]) - int(ids.shape[1])
        return sum(min(came, n) for n in lengths)

    return generate


def continuous(model: Any, setup: PeerSetup) -> Generate:
    """transformers' paged batching, which runs on a thread until the process ends."""
    import transformers

    as_config: Any = transformers.GenerationConfig
    config = transformers.ContinuousBatchingConfig(
        page_size=BLOCK,
        num_blocks=setup.kv_bytes // (BLOCK * setup.kv_token_bytes),
        max_batch_tokens=STEP_TOKENS,
        allow_block_sharing=False,
    )
    defaults = as_config(
        do_sample=False, max_new_tokens=setup.max_len, eos_token_id=-1, pad_token_id=PAD
    )
    manager = model.init_continuous_batching(
        generation_config=defaults, continuous_batching_config=config
    )
    manager.start()

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        num_done = tokens = 0
        while num_done < len(lengths):
            answer = manager.get_result(timeout=5)
            if answer is not None and answer.is_finished():
                num_done += 1
                tokens += len(answer.generated_tokens)
        return tokens

    return generate


if __name__ == "__main__":
    serve(load)

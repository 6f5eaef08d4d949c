"""The section of `streamer bench gpu` that runs transformers' continuous batching beside ours.

The same shape with random weights, the same requests and sampling; runs the internals of
`generate_batch`, but with each request's own length.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from streamer.loadtest.inside.gpu.engine import SMALLEST, Request, free, nano_vllm_requests
from streamer.loadtest.inside.gpu.models import Where
from streamer.loadtest.inside.gpu.report import Report

RESERVE_S = 10.0  # of the section's time, for the work after the last answer


def transformers(where: Where, report: Report) -> None:
    """Tokens a second of the same requests; if the time is too short, of those that ended."""
    requests = nano_vllm_requests(is_tiny=where.is_tiny)
    report.doing(f"making {SMALLEST} for transformers")
    model = _make(where)
    try:
        with _manager(model, requests, is_tiny=where.is_tiny) as manager:
            report.doing("transformers: first request")  # what is compiled on first use
            _answer(manager, [Request([7] * 8, 4)], report)
            tokens, ended, took_s = _answer(manager, requests, report)
    finally:
        del model
        free(where)
    note = f"{tokens:,} tokens of output in {took_s:.1f} s"
    if ended < len(requests):
        note += f"; stopped with {ended} of {len(requests)} requests ended, whose tokens count"
    report.add(f"transformers, {SMALLEST}", f"{ended} requests", tokens / took_s, "tokens/s", note)


def _make(where: Where) -> Any:
    """transformers' model of the shape, on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    make: Any = AutoModelForCausalLM.from_config  # untyped
    shape = {k: v for k, v in where.config_of(SMALLEST).items() if k != "architectures"}
    config = Qwen3Config(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    with torch.device(where.device):
        return make(config, dtype=where.dtype, attn_implementation="sdpa").eval()


def _manager(model: Any, requests: list[Request], *, is_tiny: bool) -> AbstractContextManager[Any]:
    """Continuous batching as `generate_batch` sets it up, its graphs recorded where it has some."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    longest = max(r.num_output for r in requests)
    new_settings: Any = GenerationConfig  # untyped
    settings = new_settings(
        do_sample=True,
        temperature=0.6,
        top_k=0,
        max_new_tokens=longest,
        eos_token_id=-1,
        pad_token_id=0,
    )
    sizes: dict[str, Any] = {}
    if is_tiny:  # transformers can't find these sizes on a CPU
        # `page_size` came in transformers 5.18, which still takes the older name
        sizes = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    hints = WorkloadHints(
        max_prompt_length=max(len(r.prompt) for r in requests),
        max_generated_length=longest,
        num_requests=len(requests),
    )
    manager: AbstractContextManager[Any] = model.continuous_batching_context_manager(
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        block=True,
        timeout=5,
        workload_hints=hints,
    )
    return manager


def _answer(manager: Any, requests: list[Request], report: Report) -> tuple[int, int, float]:
    """Tokens of the requests that ended, how many those are, seconds until the last of them."""
    tokens = ended = 0
    began = last = time.perf_counter()
    for request in requests:
        manager.add_request(request.prompt, max_new_tokens=request.num_output)
    while ended < len(requests) and report.left_s > RESERVE_S:
        found = manager.get_result(timeout=1)
        if found is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread ended early")
        elif found.error is not None:
            raise RuntimeError(f"transformers: {found.error}")
        elif found.is_finished():
            tokens, ended = tokens + len(found.generated_tokens), ended + 1
            last = time.perf_counter()
        report.doing(f"transformers: {ended} of {len(requests)} requests, {tokens:,} tokens")
    if not ended:
        raise RuntimeError("transformers finished no request in its time")
    return tokens, ended, last - began

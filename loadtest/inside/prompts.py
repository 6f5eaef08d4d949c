"""Whole prompts of a checkpoint, dense and quantized while it is loaded: `bench linear --prompts`.

A prompt is computed by the engine's own runner, kernels and cache, in steps of the default size,
without scheduling or drawing. The forms take turns in one process, and their ratio is the median
over the rounds: memory and cores of a virtual machine change from second to second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamer.config import Config

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DENSE = "bfloat16"
INT8_KV = {"kv_cache_dtype": "int8"}
FORMS: dict[str, dict[str, Any]] = {  # settings
    DENSE: {},
    "int8": {"quantization": "int8"},
    "int8, int8 KV": {"quantization": "int8", **INT8_KV},
    "int4": {"quantization": "int4"},
    "int4, int8 KV": {"quantization": "int4", **INT8_KV},
}
BLOCK, STEP = 16, 512  # STEP: --max-num-batched-tokens' default on a CPU
ROUNDS = 7

Seconds = Mapping[str, Sequence[float]]  # by form, a figure a round


def measure(
    model: str | None, lengths: Sequence[int], threads: int, console: Console
) -> dict[int, Seconds]:
    """Seconds of prompts of each length, in every form."""
    from streamer.kernels import ops

    computing = {}
    for form in FORMS:
        with console.status(f"Loading {form}"):
            computing[form] = load(model, form, max(lengths))
    ops.for_cpu().set_threads(threads)
    found: dict[int, Seconds] = {}
    for length in lengths:
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(ROUNDS + 1):  # the first warms up
            for form, compute_in in computing.items():
                with console.status(f"{length:,} tokens in {form}, round {turn} of {ROUNDS}"):
                    took_s = compute_in(length)
                if turn:
                    times[form].append(took_s)
        found[length] = times
    return found


def load(model: str | None, form: str, length: int) -> Callable[[int], float]:
    """What computes a prompt of up to `length` tokens in that form."""
    from streamer.build import loaders
    from streamer.engine.core import Inbox
    from streamer.kernels import ops

    config = Config(
        model=model,
        dtype="bfloat16",
        num_gpu_blocks_override=1,
        max_model_len=BLOCK,
        max_num_batched_tokens=STEP,
        max_num_seqs=1,
        load_progress=sys.stderr.isatty(),
        **FORMS[form],
    )
    runner: Any = loaders(config)[0](Inbox())[0]
    decoder, blocks = runner.model, -(-length // BLOCK)
    shape = (decoder.num_layers, BLOCK, decoder.num_kv_heads, decoder.head_dim)
    pool = ops.for_cpu().new_pool(blocks, *shape, runner.kv_dtype)
    return partial(compute, decoder, pool)


def compute(decoder: Any, pool: torch.Tensor, length: int) -> float:
    """Seconds until the logits after a prompt of random tokens."""
    import torch

    from streamer.kernels import ops

    tokens, blocks = torch.randint(0, decoder.vocab_size, (length,)), torch.arange(len(pool))
    with torch.inference_mode():
        began = time.perf_counter()
        for first in range(0, length, STEP):
            end = min(first + STEP, length)
            positions = torch.arange(first, end)
            batch = ops.AttentionBatch.of_row(blocks, first, end, BLOCK)
            last = torch.arange(end - first)[-1 if end == length else STEP :]
            decoder.forward(tokens[first:end], positions, batch, pool, last)
        return time.perf_counter() - began


def table(found: Mapping[int, Seconds]) -> list[tuple[str, ...]]:
    """Rows of text: tokens a second in each form, and how many times bfloat16's."""
    heading = ["prompt", f"{DENSE}, tokens/s"]
    quantized = [form for form in FORMS if form != DENSE]
    for form in quantized:
        heading += [form, "/ bf16", "lowest"]
    rows = [tuple(heading)]
    for length, times in found.items():
        row = [f"{length:,}", f"{length / statistics.median(times[DENSE]):,.0f}"]
        for form in quantized:
            ratios = [a / b for a, b in zip(times[DENSE], times[form], strict=True)]
            rate = length / statistics.median(times[form])
            row += [f"{rate:,.0f}", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}"]
        rows.append(tuple(row))
    return rows

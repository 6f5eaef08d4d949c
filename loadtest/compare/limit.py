"""What the machine itself allows: tokens a second of a workload, from two measured rates.

A step's parts run one after the other on the same cores, so their times add up, each bound by
memory or arithmetic:

    matrices   the greater of (their bytes / memory's rate) and (2 * parameters * rows / GEMM rate)
    attention  (bytes of the keys and values that are read) / memory's rate

A prompt costs 2 * the layers' parameters * its tokens / GEMM rate, and the logits of its last
token. Left out, in the engine's disfavour: norms, attention's own arithmetic, sampling, and all
Python. The first token comes from the prompt, so an answer of n tokens takes n - 1 steps. What fits
into the cores' caches is read faster than memory, so a small model may come too near the limit.
"""

from __future__ import annotations

import msgspec

from .workload import PROMPT_TOKENS, Model, Work

PREFILL_ROWS = 1024  # rows of the GEMM whose rate stands for prompts


class Machine(msgspec.Struct, frozen=True):
    """Measured rates. gflops: rows of a bfloat16 GEMM -> its rate, with weights in cache."""

    read_gb_s: float
    gflops: dict[int, float]

    def gemm_flops(self, rows: int) -> float:
        """Operations a second of the smallest measured GEMM with at least `rows` rows."""
        fitting = [n for n in sorted(self.gflops) if n >= rows]
        return 1e9 * self.gflops[fitting[0] if fitting else max(self.gflops)]


def step_s(model: Model, machine: Machine, rows: int, context: int) -> float:
    """Seconds of a decode step of `rows` sequences that have `context` tokens in all."""
    parameters = model.layer_parameters + model.head_parameters
    memory = machine.read_gb_s * 1e9
    matrices = max(model.step_bytes / memory, 2 * parameters * rows / machine.gemm_flops(rows))
    return matrices + model.kv_token_bytes * context / memory


def prefill_s(model: Model, machine: Machine, num_prompts: int) -> float:
    """Seconds to compute `num_prompts` prompts and the logits of their last tokens."""
    rate = machine.gemm_flops(PREFILL_ROWS)
    layers = 2 * model.layer_parameters * PROMPT_TOKENS * num_prompts
    head = 2 * model.head_parameters * num_prompts
    # A few prompts alone are bound by reading the weights once.
    return max((layers + head) / rate, model.step_bytes / (machine.read_gb_s * 1e9))


def ideal_tokens_s(model: Model, machine: Machine, work: Work) -> float:
    """Output tokens a second, prompts included, if these rates were the only limits."""
    seconds = prefill_s(model, machine, len(work.lengths))
    for step in range(1, max(work.lengths)):
        rows = sum(length > step for length in work.lengths)
        seconds += step_s(model, machine, rows, rows * (PROMPT_TOKENS + step))
    return work.num_tokens / (seconds * max(1, work.waves))

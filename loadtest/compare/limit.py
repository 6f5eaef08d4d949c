"""What the machine itself allows: tokens a second of a workload, from two measured rates.

A step's parts run one after the other on the same cores, so their times add up, each bound by
memory or arithmetic:

    matrices   the greater of (their bytes / memory's rate) and (2 * parameters * rows / GEMM rate)
    attention  (bytes of the keys and values that are read) / memory's rate

A prompt costs 2 * the layers' parameters * its tokens / GEMM rate, and the logits of its last
token. Left out, in the engine's disfavour: norms, attention's own arithmetic, sampling, and all
Python. The first token comes from the prompt, so an answer of n tokens takes n - 1 steps. What fits
into the cores' caches is read faster than memory, so a small model may come too near the limit.
Weights of fewer bits are multiplied as int8, whose rate is taken as twice bfloat16's.
"""

from __future__ import annotations

import msgspec

from .workload import Model, Work

PREFILL_ROWS = 1024  # rows of the GEMM whose rate stands for prompts
BITS = 16  # of the weights whose GEMM is measured
# Products of vpdpbusd, against those of vdpbf16ps; taken for other CPUs as well.
INT8_SPEEDUP = 2


class Machine(msgspec.Struct, frozen=True):
    """Measured rates. gflops: rows of a GEMM -> its rate, with weights in cache."""

    read_gb_s: float
    gflops: dict[int, float]

    def gemm_flops(self, rows: int) -> float:
        """Operations a second of the smallest measured GEMM with at least `rows` rows."""
        fitting = [n for n in sorted(self.gflops) if n >= rows]
        return 1e9 * self.gflops[fitting[0] if fitting else max(self.gflops)]


def step_s(model: Model, machine: Machine, rows: int, context: int, bits: float = BITS) -> float:
    """Seconds of a decode step of `rows` sequences that have `context` tokens in all."""
    parameters = model.layer_parameters + model.head_parameters
    memory = machine.read_gb_s * 1e9
    matrices = max(
        model.step_bytes * bits / BITS / memory,
        2 * parameters * rows / (machine.gemm_flops(rows) * _speedup(bits)),
    )
    return matrices + model.kv_token_bytes * context / memory


def prefill_s(model: Model, machine: Machine, work: Work, bits: float = BITS) -> float:
    """Seconds to compute a wave's prompts and the logits of their last tokens."""
    rate = machine.gemm_flops(PREFILL_ROWS) * _speedup(bits)
    num_prompts = len(work.lengths)
    layers = 2 * model.layer_parameters * work.prompt_tokens * num_prompts
    head = 2 * model.head_parameters * num_prompts
    # A few prompts alone are bound by reading the weights once.
    reading = model.step_bytes * bits / BITS / (machine.read_gb_s * 1e9)
    return max((layers + head) / rate, reading)


def _speedup(bits: float) -> float:
    """Products a second of weights with that many bits, against bfloat16's."""
    return 1 if bits == BITS else INT8_SPEEDUP


def ideal_tokens_s(model: Model, machine: Machine, work: Work, bits: float = BITS) -> float:
    """The work's tokens a second, prompts included, if these rates were the only limits.

    bits  of a stored weight, its share of the scales included
    """
    seconds = prefill_s(model, machine, work, bits)
    for step in range(1, max(work.lengths)):
        rows = sum(length > step for length in work.lengths)
        seconds += step_s(model, machine, rows, rows * (work.prompt_tokens + step), bits)
    return work.rated_tokens / (seconds * max(1, work.waves))

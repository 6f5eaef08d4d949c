"""The distribution a step must draw from, in float64 by sorting, token by token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamer.core.sampling import SamplingParams


def edited(
    logits: NDArray[np.float64], params: SamplingParams, prompt: list[int], output: list[int]
) -> NDArray[np.float64]:
    """Logits after bias and penalties."""
    out = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in set(prompt + output):
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return out


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    exp = np.exp(x - x.max())
    return np.asarray(exp / exp.sum())


def distribution(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
) -> NDArray[np.float64]:
    """Probability of each token; temperature above 0."""
    x = edited(logits, params, prompt or [], output or []) / params.temperature
    probs = softmax(x)
    probs[probs < params.min_p * probs.max()] = 0.0
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    total = 0.0
    for token in order:
        if total >= params.top_p:
            probs[token] = 0.0
        total += probs[token]
    return np.asarray(probs / probs.sum())


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as the paper writes it, in Python's integers."""
    mask = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & mask, (low >> 32) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def noise(seed: int, position: int, choice: int, vocab: int) -> NDArray[np.float64]:
    """[vocab] Gumbel noise of the draw at `position`, keyed as docs/kernels.md says."""
    key = (seed % (1 << 64) % (1 << 32), seed % (1 << 64) >> 32)
    words = [philox((position, choice, 0, group), key) for group in range(-(-vocab // 4))]
    bits = np.array(words, dtype=np.uint64).reshape(-1)[:vocab]
    u = ((bits >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    return np.asarray(-np.log(-np.log(u)))

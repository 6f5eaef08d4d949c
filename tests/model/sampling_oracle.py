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

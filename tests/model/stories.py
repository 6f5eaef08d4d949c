"""Unseen stories for the bundled model, and what a model's distributions over them lose.

The text is that of `streamer bench accuracy`; divergences are means of the tokens, in nats.
"""

from __future__ import annotations

from pathlib import Path

import torch

from streamer.demo import CHECKPOINT
from streamer.loadtest.inside.accuracy import command as accuracy
from streamer.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import reference_logits, reference_model

Windows = list[list[int]]


def windows(context: int, count: int) -> Windows:
    """The first tokens of the text, cut."""
    tokens = Tokenizer.from_folder(CHECKPOINT).encode(accuracy.some_text(None))
    return accuracy.cut(tokens, context, count)


def probabilities(folder: Path, of: Windows) -> list[torch.Tensor]:
    """Log probabilities by transformers, in float32."""
    model = reference_model(folder)
    return [reference_logits(model, window).log_softmax(-1)[:-1] for window in of]


def divergence(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Kullback and Leibler's, of log probabilities."""
    each = [(p.exp() * (p - q)).sum(-1) for p, q in zip(expected, found, strict=True)]
    return float(torch.cat(each).mean())

"""The draw itself: Gumbel-max over logits, whole or after top-k, top-p and min-p.

Owns the arithmetic of filtering; knows no requests or history. A row's result depends on its own
logits, parameters and noise alone: each is computed at a width that it chooses itself. Called by
sampler.py with float32 logits that are shifted (the best is 0) and divided by temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamer.model.philox import GUMBEL_SPAN

# How many of the best candidates filtering looks at, before it takes more. 64 holds what top-p
# keeps of nearly every step of a real model, at a fiftieth of the cost of sorting all.
WIDTHS = (64, 512, 4096)

# rows and groups, [n] each -> noise of tokens 4 * group to 4 * group + 3 for that row, [n, 4]
Noise = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class Filters(msgspec.Struct, frozen=True):
    """Settings of F filtered rows, [F] each.

    top_k      0: off
    top_p      1: off
    log_min_p  log(min_p), -inf: off
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor

    def pick(self, rows: torch.Tensor) -> Filters:
        """The settings of some of the rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


def draw_all(x: torch.Tensor, noise: Noise) -> torch.Tensor:
    """One token a row from all of x [F, V] (V a multiple of 4; overwritten) -> [F] ids.

    Noise is computed only for groups of four in which some token can still win; the others keep
    their bare logits, which are below what the best token has with the least noise there is.
    """
    rows, vocab = x.shape
    alive = (x >= -GUMBEL_SPAN).view(torch.int32)
    row, group = (part.numpy() for part in alive.nonzero(as_tuple=True))
    by_group = x.numpy().reshape(rows, vocab // 4, 4)
    by_group[row, group] += noise(row, group)
    return x.argmax(-1)


def draw_filtered(x: torch.Tensor, filters: Filters, noise: Noise) -> torch.Tensor:
    """One token a row from what the filters leave of x [F, V] -> [F] ids.

    min_p, then top_k, then top_p of what those two leave. Tokens that tie with the last one kept
    are kept, so that the result does not depend on how a sort orders equals.
    """
    num_rows, vocab = x.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    waiting = torch.arange(num_rows)
    for width in (*WIDTHS, vocab):
        width = min(width, vocab)
        fits = (filters.top_k[waiting] < width) | (width == vocab)
        rows = waiting[fits]
        if rows.numel():
            part = x if rows.numel() == num_rows else x[rows]
            values, ids = torch.topk(part, width)
            kept, done = _keep(part, values, ids, filters.pick(rows))
            if bool(done.all()):
                tokens[rows] = _draw(values, ids, kept, rows, noise)
                waiting = waiting[~fits]
            else:
                drawn = rows[done]
                tokens[drawn] = _draw(values[done], ids[done], kept[done], drawn, noise)
                waiting = torch.cat((waiting[~fits], rows[~done]))
        if not waiting.numel():
            break
    return tokens


def _keep(
    x: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """(which of the sorted values [F, K] survive, which rows [F] need no more than these K)."""
    width = values.shape[1]
    last = (filters.top_k.clamp(max=width) - 1).clamp(min=0).unsqueeze(1)
    cut = torch.where(filters.top_k > 0, values.gather(1, last)[:, 0], -torch.inf)
    cut = torch.maximum(cut, filters.log_min_p)
    kept = values >= cut.unsqueeze(1)
    whole = torch.isneginf(cut)
    done = whole | (values[:, -1] < cut)
    nucleus = filters.top_p < 1.0
    if bool(nucleus.any()):
        # Probabilities of what is left: all of x, or for a row that was cut what is in K.
        probs = torch.softmax(values.masked_fill(~kept, -torch.inf), -1)
        if bool((whole & nucleus).any()):
            probs = torch.where(whole.unsqueeze(1), torch.softmax(x, -1).gather(1, ids), probs)
        before = probs.cumsum(-1) - probs
        outside = (before >= filters.top_p.unsqueeze(1)) & nucleus.unsqueeze(1)
        outside[:, 0] = False
        least = values.masked_fill(outside | ~kept, torch.inf).amin(-1)
        cut = torch.where(nucleus, torch.maximum(cut, least), cut)
        kept = values >= cut.unsqueeze(1)
    done &= values[:, -1] < cut
    if width == x.shape[1]:
        done = torch.ones_like(done)
    return kept, done


def _draw(
    values: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor, noise: Noise
) -> torch.Tensor:
    """Gumbel-max over the kept candidates [F, K]; equals go to the lowest id, as argmax would."""
    at = kept.nonzero().numpy()
    token = ids.numpy()[at[:, 0], at[:, 1]]
    lanes = noise(rows.numpy()[at[:, 0]], token // 4)
    score = np.full(values.shape, -np.inf, dtype=np.float32)
    score[at[:, 0], at[:, 1]] = values.numpy()[at[:, 0], at[:, 1]] + np.take_along_axis(
        lanes, (token % 4)[:, None], 1
    ).reshape(-1)
    best = score == score.max(-1, keepdims=True)
    return torch.from_numpy(np.where(best, ids.numpy(), np.iinfo(np.int64).max).min(-1))

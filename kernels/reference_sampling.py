"""Drawing in torch and numpy: Gumbel-max over logits, whole or after top-k, top-p and min-p.

A row's result depends on its own logits, settings and noise alone: the width it is computed at
depends on nothing else. Called through reference.py.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamer.kernels.draws import Draws
from streamer.kernels.philox import GUMBEL_SPAN, token_noise

# Numbers of best candidates that filtering tries before it sorts all; 64 hold what top-p keeps
# in nearly every step of a real model. ms for 32 rows, one EPYC Zen 5 core, 2026-11-20: torch.topk
# of 64, 512 and 4096 takes 2.0, 8.2 and 16 at 32,000 tokens and 0.7, 1.9 and 7.3 at 4,096;
# torch.sort of all 69 and 7; numpy's sort, of values alone, 19 and 1.4.
WIDTHS = (64, 512)
# A width is tried where the vocabulary is at least this many times the width.
WORTH = 16

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


class _Noise:
    """Noise for a part of the draws, whose rows are numbered from 0."""

    def __init__(self, origin: NDArray[np.uint32]) -> None:
        self._origin = np.ascontiguousarray(origin.T)

    def __call__(self, rows: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n] rows and token groups -> [n, 4]."""
        # `take` is four times as fast as fancy indexing here.
        return token_noise(np.take(self._origin, rows, axis=1), groups)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See CpuBackend.draw."""
    x = logits[draws.rows].float()
    x.sub_(x.amax(-1, keepdim=True)).div_(draws.settings[:, :1])
    filters = Filters(draws.top_k, draws.settings[:, 1], draws.settings[:, 2])
    is_filtered = (filters.top_k > 0) | (filters.top_p < 1.0) | ~filters.log_min_p.isneginf()
    ids = torch.empty(len(x), dtype=torch.int64)
    origin = draws.origin.numpy()
    for members, has_filters in ((~is_filtered, False), (is_filtered, True)):
        if not bool(members.any()):
            continue
        noise = _Noise(origin[members.numpy()])
        part = x[members]
        if has_filters:
            ids[members] = draw_filtered(part, filters.pick(members), noise)
        else:
            ids[members] = draw_all(part, noise)
    return ids


def draw_all(x: torch.Tensor, noise: Noise) -> torch.Tensor:
    """One token a row from all of x [F, V] (overwritten) -> [F] ids.

    Noise is computed only for groups of four in which some token can still win; the others keep
    their bare logits, which are below the best token's score with the smallest noise possible.
    """
    missing = -x.shape[1] % 4
    if missing:
        x = torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
    rows, vocab = x.shape
    alive = (x >= -GUMBEL_SPAN).view(torch.int32)
    row, group = alive.nonzero(as_tuple=True)
    lanes = torch.from_numpy(noise(row.numpy(), group.numpy()))
    # 0.24 ms for 32,768 groups; numpy's x[row, group] += takes 0.78.
    x.view(rows * vocab // 4, 4).index_add_(0, row * (vocab // 4) + group, lanes)
    return x.argmax(-1)


def draw_filtered(x: torch.Tensor, filters: Filters, noise: Noise) -> torch.Tensor:
    """One token a row from what the filters leave of x [F, V] (overwritten) -> [F] ids.

    min_p, then top_k, then top_p of what those two leave. Tokens that tie with the last one kept
    are kept, so that the result does not depend on how a sort orders ties.
    """
    num_rows, vocab = x.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    waiting = torch.arange(num_rows)
    for width in WIDTHS:
        fits = filters.top_k[waiting] < width
        rows = waiting[fits]
        if width * WORTH > vocab or not rows.numel():
            continue
        part = x if rows.numel() == num_rows else x[rows]
        values, ids = torch.topk(part, width)
        cut, done = _cut(part, values, filters.pick(rows))
        drawn = rows[done]
        tokens[drawn] = _draw(values[done], ids[done], cut[done], drawn, noise)
        waiting = torch.cat((waiting[~fits], rows[~done]))
        if not waiting.numel():
            return tokens
    part = x if waiting.numel() == num_rows else x[waiting]
    values = torch.from_numpy(np.sort(part.numpy(), -1)[:, ::-1].copy())
    cut, _ = _cut(part, values, filters.pick(waiting))
    part.masked_fill_(part < cut.unsqueeze(1), -torch.inf)
    names = waiting.numpy()
    tokens[waiting] = draw_all(part, lambda row, group: noise(names[row], group))
    return tokens


def _cut(
    x: torch.Tensor, values: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the smallest value kept [F], whether it is certain [F]) from the K best values, sorted.

    Certain where one of the K is below it, so that every value kept is among the K.
    """
    last = (filters.top_k.clamp(max=values.shape[1]) - 1).clamp(min=0).unsqueeze(1)
    cut = torch.where(filters.top_k > 0, values.gather(1, last)[:, 0], -torch.inf)
    cut = torch.maximum(cut, filters.log_min_p)
    whole = torch.isneginf(cut)
    done = whole | (values[:, -1] < cut)
    nucleus = filters.top_p < 1.0
    if bool(nucleus.any()):
        # Probabilities among all of x, or, for a row that was cut, among the values kept.
        kept = values >= cut.unsqueeze(1)
        probs = torch.softmax(values.masked_fill(~kept, -torch.inf), -1)
        if bool((whole & nucleus).any()):
            # The best value is 0, so its probability is 1 / the sum of all exponentials.
            of_all = values.exp() * torch.softmax(x, -1).amax(-1, keepdim=True)
            probs = torch.where(whole.unsqueeze(1), of_all, probs)
        before = probs.cumsum(-1) - probs
        outside = (before >= filters.top_p.unsqueeze(1)) & nucleus.unsqueeze(1)
        outside[:, 0] = False
        cut = torch.maximum(cut, values.masked_fill(outside | ~kept, torch.inf).amin(-1))
    return cut, done & (values[:, -1] < cut)


def _draw(
    values: torch.Tensor, ids: torch.Tensor, cut: torch.Tensor, rows: torch.Tensor, noise: Noise
) -> torch.Tensor:
    """Gumbel-max over candidates [F, K] from `cut` up; ties go to the lowest id, as in argmax."""
    row, column = (values >= cut.unsqueeze(1)).nonzero(as_tuple=True)
    token = ids[row, column]
    lanes = torch.from_numpy(noise(rows[row].numpy(), (token // 4).numpy()))
    score = torch.full_like(values, -torch.inf)
    score[row, column] = values[row, column] + lanes.gather(1, (token % 4).unsqueeze(1))[:, 0]
    best = score == score.amax(-1, keepdim=True)
    return ids.masked_fill(~best, torch.iinfo(torch.int64).max).amin(-1)

"""Draws: the row of the logits, the settings and the key of the noise of each token to draw.

Made by model/sampling/host.py when the rows change, with new positions every step; read by
the CPU's backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class Draws:
    """F draws.

    rows      [F] int64, of the logits
    top_k     [F] int64; 0: off
    settings  [F, 3] fp32: temperature, top_p (1: off), log(min_p) (-inf: off)
    origin    [F, 5] uint32: key words, position, choice and use (see philox.py); the position is
              filled in each step
    """

    __slots__ = ("origin", "rows", "settings", "top_k")

    def __init__(
        self,
        rows: Sequence[int],
        top_k: Sequence[int] | NDArray[np.int64],
        settings: Sequence[tuple[float, float, float]] | NDArray[np.float32],
        origin: NDArray[np.uint32],
    ) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self.top_k = torch.tensor(top_k, dtype=torch.int64)
        self.settings = torch.tensor(settings, dtype=torch.float32).view(-1, 3)
        self.origin = torch.from_numpy(np.ascontiguousarray(origin, dtype=np.uint32))

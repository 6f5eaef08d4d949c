"""What steps for CUDA graphs share: the rows' state on the device, and inputs of fixed shapes.

Nothing here is computed. decode_step.py and mixed_step.py fill the inputs; called by
model/runner/cuda.py, which writes joins and new blocks into `flat`, and by recorded.py beside it.
"""

from abc import ABC, abstractmethod

import torch

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.attention.rows import Rows

ALIGNED = 4  # int32 elements in 16 bytes, the alignment by which Triton specializes


def aligned(count: int) -> int:
    """Elements of a part, so that the next one is aligned too."""
    return -(-count // ALIGNED) * ALIGNED


class RowState:
    """Row slots on the device, all int32, in one tensor, so that one launch writes many of them.

    flat      everything below, one after the other
    latest    [slots] the last known token
    computed  [slots] tokens with K and V, which is the latest token's position while decoding
    chosen    [slots] the row slots that decode, then -1
    tables    [slots, W] blocks
    """

    __slots__ = ("block_size", "chosen", "computed", "flat", "latest", "tables")

    def __init__(self, slots: int, width: int, block_size: int, device: torch.device | str) -> None:
        room = aligned(slots)
        self.flat = torch.zeros(3 * room + slots * width, dtype=torch.int32, device=device)
        self.latest, self.computed, self.chosen = (
            self.flat[n * room : n * room + slots] for n in range(3)
        )
        self.tables = self.flat[3 * room :].view(slots, width)
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """No row decodes."""
        self.flat.zero_()
        self.chosen.fill_(-1)

    @property
    def max_context(self) -> int:
        """Tokens that a table has room for."""
        return int(self.tables.shape[1]) * self.block_size


class FixedStep(ABC):
    """A step's inputs in tensors whose shapes and addresses do not change.

    tokens     [T] int64;  positions  [T] int64
    batch      for the ops; padding stores nothing and its outputs are undefined
    """

    __slots__ = ("_rows", "batch", "positions", "state", "tokens")

    def __init__(
        self, state: RowState, rows: Rows, tokens: torch.Tensor, positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:  # fmt: skip
        self.state = state
        self.tokens = tokens
        self.positions = positions
        self._rows = rows
        self.batch = AttentionBatch.fixed(
            slots, state.block_size, {"rows": rows}, max_context=state.max_context
        )

    @abstractmethod
    def prepare(self) -> None:
        """Fill the inputs; recorded with what reads them."""

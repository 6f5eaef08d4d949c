"""The inputs of a decode step, made on the device from the state that the last step left there.

`prepare` turns RowState's tokens, progress and block tables into a step's inputs, `commit` stores
the tokens drawn. Neither needs data from the host, so the next step can be launched before this
one's tokens are read. Called by model/runner/recorded.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.attention.rows import TILE_FIELDS, Rows
from streamer.kernels.gpu.fixed_step import FixedStep, RowState

BLOCK = 128  # rows a program; unmeasured


@triton.jit(do_not_specialize=["size"])
def _prepare_kernel(
    # pointers: chosen [size], state of RowState, a step's int64 [size] and int32 tensors
    chosen_ptr,
    latest_ptr,
    computed_ptr,
    tables_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    contexts_ptr,
    tiles_ptr,
    # sizes
    size,
    # strides
    table_row,
    # meta
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i of the step is row slot chosen[i], or padding where chosen[i] is -1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    chosen = tl.load(chosen_ptr + i, mask=is_inside, other=-1)
    is_row = chosen >= 0
    # [BLOCK] each
    position = tl.load(computed_ptr + chosen, mask=is_row, other=0)
    token = tl.load(latest_ptr + chosen, mask=is_row, other=0).to(tl.int64)
    # int64: a table of 65,536 rows may have 2**31 entries
    at = tables_ptr + chosen.to(tl.int64) * table_row + position // BLOCK_SIZE
    block = tl.load(at, mask=is_row, other=0).to(tl.int64)
    slot = tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(tokens_ptr + i, token, mask=is_inside)
    tl.store(positions_ptr + i, position.to(tl.int64), mask=is_inside)
    tl.store(slots_ptr + i, slot, mask=is_inside)
    tl.store(contexts_ptr + i, tl.where(is_row, position + 1, 0), mask=is_inside)
    # The tile's fields as in rows.Rows: row, its first token, its table, its place among parts.
    tl.store(tiles_ptr + 4 * i, i, mask=is_inside)
    tl.store(tiles_ptr + 4 * i + 1, 0 * i, mask=is_inside)
    tl.store(tiles_ptr + 4 * i + 2, tl.where(is_row, chosen, 0), mask=is_inside)
    tl.store(tiles_ptr + 4 * i + 3, i, mask=is_inside)


@triton.jit(do_not_specialize=["size"])
def _commit_kernel(
    # pointers: chosen [size], drawn int64 [size], state of RowState
    chosen_ptr,
    drawn_ptr,
    latest_ptr,
    computed_ptr,
    # sizes
    size,
    # meta
    BLOCK: tl.constexpr,
):
    """Slot chosen[i] drew drawn[i] (a failed row's -1 becomes token 0: the next step reads it)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + i, mask=i < size, other=-1)
    is_row = chosen >= 0
    # [BLOCK] each
    drawn = tl.load(drawn_ptr + i, mask=is_row, other=0).to(tl.int32)
    position = tl.load(computed_ptr + chosen, mask=is_row, other=0)
    tl.store(latest_ptr + chosen, tl.maximum(drawn, 0), mask=is_row)
    tl.store(computed_ptr + chosen, position + 1, mask=is_row)


class DecodeStep(FixedStep):
    """Inputs of a decode of up to `size` rows.

    chosen     [size] int32, the state's first ones: the row slot of each row, -1 for padding
    drawn_at   [size] int64: position of the token that each row draws
    """

    __slots__ = ("chosen", "drawn_at")

    def __init__(self, state: RowState, size: int) -> None:
        device = state.latest.device
        tokens, positions, slots, self.drawn_at = (
            torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.chosen = state.chosen[:size]
        rows = Rows(
            starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            contexts=torch.zeros(size, dtype=torch.int32, device=device),
            tiles=torch.zeros(size, TILE_FIELDS, dtype=torch.int32, device=device),
            tables=state.tables,
            num_wide=0,
            num_parts=size,
            spans=np.array([state.max_context]),
        )
        super().__init__(state, rows, tokens, positions, slots)

    def prepare(self) -> None:
        """Fill the inputs from `chosen` and the state."""
        size = self.chosen.shape[0]
        self._rows.changed()
        _prepare_kernel[(triton.cdiv(size, BLOCK),)](
            chosen_ptr=self.chosen,
            latest_ptr=self.state.latest,
            computed_ptr=self.state.computed,
            tables_ptr=self.state.tables,
            tokens_ptr=self.tokens,
            positions_ptr=self.positions,
            slots_ptr=self.batch.slots,
            contexts_ptr=self._rows.contexts,
            tiles_ptr=self._rows.tiles,
            size=size,
            table_row=self.state.tables.stride(0),
            BLOCK_SIZE=self.state.block_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
        torch.add(self.positions, 1, out=self.drawn_at)

    def commit(self, drawn: torch.Tensor) -> None:
        """Update the state: each row's K and V are stored, and it drew drawn [size] int64."""
        size = self.chosen.shape[0]
        _commit_kernel[(triton.cdiv(size, BLOCK),)](
            chosen_ptr=self.chosen,
            drawn_ptr=drawn,
            latest_ptr=self.state.latest,
            computed_ptr=self.state.computed,
            size=size,
            BLOCK=BLOCK,
            num_warps=4,
        )

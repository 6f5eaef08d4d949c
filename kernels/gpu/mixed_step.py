"""The inputs of a step with chunks beside decodes, which the host knows, padded to a fixed size.

`pack` lays a step out on the host, for one copy into `sent`; `prepare` spreads that on the device.
What a step lacks of the most rows and tiles that a step of the size can have is padding: tiles of a
row without tokens and context, for which attention neither reads keys nor writes. Has no kernel of
its own. Called by model/runner/recorded.py.
"""

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.attention.rows import TILE_FIELDS, Rows, cut, most_wide
from streamer.kernels.gpu.fixed_step import FixedStep, RowState, aligned

Ints = NDArray[np.int64]


class MixedStep(FixedStep):
    """Inputs of up to `size` tokens of up to as many rows as `state` has.

    tile_tokens  those of a narrow and of a wide tile: paged.tile_tokens
    sent         int64, to be overwritten with what `pack` gives before `prepare`: tokens,
                 positions, slots and row slots [size] each; tiles, starts and contexts of Rows
    """

    __slots__ = ("_ints", "_num_rows", "_num_wide", "_places", "_tile_tokens", "sent")

    def __init__(self, state: RowState, size: int, tile_tokens: tuple[int, int]) -> None:
        device = state.latest.device
        narrow, _ = self._tile_tokens = tile_tokens
        self._num_rows = num_rows = min(size, len(state.latest))
        self._num_wide = most_wide(num_rows, size, *tile_tokens)
        # One more row than there can be: that of the padding's tiles.
        num_tiles = self._num_wide + num_rows
        counts = [size] * 4 + [TILE_FIELDS * num_tiles, num_rows + 2, num_rows + 1]
        starts = list(accumulate(map(aligned, counts), initial=0))
        self._places = [slice(first, first + n) for first, n in zip(starts, counts, strict=False)]
        self.sent = torch.zeros(starts[-1], dtype=torch.int64, device=device)
        self._ints = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        tiles, row_starts, contexts = (self._ints[place] for place in self._places[4:])
        _, positions, slots, _ = (self.sent[place] for place in self._places[:4])
        rows = Rows(
            starts=row_starts,
            contexts=contexts,
            tiles=tiles.view(num_tiles, TILE_FIELDS),
            tables=state.tables,
            num_wide=self._num_wide,
            num_parts=min(size, num_rows * narrow),
            spans=np.array([state.max_context]),
        )
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        super().__init__(state, rows, tokens, positions, slots)

    def pack(self, tokens: Ints, positions: Ints, batch: AttentionBatch, owners: Ints) -> Ints:
        """The content of `sent` for a step.

        tokens  [T], below 0 where the row's latest one is meant;  positions  [T]
        batch   on the host;  owners  [R] the slots of its rows
        """
        packed = np.zeros(len(self.sent), np.int64)
        to_tokens, to_positions, to_slots, to_owners, tiles, starts, contexts = (
            packed[place] for place in self._places
        )
        count, num_rows = len(tokens), len(owners)
        to_tokens[:count], to_positions[:count] = tokens, positions
        to_slots[:count], to_slots[count:] = batch.slots.numpy(), -1
        to_owners[:count] = np.repeat(owners, batch.query_lens)
        starts[: num_rows + 1], starts[num_rows + 1 :] = batch.query_starts, count
        contexts[:num_rows] = batch.context_lens
        fields = tiles.reshape(-1, TILE_FIELDS)
        fields[:, 0] = self._num_rows
        large, small = cut(batch.query_lens, batch.context_lens, *self._tile_tokens)
        for first, found in ((0, large), (self._num_wide, small)):
            found[:, 2] = owners[found[:, 2]]
            fields[first : first + len(found)] = found
        return packed

    def prepare(self) -> None:
        """Fill the inputs from `sent` and the state."""
        self._rows.changed()
        tokens, _, _, owners = (self.sent[place] for place in self._places[:4])
        torch.where(tokens < 0, self.state.latest[owners].long(), tokens, out=self.tokens)
        self._ints.copy_(self.sent)

"""What a runner is made of: the model it computes with, and the sizes it is built for.

Values and protocols alone. cpu.py and cuda.py take both, load.py makes them; what a runner does
for the engine is engine.core.Runner.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from streamer.kernels import ops


class RunnerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a runner's pools, rows and steps.

    kv_dtype  of both pools; the model's if None
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_dtype: torch.dtype | None = None

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def limits(self) -> ops.Limits:
        """Bounds of every step, for the kernels."""
        return ops.Limits(
            max_tokens=self.max_num_batched_tokens,
            max_rows=self.max_num_seqs,
            block_size=self.block_size,
        )

    def pool_shape(self, model: CausalModel) -> tuple[int, int, int, int, torch.dtype]:
        """Backend.new_pool's arguments after the number of blocks."""
        dtype = self.kv_dtype or model.dtype
        return model.num_layers, self.block_size, model.num_kv_heads, model.head_dim, dtype


class CausalModel(Protocol):
    """What the runner needs of a model, as decoder.Decoder and fallback.FallbackModel have it."""

    dtype: torch.dtype
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def recordable(self) -> Recordable | None:
        """The model, if a GPU may replay its layers."""
        ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [S, V] of the packed tokens named by `last` (None: all), as Decoder.forward."""
        ...

    def forward_hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those logits, and the hidden states [S, H] that they come from, after the last norm."""
        ...

    def begin(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> bool:
        """Begin a decode that is likely to be asked for next, with this very batch and no `last`,
        while the caller does something else; False: it did not. See ops.Graph."""
        ...

    def prepare(self, limits: ops.Limits) -> None:
        """No step will exceed `limits`."""
        ...


class Recordable(Protocol):
    """A model in two parts: layers, which depend on a step's number of tokens, and the rest, which
    depends on how many rows are drawn from."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H] what the layers make of the tokens, before the last norm."""
        ...

    def logits(
        self, states: torch.Tensor, last: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [S, V] of those of the states [T, H] whose indices are in `last` (None: all), and
        the hidden states [S, H] that they come from, after the last norm."""
        ...

"""A backend's ops with every tensor on another device, for tests that make theirs on the CPU.

Arguments go there with their strides; what an op wrote comes back into them, and so do results.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from streamer.kernels.batch import AttentionBatch

HERE = {"new_pool", "rope_tables", "set_threads", "graph", "pack_weight"}


def require_cuda() -> None:
    """Skip the calling test file where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda.is_available() is false: no CUDA device", allow_module_level=True)


class OnDevice:
    """The ops of `backend` for tensors that live on the CPU."""

    def __init__(self, backend: ModuleType, device: str) -> None:
        self._backend = backend
        self._device = device

    def pack_weight(self, parts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """The packed weight stays on the device."""
        there = _Trip(self._device).there
        packed = self._backend.pack_weight(
            [there(part) for part in parts], *(there(a) for a in args), **kwargs
        )
        return _Linear(self._travelling(packed), self._travelling(packed.rows), packed.shape)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        door: Callable[..., Any] = getattr(self._backend, name)
        if name in HERE:
            return door
        return self._travelling(door)

    def _travelling(self, door: Callable[..., Any]) -> Callable[..., Any]:
        """The op with its tensors copied to the device and back."""

        def call(*args: Any, **kwargs: Any) -> Any:
            trip = _Trip(self._device)
            there = [trip.there(a) for a in args]
            out = door(*there, **{key: trip.there(a) for key, a in kwargs.items()})
            trip.bring_back()
            return trip.here(out)

        return call


class _Linear:
    """A packed weight on the device, for rows on the CPU."""

    def __init__(
        self, multiply: Callable[..., Any], rows: Callable[..., Any], shape: tuple[int, int]
    ) -> None:
        self._multiply = multiply
        self.rows = rows
        self.shape = shape

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> Any:
        return self._multiply(x, add_to=add_to)


class _Trip:
    """One call's tensors: here and on the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple(self.there(v) for v in value)
        if isinstance(value, AttentionBatch):
            return self._batch(value)
        return value

    def _tensor(self, here: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(
            here.shape, here.stride(), dtype=here.dtype, device=self._device
        )
        there.copy_(here)
        self._pairs.append((here, there))
        return there

    def _batch(self, here: AttentionBatch) -> AttentionBatch:
        there = here.derived.get(self._device)
        if there is None:
            there = here.derived[self._device] = AttentionBatch(
                query_lens=here.query_lens,
                context_lens=here.context_lens,
                block_tables=here.block_tables.to(self._device),
                slots=here.slots.to(self._device),
                block_size=here.block_size,
            )
        return there

    def bring_back(self) -> None:
        """Copy back what the op may have written."""
        for here, there in self._pairs:
            here.copy_(there)

    def here(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.here(v) for v in value)
        if isinstance(value, torch.Tensor):
            same = [here for here, there in self._pairs if there is value]
            return same[0] if same else value.cpu()
        return value

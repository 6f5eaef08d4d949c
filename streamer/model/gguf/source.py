"""GgufSource: a decoder's tensors from mapped GGUF files, quantized matrices as codes.

Owns the mappings while a model is loaded. Rows of queries and keys that llama.cpp keeps in pairs
are put back in halves, as the rotary kernels want them. Called by loader.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from types import TracebackType

import torch

from streamer.errors import ModelNotSupported
from streamer.kernels.weights import Weight
from streamer.model.checkpoint import Checkpoint
from streamer.model.gguf.blocks import LAYOUTS
from streamer.model.memory import return_freed
from streamer.model.quantization.interface import Matrix

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of general.architecture `llama`, whose converter orders a head's rows for rotation in pairs.
PAIRED = ("LlamaForCausalLM", "MistralForCausalLM")


class GgufSource:
    """A WeightSource over the files of a checkpoint; nothing it returns refers to a mapping."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        matrices: dict[str, Matrix],
        dtype: torch.dtype,
        device: torch.device,
        advance: Callable[[], None],
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        self._matrices = matrices
        config = checkpoint.config
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        self._heads = dict(zip(("q_proj", "k_proj"), heads, strict=True))
        self._is_paired = config["architectures"][0] in PAIRED
        self._advance = advance
        self._files: dict[str, mmap.mmap] = {}

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def take(self, name: str) -> torch.Tensor:
        """See decoder.WeightSource."""
        entry = self._checkpoint.tensors[name]
        return self._read(name).to(self.device, self.dtype, copy=True).view(entry.shape)

    def weight(self, module: str) -> Weight:
        """See decoder.WeightSource."""
        matrix = self._matrices[module]
        stored = self._read(f"{module}.weight")
        weight = matrix.scheme.read({"weight": stored}, matrix.n, matrix.k)
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, self.dtype, copy=True)
        return weight.to(self.device)

    def layer_done(self) -> None:
        """Advance the progress bar, and let go of the pages: those read count as resident."""
        for mapped in self._files.values():
            if hasattr(mapped, "madvise"):  # Windows has none
                mapped.madvise(mmap.MADV_DONTNEED)
        return_freed()
        self._advance()

    def _read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, [N, K], or uint8 [N, bytes of a row] if it is in blocks; a
        vector is one row. It may be a view of the mapping."""
        entry = self._checkpoint.tensors[name]
        columns = entry.shape[-1]
        raw = self._bytes(entry.file, entry.start, entry.end - entry.start)
        rows = raw.view(entry.num_elements // columns, -1)
        order = self._order(name, entry.shape[0])
        if order is not None:
            rows = rows.view(len(order), -1)[order].view(rows.shape)
        return rows if entry.dtype in LAYOUTS else rows.view(DENSE[entry.dtype])

    def _bytes(self, file: str, start: int, num_bytes: int) -> torch.Tensor:
        """A view of the mapping; written to, it would be a private copy."""
        if file not in self._files:
            path = self._checkpoint.path.parent / file
            with path.open("rb") as f:
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            self._files[file] = mapped
        mapped = self._files[file]
        if start + num_bytes > len(mapped):
            raise ModelNotSupported(f"{file} was cut while it was read", param="model")
        return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=start)

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Where each row of a head's halves lies among its pairs; None: rows are in order."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None or not self._is_paired:
            return None
        return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)

"""GgufSource: a decoder's tensors from GGUF files, quantized matrices as codes.

Owns the open files while a model is loaded. Rows of queries and keys that llama.cpp keeps in pairs
are put back in halves, as the rotary kernels want them. Called by loader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from streamer.kernels.weights import Weight
from streamer.model.checkpoint import Checkpoint
from streamer.model.files import WeightFiles
from streamer.model.gguf.blocks import LAYOUTS
from streamer.model.memory import return_freed
from streamer.model.quantization.interface import Matrix, check_finite

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of general.architecture `llama`, whose converter orders a head's rows for rotation in pairs.
PAIRED = ("LlamaForCausalLM", "MistralForCausalLM")


class GgufSource:
    """A WeightSource over the files of a checkpoint."""

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
        self._files = WeightFiles(checkpoint.path.parent)

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def take(self, name: str) -> torch.Tensor:
        """See decoder.WeightSource."""
        entry = self._checkpoint.tensors[name]
        return self._read(name).to(self.device, self.dtype).view(entry.shape)

    def weight(self, module: str) -> Weight:
        """See decoder.WeightSource."""
        matrix = self._matrices[module]
        stored = self._read(f"{module}.weight")
        weight = matrix.scheme.read({"weight": stored}, matrix.n, matrix.k)
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, self.dtype)
        return check_finite(module, weight).to(self.device)

    def layer_done(self) -> None:
        """Advance the progress bar, and return the memory that the layer took meanwhile."""
        return_freed()
        self._advance()

    def _read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, [N, K], or uint8 [N, bytes of a row] if it is in blocks; a
        vector is one row."""
        entry = self._checkpoint.tensors[name]
        columns = entry.shape[-1]
        rows = self._files.read(entry).view(entry.num_elements // columns, -1)
        order = self._order(name, entry.shape[0])
        if order is not None:
            rows = rows.view(len(order), -1)[order].view(rows.shape)
        return rows if entry.dtype in LAYOUTS else rows.view(DENSE[entry.dtype])

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Where each row of a head's halves lies among its pairs; None: rows are in order."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None or not self._is_paired:
            return None
        return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)

"""ops.Backend on a CUDA device (or, under TRITON_INTERPRET=1, on CPU tensors).

Tensors of one call, those of its batch included, are on the current device; no op waits for it.
Drawing is not among the ops: rows' sampling settings live on the device, see sampling/sample.py.
"""

import torch

from streamer.kernels import reference
from streamer.kernels.gpu.attention.paged import paged_attention as paged_attention
from streamer.kernels.gpu.cache.copy_blocks import copy_blocks as copy_blocks
from streamer.kernels.gpu.cache.rope import rope_and_store as rope_and_store
from streamer.kernels.gpu.cache.store_kv import store_kv as store_kv
from streamer.kernels.gpu.linear.embedding import embedding as embedding
from streamer.kernels.gpu.linear.packed import pack_weight as pack_weight
from streamer.kernels.gpu.norm import rms_norm as rms_norm
from streamer.kernels.gpu.sampling.best import best as best
from streamer.kernels.quantized import scale_rows

FP8_CAPABILITY = (8, 9)

# cuBLAS may split a sum, and by default adds the parts rounded to 16 bits: of 1,031 products in
# bfloat16 an H200 lost several bits of the result (2026-11-27). Now it adds them in float32.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

rope_tables = reference.rope_tables
set_threads = reference.set_threads
# One copy a run of neighbouring blocks; the host does not wait where its memory is pinned. A
# block is 0.4 to 2.5 MB, at which the copy engines do 40 GB/s and more on an H100 (published, not
# measured here) and leave the multiprocessors alone.
swap_blocks = reference.swap_blocks
graph = reference.graph  # steps are recorded whole: model/runner/recorded.py


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """See Backend.new_pool. A pool on the host is pinned, so that the host does not wait for swaps.

    ValueError for FP8 on a device that does not convert e4m3 (below compute capability 8.9).
    """
    if dtype is torch.float8_e4m3fn and torch.device(device).type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ValueError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability}, an FP8 "
                f"KV cache needs {FP8_CAPABILITY}; int8 has no such limit"
            )
    rows = block_size + scale_rows(block_size, head_dim, dtype)
    shape = (num_blocks, layers, 2, kv_heads, rows, head_dim)
    is_pinned = torch.device(device).type == "cpu" and torch.cuda.is_available()
    return torch.zeros(shape, dtype=dtype, device=device, pin_memory=is_pinned)

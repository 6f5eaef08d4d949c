"""load_runner: from a Config with a checkpoint folder to the runner of its device, ready to step.

The one place that decides device, threads and pool sizes. Called on the engine's GPU thread, which
is the one that runs it later; what can be refused is refused before the weights are read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from streamer.config import Config
from streamer.core.sizes import ModelInfo, batched_tokens
from streamer.errors import ConfigError, InvariantViolated
from streamer.kernels import ops
from streamer.model import memory
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import Recognized, model_info, recognize
from streamer.model.loader import DTYPES, load_decoder, progress_bar
from streamer.model.runner.cpu import CpuRunner
from streamer.model.runner.cuda import CudaRunner, step_bytes
from streamer.model.runner.device import CudaDevice, Device, choose_device
from streamer.model.runner.interface import CausalModel, RunnerSizes

logger = logging.getLogger(__name__)

SINGLE_THREAD_BYTES = 32 << 20  # with smaller weights torch computes on one thread


def load_runner(
    config: Config, device: Device | None = None, go_on: Callable[[], None] = lambda: None
) -> tuple[CpuRunner | CudaRunner, ModelInfo]:
    """Load config.model (a folder) on this thread, which is the one that runs it later.

    ModelNotSupported, NotEnoughMemory and ConfigError come before weights are read, where they can
    be known. `device`: instead of the config's. `go_on`: called after each layer, may raise.
    """
    if config.model is None:
        raise ConfigError("no checkpoint folder to load", param="model")
    where = choose_device(config.device) if device is None else device.where
    if device is None and where.type == "cuda":
        device = CudaDevice(where)
    kernels = ops.choose(where)
    checkpoint = open_checkpoint(Path(config.model), config.quantization)
    known = recognize(checkpoint, config.dtype, where)
    free = memory.device_free_bytes(where)
    memory.check_weights_fit(known.weight_bytes, free)
    kv_dtype = known.kv_dtype(config.kv_cache_dtype)
    block_bytes = known.block_bytes(config)

    def plan_pools(free: int) -> memory.PoolSizes:
        return memory.plan_pools(
            config,
            block_bytes=block_bytes,
            model_limit=known.model_limit,
            free=free,
            host_free=None if device is None else memory.free_bytes(),
        )

    plan_pools(free - known.weight_bytes)  # refuses before minutes of loading
    if device is None:
        _set_threads(known, kernels)
    model = _load_model(kernels, known, where, config.load_progress, go_on)
    peak = 0
    if device is not None:
        peak = step_bytes(device, kernels, model, config, known.model_limit, kv_dtype)
    left = memory.device_free_bytes(where) if device is None else device.free_bytes()
    pools = plan_pools(left - peak)
    if pools.limited_by:
        says = "context limited to %d of the model's %d tokens: %s"
        logger.warning(says, pools.max_model_len, known.model_limit, pools.limited_by)
    sizes = RunnerSizes(
        num_blocks=pools.num_blocks,
        num_host_blocks=pools.num_host_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, where.type),
        max_model_len=pools.max_model_len,
        kv_dtype=kv_dtype,
    )
    info = model_info(known, config, pools, block_bytes, where)
    if device is None:
        return CpuRunner(ops.for_cpu(), model, sizes), info
    runner = CudaRunner(device, kernels, model, sizes)
    runner.warm()
    if model.is_recordable:
        runner.record(peak, config.load_progress)
    return runner, info


def _load_model(
    kernels: ops.Backend,
    known: Recognized,
    device: torch.device,
    show_progress: bool,
    go_on: Callable[[], None],
) -> CausalModel:
    dtype = DTYPES[known.dtype]
    if known.scheme and device.type == "cpu" and (why := ops.why_not_native()):
        says = "quantized weights are held dense, %d MiB, and gain nothing in speed: %s"
        logger.warning(says, known.weight_bytes >> 20, why)
    if known.decoder is not None:
        name, num_layers = f"Loading {known.checkpoint.path.name}", known.num_layers
        with progress_bar(name, num_layers, "layers", show_progress) as advance:

            def layer_done() -> None:
                advance()
                go_on()

            return load_decoder(kernels, known.checkpoint, known.decoder, dtype, device, layer_done)
    from streamer.model.fallback import load_fallback  # transformers' modelling code

    if known.fallback is None:
        raise InvariantViolated("a recognized checkpoint has neither decoder nor fallback")
    return load_fallback(
        kernels, known.checkpoint, known.fallback, dtype, device, show_progress=show_progress
    )


def _set_threads(known: Recognized, kernels: ops.Backend) -> None:
    """Set the threads of torch and the kernels. Beside the native kernels torch only samples, or
    runs transformers' own code; two pools of spinning threads would slow each other down.

    Where torch computes a small model it gets one thread: its many short parallel regions gain
    nothing from a second one and stall when another process takes that core (the bundled model's
    step on 2 cores, 2026-11-20: 3.1 ms with one thread, 4.1 with two, 55 to 400 with two beside a
    busy process). The native kernels' threads gain a third, and lose a tenth at most beside a busy
    process (loadtest/inside/README.md).
    """
    is_by_torch = known.decoder is None or bool(ops.why_not_native())
    is_small = known.weight_bytes < SINGLE_THREAD_BYTES
    threads = 1 if is_by_torch and is_small else _num_cores()
    torch.set_num_threads(threads if known.decoder is None else 1)
    kernels.set_threads(threads)


@functools.cache
def _torch_threads() -> int:
    """torch's own count from before the first engine set it, for later engines of this process.

    Without it the second engine got one thread and was a quarter slower (2 cores, 2026-11-22).
    """
    return torch.get_num_threads()


def _num_cores() -> int:
    """Cores this process may use: torch's own count, within affinity and the cgroup's quota."""
    return min(_torch_threads(), memory.num_cores())

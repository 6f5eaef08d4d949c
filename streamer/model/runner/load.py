"""load_runner: from a Config with a checkpoint folder to the runner of its device, ready to step.

The one place that decides device, threads and pool sizes. Called on the engine's GPU thread, which
is the one that runs it later; what can be refused is refused before the weights are read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from streamer.config import Config
from streamer.core.sizes import ModelInfo, batched_tokens
from streamer.errors import ConfigError, InvariantViolated
from streamer.kernels import ops
from streamer.model import memory
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import DecoderConfig, architecture_of
from streamer.model.inspect import Recognized, model_info, recognize
from streamer.model.loader import DTYPES, load_decoder, progress_bar
from streamer.model.ranks.linear import Shared
from streamer.model.ranks.split import FIELD, split
from streamer.model.runner.cpu import CpuRunner
from streamer.model.runner.cuda import CudaRunner, StepBytes, step_bytes
from streamer.model.runner.device import CPU, CudaDevice, Device, choose_device
from streamer.model.runner.draft import DraftModel, spare_blocks
from streamer.model.runner.interface import CausalModel, RunnerSizes

if TYPE_CHECKING:
    from streamer.model.ranks.group import Group

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """One of the ranks that share a model.

    on_host_index  which of its host's it is, and so which GPU it has
    num_ranks      of all hosts
    join           begins the group, when the model is known that they can share
    """

    on_host_index: int
    num_ranks: int
    join: Callable[[Recognized, torch.device], Group]


SINGLE_THREAD_BYTES = 32 << 20  # with smaller weights torch computes on one thread


def load_runner(
    config: Config,
    device: Device | None = None,
    go_on: Callable[[], None] = lambda: None,
    place: Place | None = None,
) -> tuple[CpuRunner | CudaRunner, ModelInfo]:
    """Load config.model (a folder) on this thread, which is the one that runs it later.

    ModelNotSupported, NotEnoughMemory and ConfigError come before weights are read, where they can
    be known. `device`: instead of the config's. `go_on`: called after each layer, may raise.
    `place`: among the ranks that share the model; this one loads its part.
    """
    if config.model is None:
        raise ConfigError("no checkpoint folder to load", param="model")
    where = device.where if device is not None else _device(config, place)
    device = CudaDevice(where) if device is None and where.type == "cuda" else device
    kernels = ops.choose(where)
    checkpoint = open_checkpoint(Path(config.model), config.quantization)
    known, shared = _part_of(recognize(checkpoint, config.dtype, where), where, place)
    group = None if shared is None else shared.group
    small = _recognize_draft(config, where)
    weight_bytes = known.weight_bytes + (0 if small is None else small.weight_bytes)
    free = _free_bytes(where, group)
    memory.check_weights_fit(weight_bytes, free)
    kv_dtype = known.kv_dtype(config.kv_cache_dtype)

    def plan_pools(free: int) -> memory.PoolSizes:
        return memory.plan_pools(
            config,
            block_bytes=known.block_bytes(config) + _draft_block_bytes(config, small),
            model_limit=known.model_limit,
            free=free - _spare_bytes(config, small),
            host_free=None if device is None else _free_bytes(CPU, group),
        )

    plan_pools(free - weight_bytes)  # refuses before minutes of loading
    if device is None:
        _set_threads(known, kernels, 1 if group is None else group.on_host)
    load = functools.partial(_load_model, kernels, where, config.load_progress, go_on)
    model, draft = load(known, shared), None
    if small is not None:
        most = config.speculative_config.num_speculative_tokens
        draft = DraftModel(load(small), small.model_limit, most)
    if group is not None:
        group.meet()
    step = StepBytes(0, 0)
    if device is not None:
        step = step_bytes(device, kernels, model, config, known.model_limit, kv_dtype)
    left = _free_bytes(CPU, group) if device is None else device.free_bytes()
    pools = _agreed(plan_pools(left - sum(step)), group, known.model_limit)
    sizes = _sizes(config, pools, where, kv_dtype)
    info = model_info(known, config, pools, known.block_bytes(config), where)
    if device is None:
        return _agreeing(CpuRunner(ops.for_cpu(), model, sizes, draft), group), info
    on_gpu = CudaRunner(device, kernels, model, sizes)
    on_gpu.warm()
    on_gpu.record(step, config.load_progress)
    return _agreeing(on_gpu, group), info


def _agreeing(runner: CpuRunner | CudaRunner, group: Group | None) -> CpuRunner | CudaRunner:
    """The runner, which knows the other ranks."""
    if group is not None:
        runner.agree(group.minima)
    return runner


def _sizes(
    config: Config, pools: memory.PoolSizes, where: torch.device, kv_dtype: torch.dtype
) -> RunnerSizes:
    return RunnerSizes(
        num_blocks=pools.num_blocks,
        num_host_blocks=pools.num_host_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, where.type),
        max_model_len=pools.max_model_len,
        kv_dtype=kv_dtype,
    )


def _recognize_draft(config: Config, where: torch.device) -> Recognized | None:
    """The draft model of the config, if it has one."""
    if config.draft_model is None:
        return None
    if where.type != "cpu":
        why = "draft models run on the CPU alone so far; without one, speculation does on a GPU too"
        raise ConfigError(f"speculative_model: {why}", param="speculative_model")
    return recognize(open_checkpoint(Path(config.draft_model)), config.dtype, where)


def _draft_block_bytes(config: Config, small: Recognized | None) -> int:
    """Bytes of a block of the draft model's pool, which is never quantized."""
    if small is None:
        return 0
    return small.block_bytes(msgspec.structs.replace(config, kv_cache_dtype="auto"))


def _spare_bytes(config: Config, small: Recognized | None) -> int:
    count = spare_blocks(config.speculative_config.num_speculative_tokens, config.block_size)
    return config.max_num_seqs * count * _draft_block_bytes(config, small)


def _device(config: Config, place: Place | None) -> torch.device:
    """Where this process computes; on GPUs each rank of a host has its own."""
    return choose_device(config.device, None if place is None else place.on_host_index)


def _shareable(known: Recognized, count: int) -> DecoderConfig:
    """The decoder that ranks share; ConfigError where there is none, or it can't be split."""
    if known.decoder is None:
        architecture = architecture_of(known.checkpoint.config)
        why = "it runs on transformers' code, which is not split"
        raise ConfigError(f"{FIELD} {count}: {architecture}: {why}", param=FIELD)
    split(known.decoder, count)
    return known.decoder


def _part_of(
    known: Recognized, where: torch.device, place: Place | None
) -> tuple[Recognized, Shared | None]:
    """What this rank loads, with the sizes of its part."""
    if place is None:
        return known, None
    decoder = _shareable(known, place.num_ranks)
    shared = Shared(decoder, place.join(known, where))
    weight_bytes = int(known.weight_bytes * shared.part.share)
    kv_heads = shared.part.kv_heads.size
    return msgspec.structs.replace(known, weight_bytes=weight_bytes, num_kv_heads=kv_heads), shared


def _free_bytes(where: torch.device, group: Group | None) -> int:
    """Memory that this process can take, beside the other ranks on this machine."""
    free = memory.device_free_bytes(where)
    return free if group is None or where.type == "cuda" else free // group.on_host


def _agreed(pools: memory.PoolSizes, group: Group | None, model_limit: int) -> memory.PoolSizes:
    """Sizes that every rank has room for; a shortened context is logged."""
    if group is not None:
        blocks, host, context = group.minima(
            (pools.num_blocks, pools.num_host_blocks, pools.max_model_len)
        )
        pools = memory.PoolSizes(blocks, host, context, pools.limited_by)
    if pools.limited_by:
        says = "context limited to %d of the model's %d tokens: %s"
        logger.warning(says, pools.max_model_len, model_limit, pools.limited_by)
    return pools


def _load_model(
    kernels: ops.Backend,
    device: torch.device,
    show_progress: bool,
    go_on: Callable[[], None],
    known: Recognized,
    shared: Shared | None = None,
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

            config = shared or known.decoder
            return load_decoder(kernels, known.checkpoint, config, dtype, device, layer_done)
    from streamer.model.fallback import load_fallback  # transformers' modelling code

    if known.fallback is None:
        raise InvariantViolated("a recognized checkpoint has neither decoder nor fallback")
    return load_fallback(
        kernels, known.checkpoint, known.fallback, dtype, device, show_progress=show_progress
    )


def _set_threads(known: Recognized, kernels: ops.Backend, num_ranks: int) -> None:
    """Set the threads of torch and the kernels: a rank's share of the cores. Beside the native
    kernels torch only samples, or runs transformers' own code; two pools of spinning threads would
    slow each other down.

    Where torch computes a small model it gets one thread: its many short parallel regions gain
    nothing from a second one and stall when another process takes that core (the bundled model's
    step on 2 cores, 2026-11-20: 3.1 ms with one thread, 4.1 with two, 55 to 400 with two beside a
    busy process). The native kernels' threads gain a third, and lose a tenth at most beside a busy
    process (loadtest/inside/README.md).
    """
    why_not = ops.why_not_native()
    if why_not:
        logger.warning("computing is many times slower than with the native kernels: %s", why_not)
    is_by_torch = known.decoder is None or bool(why_not)
    is_small = known.weight_bytes < SINGLE_THREAD_BYTES
    threads = 1 if is_by_torch and is_small else max(1, _num_cores() // num_ranks)
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

"""How much memory there is, and how many KV blocks of it the pools get.

Reads /proc, cgroups and the GPU's driver, allocates nothing; `plan_pools` is plain arithmetic over
the numbers. Called by runner/load.py (before and after loading the weights), by inspect.py, and by
the sources of weights, which return what they freed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

import msgspec
import torch

from streamer.config import Config
from streamer.errors import ConfigError, NotEnoughMemory

GIB = 1 << 30
SHARE, GPU_SHARE = 0.5, 0.9  # of the free memory, for the KV pool; a GPU is not shared
MIN_MODEL_LEN = 512  # a context below this is refused rather than chosen for the user
CGROUP = Path("/sys/fs/cgroup")
STATUS = Path("/proc/self/status")
# Of glibc's malloc: numbers of its settings; a chunk that is freed to the system at once; the
# largest that comes from a heap.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_KEEPS_BYTES, MALLOC_MAPS_BYTES = 128 << 10, 32 << 20


class PoolSizes(msgspec.Struct, frozen=True):
    """Blocks of both pools, and the context length that one sequence can reach.

    limited_by  why the context is shorter than the model's, and what changes it; "" where not
    """

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    limited_by: str = ""


def free_bytes() -> int:
    """Memory this process can still take: what the system has available, within its cgroups and
    its own limits (ulimit -v, ulimit -d)."""
    limits = [_available_bytes(), *_cgroup_free_bytes(), *_process_free_bytes()]
    return max(0, min(limits))


def device_free_bytes(device: torch.device) -> int:
    """Memory that this process can still take on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def plan_pools(
    config: Config, *, block_bytes: int, model_limit: int, free: int, host_free: int | None = None
) -> PoolSizes:
    """Size both pools out of `free` bytes for a model that can hold `model_limit` tokens.

    The device pool takes gpu_memory_utilization of it, but no more than max_num_seqs full
    contexts; the host pool takes swap_space, but at most half of host_free, the memory beside a
    GPU's, or, if None (one memory for both), half of what the device pool leaves. Without
    max_model_len the context shrinks to what the pool holds. NotEnoughMemory carries the numbers.
    """
    requested = config.max_model_len
    if requested is not None and requested > model_limit:
        raise ConfigError(
            f"max_model_len {requested} exceeds the {model_limit} tokens the model is made for",
            param="max_model_len",
        )
    context = model_limit if requested is None else requested
    size = config.block_size
    share = config.gpu_memory_utilization
    if share is None:
        share = SHARE if host_free is None else GPU_SHARE
    budget = int(free * share)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        if num_blocks * block_bytes > free:
            raise NotEnoughMemory(
                f"{num_blocks} KV blocks of {block_bytes:,} bytes are "
                f"{_gib(num_blocks * block_bytes)}, {_gib(free)} are free; lower "
                "--num-gpu-blocks-override",
                param="num_gpu_blocks_override",
            )
        minimum = 1
    else:
        num_blocks = min(config.max_num_seqs * -(-context // size), budget // block_bytes)
        minimum = min(MIN_MODEL_LEN, model_limit)
    holds = num_blocks * size
    if holds < context and (requested is not None or holds < minimum):
        needed = -(-(context if requested is not None else minimum) // size)
        raise NotEnoughMemory(
            f"one sequence of {needed * size} tokens needs {needed} KV blocks of {block_bytes:,} "
            f"bytes ({_gib(needed * block_bytes)}); the pool has {num_blocks} "
            f"({100 * share:.3g}% of {_gib(free)} free). Lower --max-model-len, "
            "or raise --gpu-memory-utilization or --num-gpu-blocks-override",
            param="max_model_len",
        )
    spare = free - max(budget, num_blocks * block_bytes) if host_free is None else host_free
    host = min(int(config.swap_space * GIB), max(0, spare) // 2) // block_bytes
    return PoolSizes(
        num_blocks, host, min(context, holds), _limited_by(config, holds, context, share, free)
    )


def _limited_by(config: Config, holds: int, context: int, share: float, free: int) -> str:
    if holds >= context:
        return ""
    if config.num_gpu_blocks_override is not None:
        return (
            f"--num-gpu-blocks-override {config.num_gpu_blocks_override} holds no more; raise it "
            "for a longer one"
        )
    return (
        f"--gpu-memory-utilization {share:g} of {_gib(free)} free holds no more; raise it for a "
        "longer one"
    )


def check_weights_fit(weight_bytes: int, free: int) -> None:
    """NotEnoughMemory, before loading, where the weights alone do not fit."""
    if weight_bytes > free:
        raise NotEnoughMemory(
            f"the weights need {_gib(weight_bytes)}, {_gib(free)} are free; --dtype bfloat16 "
            "halves what float32 takes, --quantization int8 that again, int4 nearly so once more",
            param="model",
        )


def return_freed() -> None:
    """Give memory that was freed back to the system, where glibc would keep it: after half's
    matrices were quantized and packed 45 MB in holes and 35 at the end of this thread's heap, which
    malloc_trim leaves and a chunk of 64 KiB gives back when it is freed (2026-11-22)."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(MALLOC_KEEPS_BYTES))))
        # What glibc itself raises them to, once a large chunk was freed; setting one ends that.
        libc.mallopt(M_MMAP_THRESHOLD, MALLOC_MAPS_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MALLOC_MAPS_BYTES)
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """glibc; other C libraries have no malloc_trim."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    return libc


def num_cores() -> int:
    """Cores that this process may use, by its affinity and its cgroup's quota."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return max(1, min(count, cpu_quota() or count))


def cpu_quota() -> int | None:
    """Whole cores that the cgroups (version 2) let this process use; None: no limit."""
    found = []
    for folder in {CGROUP, *(folder for folder, _, _ in _cgroup_folders())}:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(max(1, int(quota) // int(period)))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found, default=None)


def _available_bytes() -> int:
    """MemAvailable where /proc has it, else sysconf's figure."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if pages in os.sysconf_names:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return 4 * GIB  # no way to ask: what the smallest laptops have free


def _process_free_bytes() -> list[int]:
    """What RLIMIT_AS and RLIMIT_DATA still allow; none where unlimited."""
    try:
        import resource

        fields = dict(line.split(":") for line in STATUS.read_text().splitlines() if ":\t" in line)
        free = []
        for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                free.append(soft - int(fields[field].split()[0]) * 1024)
        return free
    except (ImportError, OSError, ValueError, KeyError):  # no Linux
        return []


def _cgroup_free_bytes() -> list[int]:
    """What each cgroup of this process still allows, versions 1 and 2; none where unlimited."""
    free = []
    for folder, limit_file, used_file in _cgroup_folders():
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None or limit >= 1 << 60:
            continue
        free.append(limit - used + _reclaimable(folder / "memory.stat"))
    return free


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) from this process's groups up to the roots."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, used = CGROUP, "memory.current"
            limits = ["memory.max", "memory.high"]  # above memory.high the process is slowed down
        elif "memory" in controllers.split(","):
            root, used = CGROUP / "memory", "memory.usage_in_bytes"
            limits = ["memory.limit_in_bytes"]
        else:
            continue
        parts = [p for p in group.split("/") if p not in ("", "..")]
        folders = [root.joinpath(*parts[:n]) for n in range(len(parts) + 1)]
        found += [(folder, limit, used) for folder in folders for limit in limits]
    return found


def _reclaimable(stat: Path) -> int:
    """Page cache that counts as used but can be reclaimed."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

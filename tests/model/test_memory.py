"""Pool sizes are arithmetic; free memory comes from /proc and the cgroups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamer.config import Config
from streamer.errors import ConfigError, NotEnoughMemory
from streamer.model import memory
from streamer.model.memory import GIB, PoolSizes, check_weights_fit, free_bytes, plan_pools

MIB = 1 << 20


def pools(free: int, **settings: Any) -> PoolSizes:
    """A model of 4096 tokens and 1 MiB blocks of 16 tokens."""
    return plan_pools(Config(**settings), block_bytes=MIB, model_limit=4096, free=free)


def test_a_share_of_what_is_free() -> None:
    """The device pool takes half of 2 GiB, the host pool a quarter GiB."""
    assert pools(2 * GIB) == PoolSizes(1024, 256, 4096)


def test_never_more_than_useful() -> None:
    """Three sequences of 4096 tokens are 768 blocks."""
    assert pools(64 * GIB, max_num_seqs=3).num_blocks == 768
    assert pools(64 * GIB, max_num_seqs=3, max_model_len=100).num_blocks == 21


def test_the_override_is_exact() -> None:
    """The context shrinks to the pool of exactly that many blocks."""
    made = pools(2 * GIB, num_gpu_blocks_override=7)
    assert (made.num_blocks, made.num_host_blocks, made.max_model_len) == (7, 256, 112)


def test_what_shortens_the_context_is_said_with_the_flag_that_helps() -> None:
    """Also where the pool is small because of a setting."""
    assert pools(2 * GIB).limited_by == ""
    assert "--num-gpu-blocks-override 7 " in pools(2 * GIB, num_gpu_blocks_override=7).limited_by
    few = pools(2 * GIB, gpu_memory_utilization=0.05)
    assert few.max_model_len == 1632
    assert "--gpu-memory-utilization 0.05 of 2.00 GiB free" in few.limited_by


def test_the_host_pool_leaves_room() -> None:
    """At most half of what the device pool leaves."""
    assert pools(GIB, swap_space=64.0).num_host_blocks == 256
    assert pools(GIB, swap_space=0.0).num_host_blocks == 0
    assert pools(GIB, gpu_memory_utilization=1.0).num_host_blocks == 0


def test_a_gpu_has_memory_of_its_own() -> None:
    """Nine tenths of it by default; swap space is at most half of the free host memory."""

    def on_gpu(host_free: int, **settings: Any) -> PoolSizes:
        return plan_pools(
            Config(**settings), block_bytes=MIB, model_limit=4096, free=GIB, host_free=host_free
        )

    assert on_gpu(64 * GIB) == PoolSizes(921, 256, 4096)
    assert on_gpu(64 * GIB, swap_space=4.0, gpu_memory_utilization=1.0).num_host_blocks == 4096
    assert on_gpu(GIB, swap_space=4.0, gpu_memory_utilization=0.5) == PoolSizes(512, 512, 4096)


def test_the_context_shrinks_to_the_pool() -> None:
    """128 MiB hold 64 blocks, 1024 tokens of the model's 4096."""
    assert pools(128 * MIB).max_model_len == 1024


@pytest.mark.parametrize(
    ("free", "settings", "error", "param", "numbers"),
    [
        (128 * MIB, {"max_model_len": 1025}, NotEnoughMemory, "max_model_len", "1040 tokens .* 65"),
        (62 * MIB, {}, NotEnoughMemory, "max_model_len", "512 tokens .*needs 32 .*has 31"),
        (
            GIB,
            {"num_gpu_blocks_override": 1025},
            NotEnoughMemory,
            "num_gpu_blocks_override",
            "1025 KV blocks",
        ),
        (GIB, {"max_model_len": 4097}, ConfigError, "max_model_len", "4097 .* 4096"),
    ],
)
def test_refusals(
    free: int, settings: dict[str, Any], error: type[ConfigError], param: str, numbers: str
) -> None:
    """Refusals name the numbers and the flag that helps."""
    with pytest.raises(error, match=numbers) as caught:
        pools(free, **settings)
    assert caught.value.param == param
    if error is NotEnoughMemory:
        assert "--" in caught.value.message


def test_weights_that_do_not_fit() -> None:
    """Weights that do not fit are refused before any file is read."""
    check_weights_fit(GIB, GIB)
    with pytest.raises(NotEnoughMemory, match=r"2\.00 GiB, 1\.00 GiB are free"):
        check_weights_fit(2 * GIB, GIB)


def test_the_machine_has_memory() -> None:
    """Some, and not absurdly much."""
    assert 64 * MIB < free_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/box/inner", "box", "memory.max", "memory.current"),
        ("0::/box/inner", "box", "memory.high", "memory.current"),  # slowed down above it
        (
            "4:cpu,memory:/box",
            "memory/box",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_cgroups_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, folder: str, limit: str, used: str
) -> None:
    """Both versions; any group on the way to the root may limit; page cache can be reclaimed."""
    group = tmp_path / folder
    group.mkdir(parents=True)
    (group / limit).write_text(str(300 * MIB))
    (group / used).write_text(str(250 * MIB))
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {30 * MIB}\n")
    (tmp_path / limit).write_text("max")
    real = Path.read_text

    def read(path: Path, *args: Any, **kwargs: Any) -> str:
        return line if str(path) == "/proc/self/cgroup" else real(path, *args, **kwargs)

    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(Path, "read_text", read)
    assert free_bytes() == 80 * MIB


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1), ("400000 100000", 4)]
)
@pytest.mark.parametrize("folder", ["", "box", "box/inner"])
def test_cpu_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, text: str, cores: int | None
) -> None:
    """Whole cores, at least one; the lowest limit on the way to the root applies."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "cpu.max").write_text(text)
    real = Path.read_text

    def read(path: Path, *args: Any, **kwargs: Any) -> str:
        own = "0::/box/inner"
        return own if str(path) == "/proc/self/cgroup" else real(path, *args, **kwargs)

    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(Path, "read_text", read)
    assert memory.cpu_quota() == cores


def test_the_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ulimit -v and -d: what is left of each, as /proc counts what is used."""
    import resource

    limits = {resource.RLIMIT_AS: 100 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    (tmp_path / "status").write_text("Name:\tx\nVmSize:\t   40960 kB\nVmData:\t 20480 kB\n")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    assert free_bytes() == 60 * MIB
    limits[resource.RLIMIT_DATA] = 30 * MIB
    assert free_bytes() == 10 * MIB
    limits[resource.RLIMIT_AS] = MIB
    assert free_bytes() == 0

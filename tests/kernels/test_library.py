"""The native library: the same results on other CPUs, and torch where there is no compiler."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamer.kernels import ops, reference
from streamer.kernels.cpu import library, native

ROOT = Path(__file__).parents[2]
CPU = Path("/proc/cpuinfo")
MACHINES = ["haswell", "x86-64-v2", "x86-64"] if os.uname().machine == "x86_64" else []
if MACHINES and CPU.exists() and not re.search("avx512f|avx_vnni", CPU.read_text()):
    MACHINES.remove("haswell")  # compiled for it they are what the other files of this folder test
WHICH = """
from streamer.kernels import ops, reference
print(ops.for_cpu().__name__.rpartition(".")[2], ops.why_not_native())
"""


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, since a library is compiled and loaded once a process."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def older(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """The ops' own tests for each of MACHINES, all at once: half of their time is compiling."""
    started = {}
    for machine in MACHINES:
        names, chosen = ["quantized_linear"], "arithmetic or pass or table"
        if machine != "x86-64":
            chosen = "native or quantized_linear"
            names += ["linear", "attention", "quantized", "ops"]
        folder = tmp_path_factory.mktemp(machine)
        files = [f"tests/kernels/test_{name}.py" for name in names]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files],
            env={**os.environ, "CFLAGS": f"-march={machine}", "XDG_CACHE_HOME": str(folder)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started[machine] = folder, process
    yield started
    for _, process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("machine", MACHINES)
def test_older_machines_compute_the_same(
    machine: str, older: dict[str, tuple[Path, subprocess.Popen[str]]]
) -> None:
    """Compiled without AVX512, without AVX, and codes in plain C."""
    folder, process = older[machine]
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    assert len(list(folder.rglob("*.so"))) == 1


@pytest.mark.skipif(not MACHINES, reason="these are flags of x86-64")
@pytest.mark.parametrize("flags", ["-march=ivybridge", "-march=haswell -mavx512f"])
def test_machines_with_some_of_the_instructions_compile(flags: str) -> None:
    """Float16 without AVX2, and AVX512 without its bytes: one says nothing of the other."""
    command = [*library._compiler(), *library.FLAGS, *flags.split(), "-O1", "-S", "-o", os.devnull]
    done = subprocess.run(
        [*command, str(library.FOLDER / library.MAIN)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_a_compiler_torch_serves(tmp_path: Path) -> None:
    """Also reports the reason."""
    done = run(["-c", WHICH], CC="/nowhere/cc", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("reference the kernels can't be compiled"), (
        done.stdout + done.stderr
    )
    assert "/nowhere/cc" in done.stdout
    done = run(["-c", WHICH], CFLAGS="--no-such-flag", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("reference "), done.stdout + done.stderr
    assert "no-such-flag" in done.stdout
    assert not list(tmp_path.rglob("*.so"))


def test_torch_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    assert ops.for_cpu() is ops.choose(torch.device("cpu")) is reference
    assert ops.why_not_native() == "STREAMER_KERNELS=torch"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for a library of one function, which compiles in no time."""
    (sources := tmp_path / "sources").mkdir()
    (sources / library.MAIN).write_text("int lanes(void) { return 1; }\n")
    monkeypatch.setattr(library, "FOLDER", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "streamer" / "kernels"


def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load()
    found = list(cache.rglob("*.so"))
    assert len(found) == 1
    monkeypatch.setattr(library, "_compile", pytest.fail)
    assert library.load().lanes() == 1
    assert list(cache.rglob("*.so")) == found


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "writable"])
def test_a_damaged_cached_library_is_compiled_again(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shortened one ended every process that loaded it (SIGBUS); an empty one led to torch."""
    library.load()
    (path,) = cache.rglob("*.so")
    whole = path.read_bytes()
    bad = {"truncated": whole[: len(whole) // 2], "empty": b"", "changed": whole[:-1] + b"!"}
    path.unlink()  # this process has the whole one mapped
    path.write_bytes(bad.get(damage, whole))
    path.chmod(0o722 if damage == "writable" else 0o700)
    loaded: list[bytes] = []
    loading = SimpleNamespace(CDLL=lambda name: loaded.append(Path(name).read_bytes()))
    monkeypatch.setattr(library, "ctypes", loading)
    library.load()
    assert loaded == [whole]
    assert "compiling it again" in caplog.text
    (path,) = cache.rglob("*.so")
    assert path.stat().st_mode & 0o777 == 0o700


def test_what_another_user_made_is_not_loaded() -> None:
    """Also in a folder that now belongs to this user."""
    mode, ours = 0o100700, os.getuid()
    for owner, extra, is_private in ((ours, 0, True), (ours + 1, 0, False), (ours, 0o20, False)):
        about = os.stat_result((mode | extra, 0, 0, 1, owner, 0, 0, 0, 0, 0))
        assert library._is_private(about) is is_private


def test_a_folder_that_others_can_write_to_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library there would be run. The library is compiled and loaded without leaving a file."""
    assert library._cache_folder() == cache
    cache.chmod(0o777)
    assert library._cache_folder() is None
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(library.tempfile, "tempdir", str(temporary))
    assert library.load().lanes() == 1
    assert list(temporary.iterdir()) == list(cache.iterdir()) == []


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id has no entry."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert library._cache_folder() is None


def test_a_full_disk_leaves_torch_to_serve(tmp_path: Path) -> None:
    """No file may grow: neither in the cache folder nor in one for the time of the start."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" + WHICH
    for folder in (tmp_path, Path("/dev/null")):
        done = run(["-c", full], CFLAGS="-O0", XDG_CACHE_HOME=str(folder), TMPDIR=str(tmp_path))
        assert done.stdout.startswith("reference "), done.stdout + done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no /sys here")
def test_where_nothing_may_be_written_the_library_is_compiled_at_each_start(tmp_path: Path) -> None:
    done = run(["-c", WHICH], CFLAGS="-O0", XDG_CACHE_HOME="/sys/kernel", TMPDIR=str(tmp_path))
    assert done.stdout.startswith("native "), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_this_machine_has_the_native_kernels() -> None:
    assert (ops.for_cpu(), ops.why_not_native()) == (native, "")


def test_heads_that_the_c_files_have_no_room_for_are_refused() -> None:
    """The error has the numbers and the remedy."""
    with pytest.raises(ValueError, match=r"head_dim 2048 exceeds 1024; STREAMER_KERNELS=torch"):
        native.new_pool(1, 1, 16, 1, 2048, torch.float32, "cpu")
    pool = native.new_pool(1, 1, 16, 1, 8, torch.float32, "cpu")
    batch = ops.AttentionBatch(
        query_lens=[1],
        context_lens=[1],
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slots=torch.zeros(1, dtype=torch.int64),
        block_size=16,
    )
    layer = ops.layer_view(pool, 0)
    with pytest.raises(ValueError, match=r"200 query heads share 1 KV heads, at most 128"):
        native.paged_attention(
            torch.zeros(1, 200, 8), layer, batch, 1.0, sliding_window=None, softcap=None, sinks=None
        )

"""Real disks that are full or read-only, and a journal's file damaged beneath real servers.

The disks are file systems in memory. Where mounting is refused, the tests of the same faults by a
limit of the process or by SQLite's own switches remain: test_faults.py, engine/journal, kernels.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamer.engine.journal.store import FILE
from streamer.kernels.cpu import library
from tests.chaos.killable import Killable
from tests.chaos.test_clocks import create, is_kept
from tests.chaos.test_faults import count, during, is_journal_up, wait_for

SETTINGS = {"model": "fake:tokens_per_s=100", "max_wait_s": 0.0, "drain_timeout": 0.1}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    at = tmp_path / "disk"
    at.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "disk", str(at)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is refused here: tests/chaos/test_faults.py has a limit instead")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> None:
    """Leave not one byte."""
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk / "more").write_bytes(b"x")
    (disk / "more").unlink()


def said(process: Killable) -> str:
    """Its log without the spaces between words, at which a terminal's width breaks lines."""
    return "".join(process.lines().split())


async def test_a_full_disk_beneath_journal_and_log_ends_the_journal_alone(disk: Path) -> None:
    with Killable(disk / "log", journal=disk / "journal", **SETTINGS) as process:
        process.start()
        await process.ready()
        kept = await asyncio.to_thread(create, process)
        assert is_journal_up(process)
        await during(process, 5, lambda: fill(disk))
        await asyncio.to_thread(create, process)
        wait_for(lambda: not is_journal_up(process), "the journal did not fail")
        await count(process.url, 20)
        (disk / "filler").unlink()
        await asyncio.to_thread(process.restart)
        assert is_journal_up(process)
        assert is_kept(process, kept)


def test_a_read_only_disk_is_refused_by_the_journal_with_its_name(
    disk: Path, tmp_path: Path
) -> None:
    with Killable(tmp_path / "log", journal=disk / "journal", **SETTINGS) as process:
        process.start()
        process.wait_ready()
        kept = create(process)
        process.kill()
        process.start()  # which waits until the one before has ended and its files are closed
        process.wait_ready()
        process.kill()
        wait_for(lambda: is_remounted(disk, "ro"), "files are open")
        process.start()
        wait_for(lambda: "can'tbeused" in said(process), "it said nothing")
        assert f"journal:{disk / 'journal'}can'tbeused" in said(process)
        assert is_remounted(disk, "rw")
        process.start()
        process.wait_ready()
        assert is_kept(process, kept)


def is_remounted(disk: Path, how: str) -> bool:
    command = ["mount", "-o", f"remount,{how}", str(disk)]
    return not subprocess.run(command, capture_output=True).returncode


def test_kernels_on_a_full_and_a_read_only_disk(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full: torch serves, with the reason. Read-only: they are compiled elsewhere each time."""
    (sources := tmp_path / "sources").mkdir()
    (sources / library.MAIN).write_text("int lanes(void) { return 1; }\n")
    monkeypatch.setattr(library, "FOLDER", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
    fill(disk)
    with pytest.raises(library.Unavailable, match="No space left"):
        library.load()
    (disk / "filler").unlink()
    assert is_remounted(disk, "ro")
    assert library.load().lanes() == 1
    assert not list(disk.rglob("*.so"))
    assert is_remounted(disk, "rw")
    assert library.load().lanes() == 1
    assert len(list(disk.rglob("*.so"))) == 1


# ---------------------------------------------------------------- the journal's file


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Killable]:
    with Killable(tmp_path / "log", journal=tmp_path / "journal", **SETTINGS) as it:
        it.start()
        it.wait_ready()
        yield it


def test_a_second_server_on_a_journal_is_refused_and_the_first_goes_on(
    process: Killable, tmp_path: Path
) -> None:
    kept = create(process)
    with Killable(tmp_path / "second", journal=tmp_path / "journal", **SETTINGS) as second:
        second.start()
        wait_for(lambda: "anotherserveruses" in said(second), "the second was not refused")
        assert f"journal:anotherserveruses{tmp_path / 'journal'}" in said(second)
        assert is_kept(process, kept)
        process.kill()
        second.start()
        second.wait_ready()
        assert is_kept(second, kept)


def damage(file: Path, chance: random.Random, num_bytes: int) -> None:
    size = file.stat().st_size
    with file.open("r+b") as opened:
        for _ in range(num_bytes):
            opened.seek(chance.randrange(size))
            opened.write(chance.randbytes(1))


async def test_a_damaged_journal_is_set_aside_and_serving_starts(
    process: Killable, tmp_path: Path
) -> None:
    """Damaged at random bytes beneath streams and between two servers; nothing altered is read."""
    chance, folder = random.Random(3), tmp_path / "journal"
    kept = await asyncio.to_thread(create, process)
    await during(process, 5, lambda: damage(folder / (FILE + "-wal"), chance, 500))
    for _ in range(2):
        await asyncio.to_thread(process.restart)
        url = f"{process.url}/v1/responses/{kept['id']}"
        found = await asyncio.to_thread(httpx.get, url)
        assert found.status_code == 404 or found.json()["output"] == kept["output"]
        kept = await asyncio.to_thread(create, process)
        await asyncio.to_thread(process.restart)  # what was written is in its file from then on
        process.kill()
        damage(folder / FILE, chance, 200)
    await asyncio.to_thread(process.restart)
    assert "is kept as" in process.lines()
    assert [file for file in folder.iterdir() if file.name.startswith(FILE + ".")]
    await count(process.url, 20)

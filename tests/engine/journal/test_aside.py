"""Files that were set aside: how many are kept, and who may read them."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.engine.journal import store as store_module
from streamer.engine.journal.aside import BESIDE, MAX_ASIDE, NEW
from streamer.engine.journal.folder import FILE, LOCK
from streamer.engine.journal.store import Store
from tests.engine.journal.test_store import damage_step, fill, read_journal

OTHERS = (f"{FILE}.backup", f"{FILE}.20200101-000000-zzzz", "notes.20200101-000000-0a0a")


def aside(folder: Path) -> list[str]:
    """Those that were set aside, in the order of their names."""
    names = [file.name for file in folder.iterdir() if file.name.startswith(f"{FILE}.2")]
    return sorted(name for name in names if not name.endswith((*BESIDE, "zzzz")))


def plant(folder: Path, years: range, mode: int = 0o600) -> list[str]:
    """Files that were set aside in these years, each with its log."""
    names = [f"{FILE}.{year}0101-000000-0a0a" for year in years]
    for name in names:
        for suffix in ("", "-wal"):
            (folder / (name + suffix)).write_text("prompts")
            (folder / (name + suffix)).chmod(mode)
    return names


def test_a_start_keeps_the_newest_and_says_what_it_deletes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    for other in OTHERS:
        (tmp_path / other).write_text("")
    names = plant(tmp_path, range(2010, 2010 + MAX_ASIDE + 2))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("")
    (tmp_path / f"{FILE}.20090101-000000-0a0a").symlink_to(elsewhere)
    assert len(read_journal(tmp_path)) == 2
    assert aside(tmp_path)[1:] == names[2:]
    assert all((tmp_path / f"{name}-wal").exists() == (name in names[2:]) for name in names)
    assert all((tmp_path / other).exists() for other in (*OTHERS, "elsewhere"))
    deleted = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [message.split(" is deleted")[0] for message in deleted] == [
        str(tmp_path / name) for name in names[:2]
    ]


@pytest.mark.parametrize("year", [2010, 2090], ids=["clock", "clock set back"])
def test_the_file_set_aside_last_is_among_them(tmp_path: Path, year: int) -> None:
    fill(tmp_path)
    before = plant(tmp_path, range(year, year + MAX_ASIDE))
    for _ in range(2):
        (tmp_path / FILE).write_bytes(b"no journal at all" * 99)
        old = aside(tmp_path)
        assert read_journal(tmp_path) == []
        (new,) = set(aside(tmp_path)) - set(old)
        assert new[: len(FILE) + 5] == f"{FILE}.{time.strftime('%Y')}"
        assert len(aside(tmp_path)) == MAX_ASIDE
    assert before[-1] in aside(tmp_path)


def test_another_file_that_is_linked_among_them_is_left_alone(tmp_path: Path) -> None:
    """In a folder that a group may write to, somebody may plant links to files of this user."""
    other = tmp_path / "other"
    other.write_text("")
    other.chmod(0o644)
    folder = tmp_path / "journal"
    folder.mkdir()
    for i in range(MAX_ASIDE + 2):
        (folder / f"{FILE}.2026010{i + 1}-000000-00ff").hardlink_to(other)
    Store(folder).close()
    assert other.stat().st_mode & 0o777 == 0o644
    assert len([*folder.glob(f"{FILE}.*")]) == MAX_ASIDE + 2


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    """Also after a volume was mounted whose files were opened to a group."""
    fill(tmp_path)
    plant(tmp_path, range(2010, 2012), 0o664)
    target = tmp_path / "target"
    target.write_text("")
    target.chmod(0o644)
    (tmp_path / f"{FILE}.20120101-000000-0a0a").symlink_to(target)
    store = Store(tmp_path)
    store.close()
    files = [file for file in tmp_path.iterdir() if not file.is_symlink() and file != target]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_start_goes_on_though_they_can_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    fill(tmp_path)
    names = plant(tmp_path, range(2010, 2011 + MAX_ASIDE))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fails)
        assert len(read_journal(tmp_path)) == 2
    assert aside(tmp_path) == names
    assert "are left as they are: [Errno 1] Operation not permitted" in caplog.text


def test_a_kill_while_a_damaged_file_is_set_aside_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder as a kill before and after each step leaves it: the next start has what could be
    read. After the first step there was nothing in its place."""
    journal = tmp_path / "journal"
    fill(journal)
    damage_step(journal)
    steps: list[str] = []

    def copy(step: str) -> None:
        shutil.copytree(journal, tmp_path / f"{len(steps)}")
        steps.append(step)

    def watch(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            copy(f"before {name}")
            result = step(*args, **kwargs)
            copy(f"after {name}")
            return result

        return seen

    watched = [(Path, "rename"), (os, "fsync"), (Store, "commit"), (Store, "_make_tables")]
    with monkeypatch.context() as patch:
        for of, name in (*watched, (store_module, "_close")):
            patch.setattr(of, name, watch(name, getattr(of, name)))
        assert len(read_journal(journal)) == 2
    states = set()
    for i, step in enumerate(steps):
        folder = tmp_path / f"{i}"
        names = {file.name for file in folder.iterdir()}
        states.add((FILE in names, FILE + NEW in names))
        assert [len(read_journal(folder)) for _ in range(2)] == [2, 2], (i, step)
        left = {file.name for file in folder.iterdir() if ".2" not in file.name}
        assert left == {FILE, LOCK}
        assert len(aside(folder)) == 1
    assert states == {(True, False), (True, True), (False, True)}


def test_the_log_of_a_file_that_was_set_aside_is_not_read_into_the_next_one(
    tmp_path: Path,
) -> None:
    """Of a process that died between the two: SQLite takes any log with the right name."""
    fill(tmp_path, is_killed=True)
    stale = (tmp_path / f"{FILE}-wal").read_bytes()
    assert len(read_journal(tmp_path)) == 2
    (tmp_path / FILE).rename(tmp_path / (FILE + NEW))
    db = sqlite3.connect(tmp_path / (FILE + NEW))
    db.execute("DELETE FROM requests WHERE id = 'a'")
    db.commit()
    db.close()
    (tmp_path / f"{FILE}-wal").write_bytes(stale)
    assert [saved.request_id for saved in read_journal(tmp_path)] == ["b"]
    (log,) = [file for file in tmp_path.iterdir() if file.name.startswith(f"{FILE}.2")]
    assert log.read_bytes() == stale


def test_a_new_file_is_deleted_where_the_old_one_still_is(tmp_path: Path) -> None:
    """Its process died while it was written."""
    fill(tmp_path)
    (tmp_path / (FILE + NEW)).write_bytes(b"a part of")
    (tmp_path / (FILE + NEW)).chmod(0o600)
    assert len(read_journal(tmp_path)) == 2
    assert {file.name for file in tmp_path.iterdir()} == {FILE, LOCK}

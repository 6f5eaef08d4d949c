"""The journal's folder: one server has it, whatever its files are, and no child of that server."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.engine.journal import folder as module
from streamer.engine.journal import store as store_module
from streamer.engine.journal.folder import FILE, LOCK
from streamer.engine.journal.store import APPLICATION, Store
from streamer.errors import ConfigError, JournalInUse
from tests.engine.journal.test_store import damage_step, fill, read_journal


@pytest.mark.parametrize("what", ["can't be read", "has a damaged row"])
def test_a_second_server_is_refused_while_the_first_sets_a_file_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It began one of its own then, which the first one set aside beneath it."""
    if what == "can't be read":
        (tmp_path / FILE).write_bytes(b"no journal at all" * 99)
    else:
        fill(tmp_path)
        damage_step(tmp_path)
    set_aside, refused = store_module.set_aside, []

    def seen(path: Path, why: str) -> None:
        for _ in range(2):  # before it is renamed, and after
            with pytest.raises(JournalInUse, match=r"another server uses .*test_a_second"):
                Store(tmp_path)
            refused.append(why)
            if path.exists():
                set_aside(path, why)

    monkeypatch.setattr(store_module, "set_aside", seen)
    assert len(read_journal(tmp_path)) == (0 if what == "can't be read" else 2)
    assert len(refused) == 2


OPEN = """
import os, pathlib, subprocess, sys
from streamer.engine.journal.store import Store
folder, child = sys.argv[1:]
store = Store(pathlib.Path(folder))
"""
AGAIN = OPEN + 'print("held", flush=True)'
HOLD = f"""{OPEN}
reading, writing = os.pipe()
if child == "program":
    left = subprocess.Popen([sys.executable, "-c", "input()"], close_fds=False)
elif child == "itself":
    os.execv(sys.executable, [sys.executable, "-c", {AGAIN!r}, folder, child])
elif os.fork():
    os.read(reading, 1)
else:
    os.write(writing, b"x")
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("child", ["program", "copy", "itself"])
def test_no_child_has_the_lock_when_its_server_is_gone(tmp_path: Path, child: str) -> None:
    """Programs and forks that outlive it; and itself, that begins anew as the same process."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"held\n"
        server.wait()
        Store(tmp_path).close()  # the child ends with its standard input, below
        assert server.stdin is not None
        server.stdin.close()


def test_without_such_locks_sqlites_own_keeps_a_second_server_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server of an older version does, and any other program that reads the file."""
    monkeypatch.setattr(module, "fcntl", None)
    first = Store(tmp_path)
    with pytest.raises(JournalInUse):
        Store(tmp_path)
    first.close()
    assert read_journal(tmp_path) == []


def test_the_lock_is_let_go_by_a_start_that_fails(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / LOCK).chmod(0o660)  # as Kubernetes does for a volume's group
    failures = []
    for application in (1, 1, APPLICATION):
        db = sqlite3.connect(tmp_path / FILE)
        db.execute(f"PRAGMA application_id = {application}")
        db.close()
        try:
            assert len(read_journal(tmp_path)) == 2
        except ConfigError as e:
            failures.append(e)  # with all that its frames have, the lock included
    assert ["another program's" in str(e) for e in failures] == [True, True]
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600

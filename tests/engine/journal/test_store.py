"""The journal's file: what was written is read back; what is damaged, locked or foreign."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamer.core.plan import Finish, FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.engine.journal import store as module
from streamer.engine.journal.folder import FILE, LOCK
from streamer.engine.journal.records import Accepted, Saved, Step, Tail
from streamer.engine.journal.store import MOVED_BYTES, SPARE_BYTES, VERSION, Store
from streamer.engine.journal.writer import WAIT_S, Journal
from streamer.engine.requests import GenerateRequest
from streamer.errors import ConfigError


def read_journal(folder: Path) -> list[Saved]:
    store = Store(folder)
    try:
        return store.read()
    finally:
        store.close()


def accepted(name: str, n: int = 1, stop: tuple[str, ...] = ()) -> Accepted:
    params = SamplingParams(
        max_tokens=50, seed=7, n=n, temperature=1.0, logit_bias={3: 1.5}, stop=stop
    )
    return Accepted(GenerateRequest(prompt=(1, 2, 3), params=params, request_id=name), b"ctx", 17.5)


def step(*drawn: tuple[str, int, int, int], finishes: list[Finish] | None = None) -> Step:
    """Of (request, choice, index, token)."""
    if not drawn:
        return Step([], [], [], [], {}, {}, [], [])
    names, choices, indexes, tokens = (list(x) for x in zip(*drawn, strict=True))
    logprobs = {0: {indexes[0]: TokenLogprob(tokens[0], -0.5, ((1, -0.25),))}}
    runs = [[token] for token in tokens]
    return Step(names, choices, indexes, runs, logprobs, {}, finishes or [], [])  # type: ignore[arg-type]


def fill(folder: Path, num_steps: int = 6, *, is_killed: bool = False) -> None:
    """Two requests: a, of one choice, has tokens 100.., b's second choice 200.. and an end.

    is_killed  all is in SQLite's log yet, as a process leaves it that is killed
    """
    store = Store(folder)
    store.begin(is_durable=True)
    store.add_request(accepted("a"))
    store.add_request(accepted("b", n=2))
    for i in range(num_steps):
        store.commit()
        store.begin(is_durable=False)
        store.add_step(step(("a", 0, i, 100 + i), ("b", 1, i, 200 + i)))
    finish = Finish("b", 1, FinishReason.STOP, num_steps + 1, stop="x")
    store.add_step(step(("b", 1, num_steps, 200 + num_steps), finishes=[finish]))
    store.commit()
    left = {file: file.read_bytes() for file in folder.iterdir()}
    store.close()
    for file, data in left.items() if is_killed else ():
        file.write_bytes(data)


def damage_step(folder: Path) -> None:
    """Damage the last step of what `fill` wrote."""
    db = sqlite3.connect(folder / FILE)
    db.execute("UPDATE steps SET data = x'00' WHERE number = (SELECT max(number) FROM steps)")
    db.commit()
    db.close()


def test_what_was_written_is_read_back_also_a_second_time(tmp_path: Path) -> None:
    fill(tmp_path)
    for _ in range(2):  # the first read moved the steps into parts
        a, b = read_journal(tmp_path)
        assert (a.accepted, b.accepted) == (accepted("a"), accepted("b", n=2))
        assert a.tail.tokens == [[100, 101, 102, 103, 104, 105]]
        assert b.tail.tokens == [[], [200, 201, 202, 203, 204, 205, 206]]
        assert a.tail.logprobs[0][3] == TokenLogprob(103, -0.5, ((1, -0.25),))
        assert b.tail.finishes[1].stop == "x"
        assert not a.is_finished


def test_a_token_after_a_missing_one_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("DELETE FROM steps WHERE number = 4")
    db.commit()
    db.close()
    a, b = read_journal(tmp_path)
    assert a.tail.tokens == [[100, 101, 102]]
    assert b.tail.tokens[1] == [200, 201, 202]
    assert not b.tail.finishes


def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "journal"
    store = Store(folder)
    store.begin(is_durable=False)
    store.add_request(accepted("a"))
    store.commit()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert set(modes) == {FILE, FILE + "-wal", LOCK}
    assert set(modes.values()) == {0o600}
    store.close()


HOLD = """
import sys, pathlib
from streamer.engine.journal.store import Store
store = Store(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_server_is_refused_by_name_until_the_first_has_died(tmp_path: Path) -> None:
    fill(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(ConfigError, match=r"journal: another server uses .*test_a_second"):
            Store(tmp_path)
        first.kill()
        first.wait()
    assert len(read_journal(tmp_path)) == 2
    mine = Store(tmp_path)
    with pytest.raises(ConfigError, match="another server"):  # in this process just as well
        Store(tmp_path)
    mine.close()


def test_a_folder_that_can_not_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"journal: .*file/in can't be used: Not a directory"):
        Store(tmp_path / "file" / "in")
    with pytest.raises(ConfigError, match=r"journal: .*can't be used"):
        Store(tmp_path / "file")


def test_a_read_only_disk_is_refused_by_name_and_nothing_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a journal on it and without; a file that can't be written was taken for a damaged one,
    and another one begun, and so on."""
    fill(tmp_path / "old")
    connect = sqlite3.connect

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def refusing(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        db = connect(*args, **kwargs)
        db.execute("PRAGMA query_only = ON")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", refusing)
        with pytest.raises(ConfigError, match="can't be used: attempt to write a readonly"):
            Store(tmp_path / "new")
    assert {file.name for file in (tmp_path / "new").iterdir()} == {FILE, LOCK}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", read_only)
        patch.setattr(Path, "mkdir", read_only)
        for name in ("old", "none"):
            with pytest.raises(ConfigError, match=rf"{name} can't be used: Read-only file system"):
                Store(tmp_path / name)
    assert len(read_journal(tmp_path / "old")) == 2


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    with pytest.raises(ConfigError, match="another program's"):
        Store(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {FILE, LOCK}


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", f"{FILE}-new", LOCK])
@pytest.mark.parametrize("what", ["link", "hard link", "fifo", "writable", "another's"])
def test_a_file_that_another_user_may_have_made_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    fill(tmp_path / "mine")
    folder, planted = tmp_path / "journal", tmp_path / "journal" / name
    folder.mkdir()
    elsewhere = tmp_path / "mine" / FILE
    before = elsewhere.read_bytes()
    if what == "link":
        planted.symlink_to(elsewhere)
    elif what == "hard link":
        planted.hardlink_to(elsewhere)
    elif what == "fifo":
        os.mkfifo(planted, 0o600)
    else:
        planted.write_bytes(before)
        planted.chmod(0o602 if what == "writable" else 0o600)
    if what == "another's":
        _own_as(monkeypatch, planted, os.geteuid() + 1)
    with pytest.raises(ConfigError, match=rf"{name} .*: it is not read"):
        Store(folder)
    assert planted.is_symlink() == (what == "link")
    assert elsewhere.read_bytes() == before


def test_a_volume_whose_files_were_opened_to_its_group_is_read(tmp_path: Path) -> None:
    """As Kubernetes does at each start for a pod with an fsGroup."""
    fill(tmp_path)
    tmp_path.chmod(0o2775)
    (tmp_path / FILE).chmod(0o660)
    assert len(read_journal(tmp_path)) == 2
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_folder_of_another_user_or_of_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    fill(mine)
    (tmp_path / "link").symlink_to(mine)
    assert len(read_journal(tmp_path / "link")) == 2  # its owner's way to name it
    mine.chmod(0o777)
    with pytest.raises(ConfigError, match="every user may write to"):
        Store(mine)
    mine.chmod(0o700)
    _own_as(monkeypatch, mine, os.geteuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}, not to"):
        Store(mine)


def _own_as(monkeypatch: pytest.MonkeyPatch, owned: Path, user: int) -> None:
    """Let stat say that a path belongs to a user."""
    stat_of = os.stat

    def shown(path: object, *args: object, **kwargs: object) -> os.stat_result:
        about = stat_of(path, *args, **kwargs)  # type: ignore[arg-type]
        fields = list(about)
        fields[4] = user if path == owned else about.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "stat", shown)


@pytest.mark.parametrize(
    "planted",
    [
        "CREATE TRIGGER t AFTER DELETE ON steps BEGIN DELETE FROM requests; END",
        "CREATE VIEW more AS SELECT load_extension('x')",
        "DROP TABLE steps; CREATE VIEW steps AS SELECT 1 AS number, randomblob(1) AS data",
    ],
)
def test_a_file_with_more_than_a_journals_tables_is_set_aside(
    tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    db.executescript(planted)
    db.close()
    assert read_journal(tmp_path) == []
    assert "its tables are not a journal's" in caplog.text


def test_another_versions_file_is_set_aside_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    assert read_journal(tmp_path) == []
    (message,) = [r.getMessage() for r in caplog.records]
    assert f"it is of version 99, this is {VERSION}" in message
    (kept,) = [file for file in tmp_path.iterdir() if file.name not in (FILE, LOCK)]
    assert str(kept) in message


MIB = 1 << 20


def swell(folder: Path, num_kept: int = 0) -> int:
    """Fill the journal with 3 MiB and delete them but for `num_kept` requests: the file's bytes."""
    fill(folder)
    store, chance = Store(folder), random.Random(4)
    names = [f"big {i}" for i in range(64)]
    store.begin(is_durable=True)
    for name in names:
        store.add_request(msgspec.structs.replace(accepted(name), context=chance.randbytes(49152)))
    store.commit()
    store.begin(is_durable=True)
    for name in names[num_kept:]:
        store.delete(name)
    store.commit()
    store.close()
    return (folder / FILE).stat().st_size


def _contents(found: list[Saved]) -> list[tuple[object, ...]]:
    return [(saved.accepted, saved.tail.tokens, saved.tail.logprobs) for saved in found]


def test_a_start_gives_back_what_is_free_of_a_file_that_was_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it has, the same lock and the same name."""
    before = swell(tmp_path)
    kept = _contents(read_journal(tmp_path))
    assert (tmp_path / FILE).stat().st_size == before > 3 * MIB  # it is spare
    monkeypatch.setattr(module, "SPARE_BYTES", MIB)
    store = Store(tmp_path)
    epoch = store.epoch
    assert _contents(store.read()) == kept
    assert (tmp_path / FILE).stat().st_size < 0.1 * MIB
    assert (tmp_path / f"{FILE}-wal").stat().st_size == 0
    with pytest.raises(ConfigError, match="another server"):
        Store(tmp_path)
    store.close()
    again = Store(tmp_path)
    assert again.epoch == epoch
    assert _contents(again.read()) == kept
    again.close()
    assert {file.name for file in tmp_path.iterdir()} == {FILE, LOCK}


@pytest.mark.parametrize(
    ("num_kept", "moved_bytes", "is_smaller"),
    [(0, MIB, True), (16, 2 * MIB, True), (16, MIB // 2, False), (40, 9 * MIB, False)],
    ids=["all free", "most free", "too much to move", "half in use"],
)
@pytest.mark.parametrize("when", ["at a start", "idle"])
def test_a_server_gives_back_what_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str,
    num_kept: int, moved_bytes: int, is_smaller: bool,
) -> None:  # fmt: skip
    before = swell(tmp_path, num_kept)
    store = Store(tmp_path)
    monkeypatch.setattr(module, "SPARE_BYTES", MIB)
    if when == "idle":
        store.shrink(moved_bytes)
    else:
        monkeypatch.setattr(module, "START_MOVED_BYTES", moved_bytes)
        store.read()
    assert ((tmp_path / FILE).stat().st_size < before / 2) == is_smaller
    store.close()
    assert len(read_journal(tmp_path)) == 2 + num_kept


def test_what_an_idle_server_writes_to_give_back_is_written_before_a_request_gives_up(
    tmp_path: Path,
) -> None:
    """On a disk of 1 MB/s: a request that came meanwhile ended the journal for good."""
    store = Store(tmp_path)
    for begin, end in ((0, MOVED_BYTES - (MOVED_BYTES >> 4)), (1, SPARE_BYTES + MOVED_BYTES)):
        rows = [(str(begin), i, os.urandom(1 << 16)) for i in range(end >> 16)]
        store._db.executemany("INSERT INTO parts VALUES (?, ?, ?)", rows)
    store._db.execute("DELETE FROM parts WHERE id = '1'")
    store._write_back()
    before = num_bytes_written()
    store.shrink(MOVED_BYTES)
    written = num_bytes_written() - before
    store.close()
    assert (tmp_path / FILE).stat().st_size < written <= WAIT_S * 1e6


def num_bytes_written() -> int:
    """By this process, as the kernel counts them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        pytest.skip("no such count here")
    return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows further, as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_can_not_be_written_anew_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; and what was written of the new one takes no room."""
    before = swell(tmp_path, 16)
    store = Store(tmp_path)
    monkeypatch.setattr(module, "SPARE_BYTES", MIB)
    with file_limit(MIB // 2):
        for _ in range(2):
            store.shrink(MIB)
    assert (tmp_path / FILE).stat().st_size == before
    assert (tmp_path / f"{FILE}-wal").stat().st_size == 0
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.endswith(("keeps its size: disk I/O error", "database or disk is full"))
    store.begin(is_durable=True)
    store.add_request(accepted("c"))
    store.commit()
    store.close()
    assert len(read_journal(tmp_path)) == 19


class NoMemory(sqlite3.Connection):
    """SQLite where there is no memory for a VACUUM."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "VACUUM":
            raise MemoryError
        return super().execute(sql, *values)


async def test_a_journal_that_there_is_no_memory_to_write_anew_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start failed, and in a server that ran the journal."""
    swell(tmp_path)
    monkeypatch.setattr(module, "SPARE_BYTES", MIB)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=NoMemory))
    journal = await Journal.open(tmp_path, None)
    await journal.recorded()
    assert journal.failure is None
    await journal.close()
    assert "keeps its size: out of memory" in caplog.text
    assert len(read_journal(tmp_path)) == 2


def test_altered_bytes_lose_records_but_alter_none(tmp_path: Path) -> None:
    fill(tmp_path / "whole", num_steps=40)
    read_journal(tmp_path / "whole")
    fill(tmp_path / "steps", num_steps=40)
    fill(tmp_path / "log", num_steps=40, is_killed=True)
    wanted = {name: [t[:] for t in saved.tail.tokens] for name, saved in _read(tmp_path / "whole")}
    chance = random.Random(5)
    num_read = num_redrawn = 0
    for i in range(90):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / ("whole", "steps", "log")[i % 3], folder)
        damaged = folder / (FILE + "-wal" * (i % 3 == 2))
        data = bytearray(damaged.read_bytes())
        for _ in range(chance.choice((1, 4, 64))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(data)
        found = []
        with contextlib.suppress(ConfigError):  # it may look like another program's file
            found = _read(folder)
            assert [name for name, _ in _read(folder)] == [name for name, _ in found]
        for name, saved in found:
            num_read += 1
            assert saved.accepted == accepted(name, n=len(wanted[name]))
            for tokens, whole in zip(saved.tail.tokens, wanted[name], strict=True):
                assert tokens == whole[: len(tokens)]
                num_redrawn += len(tokens) < len(whole)
    assert num_read > 60
    assert num_redrawn


@pytest.mark.parametrize("table", ["requests", "parts"])
def test_a_damaged_id_loses_its_own_row(tmp_path: Path, table: str) -> None:
    """It is no UTF-8, which ended the reading: all rows behind it were lost, and ends with them."""
    fill(tmp_path)
    read_journal(tmp_path)  # moves the steps into parts
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute(f"UPDATE {table} SET id = CAST(x'e1' AS TEXT) WHERE id = 'a'")
    db.close()
    *others, (name, saved) = _read(tmp_path)
    assert [(other, each.tail.tokens) for other, each in others] == [("a", [[]])] * (
        table == "parts"
    )
    assert (name, saved.tail.tokens[1][-1], saved.tail.finishes[1].stop) == ("b", 206, "x")


def _read(folder: Path) -> list[tuple[str, Saved]]:
    return [(saved.request_id, saved) for saved in read_journal(folder)]


def test_a_tail_goes_on_after_its_part() -> None:
    tail = Tail(2)
    assert tail.is_empty
    for token in (5, 6):
        tail.push(1, token, None)
    part = tail.part()
    tail.go_on()
    assert (part.starts, part.tokens) == ([0, 0], [[], [5, 6]])
    assert tail.is_empty
    tail.push(1, 7, TokenLogprob(7, -0.5))
    drawn = step()
    for _ in range(2):  # once written, it is not written again
        tail.add_to(drawn, "b")
    assert (drawn.starts, drawn.tokens) == ([2], [[7]])
    assert drawn.logprobs == {0: {2: TokenLogprob(7, -0.5)}}
    again = Tail(2)
    again.add_part(part, 1)
    again.add_part(part, 1)  # a token that is there already is no second one
    again.add_part(tail.part(), 2)
    assert again.tokens == [[], [5, 6, 7]]

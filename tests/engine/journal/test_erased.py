"""What is deleted is in none of the journal's files, and what no checksum covers is no crash."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from streamer.engine.journal.folder import FILE
from streamer.engine.journal.store import Store
from streamer.engine.journal.writer import Journal
from tests.engine.helpers import DEADLINE_S, GatedEngine, make_engine
from tests.engine.journal.test_store import accepted, fill, read_journal
from tests.engine.journal.test_writer import durable, end_of, lost, until

SECRET = "what nobody else should read"


def copies(folder: Path, text: str = SECRET) -> int:
    """How often the text is in the files, SQLite's log and what was set aside among them."""
    return sum(file.read_bytes().count(text.encode()) for file in folder.iterdir())


def watched(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the log is emptied of what was deleted."""
    erase, event, loop = Store.erase, asyncio.Event(), asyncio.get_running_loop()

    def seen(store: Store) -> None:
        is_work = store.has_deleted
        erase(store)
        if is_work:
            loop.call_soon_threadsafe(event.set)

    monkeypatch.setattr(Store, "erase", seen)
    return event


@pytest.mark.parametrize("is_stored", [True, False])
async def test_deleted_text_is_in_no_file_of_an_idle_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    erased = watched(monkeypatch)
    async with make_engine(journal=str(tmp_path)) as engine:
        assert engine.journal is not None
        stream = engine.submit(durable("a", max_tokens=3, stop=(SECRET,), is_stored=is_stored))
        await engine.journal.recorded()
        assert copies(tmp_path) or not is_stored
        await end_of(stream)
        engine.forget("a")
        async with asyncio.timeout(DEADLINE_S):
            await erased.wait()
        assert copies(tmp_path) == 0


@pytest.mark.parametrize("is_quiet", [True, False])
async def test_deleted_text_and_its_tokens_leave_the_files_while_another_answer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quiet: bool
) -> None:
    """Its next step may be hours away, if its reader pauses; or steps never end."""
    erased = watched(monkeypatch)
    monkeypatch.setattr("streamer.engine.journal.writer.QUIET_S", 0.01 if is_quiet else 1e6)
    gated = GatedEngine(journal=str(tmp_path))
    await gated.engine.start()
    journal = gated.engine.journal
    assert journal is not None
    other, gone = (
        gated.engine.submit(durable(name, max_tokens=50, stop=stop))
        for name, stop in (("other", ()), ("gone", (SECRET,)))
    )
    gated.gate.allow(5)
    await asyncio.gather(until(other, 4), until(gone, 4))
    await journal.recorded()
    journal._erase_at = 1e12 if is_quiet else 0.0
    gated.engine.forget("gone")
    async with asyncio.timeout(DEADLINE_S):
        await erased.wait()
    assert copies(tmp_path) == 0
    assert copies(tmp_path, "gone") == 0
    assert not other.is_finished
    gated.gate.open()
    await lost(gated.engine)


def test_a_killed_server_leaves_nothing_that_its_next_start_does_not_erase(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin(is_durable=True)
    store.add_request(accepted("a", stop=(SECRET,)))
    store.commit()
    store.begin(is_durable=True)
    store.delete("a")
    store.commit()
    assert copies(tmp_path)
    left = {file: file.read_bytes() for file in tmp_path.iterdir()}  # as a kill leaves it
    store.close()
    for file, data in left.items():
        file.write_bytes(data)
    store = Store(tmp_path)
    assert store.read() == []
    assert copies(tmp_path) == 0
    store.close()


WRONG = [None, "x", b"", 1.5, float("inf"), 2**63 - 1, -1]
NUMBERS = [
    *(
        (name, value)
        for name in ("parts.number", "requests.tries", "requests.tokens")
        for value in WRONG
    ),
    *(("steps.number", value) for value in WRONG[-2:]),  # SQLite takes nothing but integers there
]


@pytest.mark.parametrize(("column", "value"), NUMBERS)
def test_a_damaged_number_is_damage_and_no_crash(
    tmp_path: Path, column: str, value: object
) -> None:
    """No checksum is of these: one altered bit makes NULL of a small number."""
    table, _, name = column.partition(".")
    fill(tmp_path)
    if table == "parts":
        read_journal(tmp_path)  # moves the steps into parts
    db = sqlite3.connect(tmp_path / FILE)
    last = f"rowid = (SELECT max(rowid) FROM {table})"
    db.execute(f"UPDATE {table} SET {name} = ? WHERE {last}", (value,))
    db.commit()
    db.close()
    for _ in range(2):
        found = {saved.request_id: saved for saved in read_journal(tmp_path)}
        assert set(found) == {"a", "b"}
        assert found["a"].tail.tokens == [[100, 101, 102, 103, 104, 105]]
    assert len([*tmp_path.glob(f"{FILE}.*")]) == 1


async def test_a_journal_with_a_damaged_number_is_opened(tmp_path: Path) -> None:
    fill(tmp_path)
    read_journal(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("UPDATE parts SET number = NULL")
    db.commit()
    db.close()
    journal = await Journal.open(tmp_path, None)
    assert {saved.request_id for saved in journal.saved} == {"a", "b"}
    await journal.close()


async def test_what_was_just_deleted_is_erased_when_the_server_ends(tmp_path: Path) -> None:
    """Another answer runs, and an erasing is not long ago."""
    gated = GatedEngine(journal=str(tmp_path))
    async with gated.engine as engine:
        assert engine.journal is not None
        names = ("kept", "first", "second")
        streams = [engine.submit(durable(name, max_tokens=50)) for name in names]
        for name, num_tokens in (("first", 5), ("second", 10)):
            gated.gate.allow(5)
            await asyncio.gather(*(until(s, num_tokens - 1) for s in streams if not s.is_finished))
            await engine.journal.recorded()
            engine.forget(name)
            await engine.journal.recorded()
        await engine.journal.close()
        with sqlite3.connect(tmp_path / FILE) as db:
            assert db.execute("SELECT count(*) FROM steps").fetchone() == (0,)
        db.close()
        gated.gate.open()
    assert [saved.request_id for saved in read_journal(tmp_path)] == ["kept"]


async def test_what_is_deleted_after_a_drain_does_not_come_back(tmp_path: Path) -> None:
    async with make_engine(journal=str(tmp_path / "a"), tokens_per_s=100.0) as engine:
        await end_of(engine.submit(durable("deleted", max_tokens=3)))
        await until(engine.submit(durable("kept", max_tokens=60)), 3)
        await engine.drain(0.05)
        engine.forget("deleted")
        await engine.recorded()
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # as a kill leaves it
    for folder in ("a", "b"):
        assert [saved.request_id for saved in read_journal(tmp_path / folder)] == ["kept"]

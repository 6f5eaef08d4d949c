"""A journal beside an engine: requests go on in another engine, as if there had been only one."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.core.plan import FinishReason, Plan
from streamer.engine.core import InFlight
from streamer.engine.engine import AsyncEngine
from streamer.engine.journal.store import FILE, Store
from streamer.engine.stream import TokenStream
from streamer.errors import ConfigError, EngineDead, InvariantViolated, StreamerError
from tests.engine.helpers import DEADLINE_S, GatedEngine, Wrapped, make_engine, request
from tests.engine.journal.test_store import read_journal


def durable(name: str, **fields: Any) -> Any:
    return request(request_id=name, is_durable=True, detach_s=None, **fields)


async def end_of(stream: TokenStream) -> tuple[Any, ...]:
    async with asyncio.timeout(DEADLINE_S):
        await stream.wait()
    n = stream.params.n
    return tuple((stream.token_ids(c), stream.text(c), stream.logprobs(c)) for c in range(n))


async def until(stream: TokenStream, num_tokens: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for _ in stream.read():
            if stream.num_output_tokens >= num_tokens:
                return


async def lost(engine: AsyncEngine) -> None:
    """The engine as a killed process leaves it: what was handed over is written, and no more."""
    assert engine.journal is not None
    await engine.journal.recorded()
    engine.journal.seal()
    await engine.aclose()


@pytest.mark.parametrize(("at", "logprobs"), [(0, 2), (1, None), (7, 2), (7, None)])
async def test_what_ran_goes_on_and_what_had_ended_is_kept(
    tmp_path: Path, at: int, logprobs: int | None
) -> None:
    plain = {"max_tokens": 24, "temperature": 1.0, "logprobs": logprobs, "seed": 11, "n": 2}
    async with make_engine() as alone:
        whole = await end_of(alone.submit(durable("a", **plain)))
    gated = GatedEngine(journal=str(tmp_path))
    first = gated.engine
    await first.start()
    ended = first.submit(durable("ended", max_tokens=3))
    gated.gate.allow(4)
    before = await end_of(ended)
    running = first.submit(durable("a", **plain))
    first.submit(durable("gone", **plain))
    unstored = first.submit(durable("unstored", is_stored=False, max_tokens=5))
    other = first.submit(request(request_id="other", detach_s=None))
    gated.gate.allow(at + 1)
    if at:
        await until(running, 2 * at)
    if at > 2:
        assert unstored.is_finished
    first.forget("gone")
    assert not other.is_durable
    await lost_while_gated(gated)
    created, timing = running.created, ended.timing
    async with make_engine(journal=str(tmp_path)) as second:
        stream, kept = second.get("a"), second.get("ended")
        assert stream is not None
        assert kept is not None
        assert second.get("gone") is second.get("other") is None
        assert (second.get("unstored") is None) == (at > 2)
        assert stream.num_output_tokens >= 2 * at
        assert stream.created == created
        assert await end_of(stream) == whole
        assert await end_of(kept) == before
        assert kept.timing.total_s == pytest.approx(timing.total_s, abs=1e-6)
        finishes = stream.finishes
    async with make_engine(journal=str(tmp_path)) as third:  # now it has ended
        stream = third.get("a")
        assert stream is not None
        assert stream.finishes == finishes
        assert await end_of(stream) == whole


async def test_a_reader_ahead_of_the_journal_gets_what_follows(tmp_path: Path) -> None:
    """What it has seen is drawn again, and left out for it."""
    async with make_engine() as alone:
        ((whole, _, _),) = await end_of(alone.submit(durable("a", max_tokens=30)))
    gated = GatedEngine(journal=str(tmp_path))
    await gated.engine.start()
    stream = gated.engine.submit(durable("a", max_tokens=30))
    gated.gate.allow(5)
    await until(stream, 4)
    await lost_while_gated(gated)
    async with GatedEngine(journal=str(tmp_path)) as second:
        again = second.engine.get("a")
        assert again is not None
        assert 3 < again.num_output_tokens < 20
        second.gate.open()
        seen = [d.token_ids async for items in again.read(20) for d in items if hasattr(d, "start")]
        assert sum(seen, ()) == whole[20:]


async def lost_while_gated(gated: GatedEngine) -> None:
    journal = gated.engine.journal
    assert journal is not None
    await journal.recorded()
    journal.seal()
    gated.gate.open()
    await gated.engine.aclose()


async def test_contexts_that_another_program_does_not_have(tmp_path: Path) -> None:
    """A request without one is restored; a fault of the server's part ends the engine."""

    class Faulty:
        def encode(self, context: object) -> bytes:
            return b"1"

        def decode(self, data: bytes) -> object:
            return data

        def restored(self, stream: TokenStream) -> None:
            raise ZeroDivisionError

    async def restart(**fields: Any) -> AsyncEngine:
        """An engine with Faulty contexts, after one that had a request of these fields."""
        gated = GatedEngine(journal=str(tmp_path))
        gated.engine.contexts = Faulty()
        await gated.engine.start()
        gated.engine.submit(durable("a", max_tokens=8, **fields))
        await lost_while_gated(gated)
        engine = make_engine(journal=str(tmp_path))
        engine.contexts = Faulty()
        return engine

    async with asyncio.timeout(DEADLINE_S), await restart() as engine:
        assert engine.get("a") is not None
        engine.forget("a")
    with pytest.raises(EngineDead):
        async with asyncio.timeout(DEADLINE_S), await restart(context="mine"):
            pass


async def test_requests_wait_for_the_disk_and_tokens_share_commits_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []  # PRAGMA synchronous of each commit: 2 is FULL, 1 is NORMAL
    commit = Store.commit

    def seen(store: Store) -> None:
        modes.extend(store._db.execute("PRAGMA synchronous").fetchone())
        commit(store)

    monkeypatch.setattr(Store, "commit", seen)
    async with make_engine(journal=str(tmp_path), tokens_per_s=500.0) as engine:
        assert engine.journal is not None
        modes.clear()
        streams = [engine.submit(durable(str(i), max_tokens=100)) for i in range(4)]
        await engine.journal.recorded()
        assert modes[-1] == 2
        modes.clear()
        await asyncio.gather(*map(end_of, streams))
    assert set(modes) == {1}
    assert len(modes) < 25  # of 100 steps


async def test_many_steps_are_moved_to_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.engine.journal.writer.MAX_STEPS", 2)
    monkeypatch.setattr("streamer.engine.journal.writer.GATHER_S", 0.0)
    async with make_engine(journal=str(tmp_path), tokens_per_s=2000.0) as engine:
        stream = engine.submit(durable("a", max_tokens=40, logprobs=1))
        await until(stream, 23)
        await lost(engine)
    (saved,) = read_journal(tmp_path)
    assert len(saved.tail.tokens[0]) >= 23
    assert saved.tail.tokens[0] == list(stream.token_ids()[: len(saved.tail.tokens[0])])
    assert len(saved.tail.logprobs[0]) == len(saved.tail.tokens[0])


async def test_a_drain_keeps_what_has_not_finished_for_the_next_start(tmp_path: Path) -> None:
    async with make_engine(journal=str(tmp_path), tokens_per_s=100.0) as engine:
        stream = engine.submit(durable("a", max_tokens=60))
        other = engine.submit(request(max_tokens=60, detach_s=None))
        await until(stream, 3)
        await engine.drain(0.05)
        assert stream.error is not None
        assert stream.error.code == "server_restart"
        assert [f and f.detail for f in other.finishes] == ["server_shutdown"]
    async with make_engine(journal=str(tmp_path)) as second:
        again = second.get("a")
        assert again is not None
        ((tokens, _, _),) = await end_of(again)
        assert len(tokens) == 60


@pytest.mark.parametrize(
    ("statement", "says"),
    [  # SQLite's own limit, and its own switch
        ("PRAGMA max_page_count = 1", "database or disk is full"),
        ("PRAGMA query_only = ON", "attempt to write a readonly database"),
    ],
    ids=["full", "read-only"],
)
async def test_a_disk_that_fails_costs_the_journal_and_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str, says: str
) -> None:
    async with make_engine(journal=str(tmp_path), tokens_per_s=500.0) as engine:
        assert engine.journal is not None
        stream = engine.submit(durable("a", max_tokens=50))
        await until(stream, 2)

        engine.journal._store._db.execute(statement)
        for i in range(50):
            engine.submit(durable(f"more-{i}", max_tokens=2, prompt=tuple(range(90)) * 20))
        await engine.journal.recorded()
        assert engine.journal.failure == says
        assert len(await end_of(stream)) == 1
        await engine.journal.recorded()
        assert len(await end_of(engine.submit(durable("b", max_tokens=5)))) == 1
    (message,) = [r.getMessage() for r in caplog.records if "has failed" in r.getMessage()]
    assert str(tmp_path) in message


@pytest.mark.parametrize("is_freed", [True, False])
async def test_what_was_deleted_or_cancelled_after_a_failure_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_freed: bool
) -> None:
    """Deletions that the disk refuses are tried again, at the end at the latest."""
    monkeypatch.setattr("streamer.engine.journal.writer.RETRY_S", 0.05 if is_freed else 1000.0)
    async with GatedEngine(journal=str(tmp_path)) as gated:
        engine = gated.engine
        journal = engine.journal
        assert journal is not None
        names = ("runs", "cancelled", "deleted", "deleted at its end")
        streams = [engine.submit(durable(name, max_tokens=20)) for name in names]
        gated.gate.allow(3)
        await until(streams[0], 3)
        await journal.recorded()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "begin", _fails)
            for i in range(2):
                engine.submit(durable(f"unwritten-{i}"))
            await journal.recorded()
            assert journal.failure == "disk I/O error"
            engine.cancel("cancelled")
            engine.forget("deleted")
            gated.gate.open()
            await asyncio.gather(*map(end_of, streams))
            engine.forget("deleted at its end")
        if is_freed:
            async with asyncio.timeout(DEADLINE_S):
                await _deletions(monkeypatch, names[1:])
            monkeypatch.setattr(Store, "begin", _fails)
    assert [saved.request_id for saved in _read(tmp_path, monkeypatch)] == ["runs"]


def _fails(_: Store, *, is_durable: bool) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def _read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.undo()
    return read_journal(folder)


async def _deletions(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Wait until the journal's thread has deleted these."""
    left, done, loop = set(names), asyncio.Event(), asyncio.get_running_loop()
    delete, commit = Store.delete, Store.commit

    def deleted(store: Store, name: str) -> None:
        delete(store, name)
        left.discard(name)

    def committed(store: Store) -> None:
        commit(store)
        if not left:
            loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr(Store, "delete", deleted)
    monkeypatch.setattr(Store, "commit", committed)
    await done.wait()


async def test_a_request_that_kills_the_server_again_and_again_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.engine.journal.restoring.MAX_TRIES", 3)
    for _ in range(4):
        gated = GatedEngine(journal=str(tmp_path))
        await gated.engine.start()
        stream = gated.engine.get("a") or gated.engine.submit(durable("a"))
        assert gated.engine.journal is not None
        await gated.engine.journal.recorded()
        gated.engine.journal._clear_tries = lambda: None  # type: ignore[method-assign]  # no orderly end
        assert not stream.is_finished
        await lost_while_gated(gated)
    for _ in range(2):
        async with make_engine(journal=str(tmp_path)) as engine:
            again = engine.get("a")
            assert again is not None
            (finish,) = again.finishes
            assert finish is not None
            assert "died 3 times" in (finish.detail or "")


class Deadly(Wrapped):
    def launch(self, plan: Plan) -> InFlight:
        if any(join.request_id == "deadly" for join in plan.joins):
            raise InvariantViolated("the end")
        return super().launch(plan)


async def test_a_request_that_ends_the_engine_again_and_again_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends in order each time, and is started again by whatever watches it."""
    monkeypatch.setattr("streamer.engine.journal.restoring.MAX_TRIES", 2)
    for _ in range(3):
        async with aclosing(make_engine(Deadly, journal=str(tmp_path))) as engine:
            with suppress(EngineDead):  # of what is restored it may die before this looks
                await engine.start()
            stream = engine.get("deadly") or engine.submit(durable("deadly"))
            with pytest.raises(StreamerError, match="goes on when it is there again"):
                await end_of(stream)
    async with make_engine(Deadly, journal=str(tmp_path)) as engine:
        again = engine.get("deadly")
        assert again is not None
        (finish,) = again.finishes
        assert finish is not None
        assert "died 2 times" in (finish.detail or "")


async def test_beside_a_request_that_ends_the_engine_others_are_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were running when it ended the engine; from then on it is tried alone."""
    monkeypatch.setattr("streamer.engine.journal.restoring.MAX_TRIES", 6)
    monkeypatch.setattr("streamer.engine.journal.restoring.SUSPECT_TRIES", 2)
    names = ["a", "deadly", "b", "c"]
    deaths = 0
    while deaths < 10:
        engine = make_engine(Deadly, journal=str(tmp_path))
        try:
            await engine.start()
            for name in [name for name in names if engine.get(name) is None]:
                engine.submit(durable(name))
            streams = [s for name in names if (s := engine.get(name)) is not None]
            await asyncio.gather(*map(end_of, streams))
            break
        except StreamerError:
            deaths += 1
        finally:
            await engine.aclose()
    assert deaths == 7  # the first, and 6 restored
    async with make_engine(journal=str(tmp_path)) as engine:
        for name in names:
            stream = engine.get(name)
            assert stream is not None
            (finish,) = stream.finishes
            assert finish is not None
            assert ("died 6 times" in (finish.detail or "")) == (name == "deadly")


async def test_a_restored_request_is_cancelled_before_it_runs(tmp_path: Path) -> None:
    gated = GatedEngine(journal=str(tmp_path), max_num_seqs=1)
    await gated.engine.start()
    for name in ("runs", "waits"):
        gated.engine.submit(durable(name, max_tokens=30))
    gated.gate.allow(3)
    runs = gated.engine.get("runs")
    assert runs is not None
    await until(runs, 3)
    await lost_while_gated(gated)
    async with GatedEngine(journal=str(tmp_path), max_num_seqs=1) as second:
        for name, num_tokens in (("waits", 0), ("runs", 3)):
            stream = second.engine.get(name)
            assert stream is not None
            second.engine.cancel(name)
            second.gate.allow(2)
            ((tokens, _, _),) = await end_of(stream)
            assert num_tokens <= len(tokens) < 30
            assert stream.finishes[0] is not None
            assert stream.finishes[0].reason is FinishReason.CANCELLED
    for saved in read_journal(tmp_path):
        assert saved.is_finished
        assert saved.tail.finishes[0].reason is FinishReason.CANCELLED


async def test_tokens_of_a_deleted_answer_leave_the_file_though_another_is_kept(
    tmp_path: Path,
) -> None:
    async with make_engine(journal=str(tmp_path)) as engine:
        await end_of(engine.submit(durable("kept", max_tokens=3)))
    async with make_engine(journal=str(tmp_path)) as engine:
        await end_of(engine.submit(durable("deleted", max_tokens=9)))
        engine.forget("deleted")
        await engine.aclose()
        with sqlite3.connect(tmp_path / FILE) as db:
            assert db.execute("SELECT count(*) FROM steps").fetchone() == (0,)
        db.close()


@pytest.mark.parametrize("bound", [{"retain_s": 0.0}, {"retain_bytes": 0}])
async def test_what_is_retained_no_longer_leaves_the_file(
    tmp_path: Path, bound: dict[str, Any]
) -> None:
    async with make_engine(journal=str(tmp_path), **bound) as engine:
        await end_of(engine.submit(durable("a", max_tokens=3)))
    assert read_journal(tmp_path) == []


async def test_of_what_is_retained_the_newest_stay_within_the_bytes(tmp_path: Path) -> None:
    """In the file as in memory: where a start leaves less room, and where another one ends."""
    names = [f"{i:02}" for i in range(10)]
    async with make_engine(journal=str(tmp_path)) as engine:
        for name in names:
            await end_of(engine.submit(durable(name, max_tokens=3, prompt=(1,) * 500)))
        room = engine._streams.retained_bytes * 6 // 10
    for num_new in range(3):
        new = [f"new {i}" for i in range(num_new)]
        async with make_engine(journal=str(tmp_path), retain_bytes=room) as engine:
            if new:
                await end_of(engine.submit(durable(new[-1], max_tokens=3, prompt=(1,) * 500)))
            kept = [name for name in (*names, *new) if engine.get(name) is not None]
        assert kept == [*names, *new][-6:]
        assert sorted(saved.request_id for saved in read_journal(tmp_path)) == kept


async def test_of_what_is_retained_that_of_the_last_seconds_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the monotonic clock while the server runs, and by that of the wall over a restart."""
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    async with make_engine(journal=str(tmp_path), retain_s=150.0) as engine:
        monkeypatch.setattr("streamer.engine.registry.time", clock)
        for name in ("a", "b", "c"):
            await end_of(engine.submit(durable(name, max_tokens=3)))
            now += 60.0
        assert [engine.get(name) is not None for name in "abc"] == [False, True, True]
    assert [saved.request_id for saved in read_journal(tmp_path)] == ["b", "c"]
    monkeypatch.undo()
    real = time.time
    for later, kept in ((100.0, ["b", "c"]), (200.0, [])):
        monkeypatch.setattr(time, "time", lambda later=later: real() + later)
        async with make_engine(journal=str(tmp_path), retain_s=150.0):
            pass
        assert [saved.request_id for saved in read_journal(tmp_path)] == kept


async def test_an_idle_server_gives_back_what_its_file_has_no_use_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.engine.journal.store.SPARE_BYTES", 1 << 18)
    room = {"num_gpu_blocks_override": 2048, "max_num_batched_tokens": 8192}
    file, shrink = tmp_path / FILE, Store.shrink
    is_small, loop = asyncio.Event(), asyncio.get_running_loop()
    peak_bytes = 1 << 40

    def seen(store: Store, moved_bytes: int | None = None) -> None:
        shrink(store, moved_bytes)
        if file.stat().st_size < peak_bytes // 4:
            loop.call_soon_threadsafe(is_small.set)

    async with make_engine(journal=str(tmp_path), max_model_len=8192, **room) as engine:
        assert engine.journal is not None
        engine.journal._store._db.execute("PRAGMA wal_autocheckpoint = 1")  # all is in the file
        prompt = (200,) * 8000  # two bytes each
        streams = [
            engine.submit(durable(f"{i}", max_tokens=3, prompt=prompt[i:])) for i in range(40)
        ]
        await asyncio.gather(*map(end_of, streams))
        await engine.journal.recorded()
        peak_bytes = file.stat().st_size
        assert peak_bytes > 500_000
        monkeypatch.setattr(Store, "shrink", seen)
        for i in range(1, 40):
            engine.forget(f"{i}")
        async with asyncio.timeout(DEADLINE_S):
            await is_small.wait()
        await end_of(engine.submit(durable("after", max_tokens=3)))
    assert [saved.request_id for saved in read_journal(tmp_path)] == ["0", "after"]


async def test_what_is_too_old_leaves_an_idle_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.engine.engine.EXPIRE_S", 0.02)
    async with make_engine(journal=str(tmp_path), retain_s=0.1) as engine:
        journal, is_gone = engine.journal, asyncio.Event()
        assert journal is not None
        forget = journal.forget
        monkeypatch.setattr(journal, "forget", lambda name: (forget(name), is_gone.set()))
        await end_of(engine.submit(durable("a", max_tokens=3)))
        async with asyncio.timeout(DEADLINE_S):
            await is_gone.wait()
    assert read_journal(tmp_path) == []


@pytest.mark.parametrize("years", [-20, 20])
async def test_its_age_counts_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Also where the clock was wrong before or is now."""
    async with make_engine(journal=str(tmp_path)) as engine:
        await end_of(engine.submit(durable("a", max_tokens=3)))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + years * 365.25 * 86400)
    async with make_engine(journal=str(tmp_path)) as engine:
        assert (engine.get("a") is None) == (years > 0)
        await end_of(engine.submit(durable("b", max_tokens=3)))
    names = [saved.request_id for saved in read_journal(tmp_path)]
    assert sorted(names) == (["b"] if years > 0 else ["a", "b"])


async def test_an_id_used_again_has_nothing_of_the_deleted_answer(tmp_path: Path) -> None:
    gated = GatedEngine(journal=str(tmp_path))
    engine = gated.engine
    await engine.start()
    engine.submit(durable("other", max_tokens=40))
    first = engine.submit(durable("a", max_tokens=8))
    gated.gate.allow(9)
    assert len((await end_of(first))[0][0]) == 8
    engine.forget("a")
    engine.submit(durable("a", max_tokens=9, prompt=tuple(b"another one")))
    await lost_while_gated(gated)
    other, again = read_journal(tmp_path)
    assert len(again.tail.tokens[0]) < 3
    assert len(other.tail.tokens[0]) >= 8


async def test_a_disk_that_is_full_at_the_start_is_named_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Store) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", fails)
        with pytest.raises(ConfigError, match="can't be used: database or disk is full"):
            await make_engine(journal=str(tmp_path)).start()
    async with make_engine(journal=str(tmp_path)) as engine:
        assert engine.is_ready


async def test_two_engines_on_one_journal(tmp_path: Path) -> None:
    async with make_engine(journal=str(tmp_path)):
        second = make_engine(journal=str(tmp_path))
        with pytest.raises(ConfigError, match="another server uses"):
            await second.start()
        with pytest.raises(StreamerError):
            await second.start()
    async with make_engine(journal=str(tmp_path)) as third:
        assert third.is_ready
    assert (tmp_path / FILE).exists()


async def test_the_epoch_is_as_old_as_the_journal(tmp_path: Path) -> None:
    epochs = set()
    for _ in range(2):
        async with make_engine(journal=str(tmp_path)) as engine:
            assert engine.journal is not None
            epochs.add(engine.journal.epoch)
    assert len(epochs) == 1

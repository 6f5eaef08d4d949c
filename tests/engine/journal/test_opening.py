"""An engine that is cancelled or closed while its journal is read lets the journal go."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from streamer.engine.engine import AsyncEngine
from streamer.errors import EngineDead
from tests.engine.helpers import make_engine


async def begun(engine: AsyncEngine) -> asyncio.Task[None]:
    """A start that reads its journal."""
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    return starting


async def cancelled(starting: asyncio.Task[None]) -> None:
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_a_start_that_is_cancelled_while_it_reads_lets_the_journal_go(tmp_path: Path) -> None:
    engine = make_engine(journal=str(tmp_path))
    await cancelled(await begun(engine))
    await engine.aclose()
    async with make_engine(journal=str(tmp_path)) as second:
        assert second.is_ready


async def test_a_start_cancelled_as_the_journal_comes_lets_it_go(tmp_path: Path) -> None:
    engine = make_engine(journal=str(tmp_path))
    starting = await begun(engine)
    assert engine._opening is not None
    engine._opening.add_done_callback(lambda _: starting.cancel())
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with make_engine(journal=str(tmp_path)) as second:
        assert second.is_ready
    await engine.aclose()


async def test_a_journal_that_fails_after_a_cancelled_start_is_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine(journal=str(tmp_path)):
        engine = make_engine(journal=str(tmp_path))  # is refused, since that one has it
        await cancelled(await begun(engine))
        await engine.aclose()
        engine._opening = None
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_closing_while_the_journal_is_read_ends_the_start(tmp_path: Path) -> None:
    engine = make_engine(journal=str(tmp_path))
    starting = await begun(engine)
    await engine.aclose()
    with pytest.raises(EngineDead, match="closed"):
        await starting
    assert engine.snapshot().state == "closed"
    async with make_engine(journal=str(tmp_path)) as second:
        assert second.is_ready

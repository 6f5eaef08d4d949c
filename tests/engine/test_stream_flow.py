"""TokenStream and its readers: detaching cancels the request, lag pauses it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamer.errors import InvalidRequest, ReaderTooSlow
from tests.engine.helpers import DEADLINE_S, Calls, end, lone_stream, write

# ---------------------------------------------------------------- detaching


async def test_the_last_reader_leaving_cancels() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.0)
    first, second = stream.read(), stream.read()
    write(stream, "a")
    await anext(first)
    await anext(second)
    await first.aclose()
    assert calls.log == []
    await second.aclose()
    assert calls.log == ["cancel"]


async def test_cancelling_a_readers_task_detaches_it() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.0)
    task = asyncio.create_task(stream.wait())
    await asyncio.sleep(0)
    assert stream.num_readers == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (stream.num_readers, calls.log) == (0, ["cancel"])


async def test_breaking_out_of_the_loop_detaches() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.0)
    write(stream, "a")
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.read()) as batches:
        async for _ in batches:
            break
    assert calls.log == ["cancel"]


async def test_a_stream_that_was_never_read_runs_on() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.0)
    write(stream, "abc")
    end(stream)
    assert calls.log == []


async def test_without_a_detach_time_it_runs_on_for_ever() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=None)
    write(stream, "a")
    async with aclosing(stream.read()) as reader:
        await anext(reader)
    assert calls.log == []


async def test_the_detach_time_passes_before_the_cancel() -> None:
    cancelled = asyncio.Event()

    class CountingControl(Calls):
        def cancel(self, request_id: str) -> None:
            super().cancel(request_id)
            cancelled.set()

    calls = CountingControl()
    stream = lone_stream(calls, detach_s=0.01)
    write(stream, "a")
    async with aclosing(stream.read()) as reader:
        await anext(reader)
    assert calls.log == []
    async with asyncio.timeout(DEADLINE_S):
        await cancelled.wait()


async def test_a_reader_that_comes_in_time_prevents_the_cancel() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.02)
    loop = asyncio.get_running_loop()
    write(stream, "a")
    async with aclosing(stream.read()) as reader:
        await anext(reader)
    passed = asyncio.Event()
    async with aclosing(stream.read()) as reader:
        await anext(reader)
        loop.call_later(0.05, passed.set)
        async with asyncio.timeout(DEADLINE_S):
            await passed.wait()
        assert calls.log == []


async def test_a_finished_stream_is_not_cancelled() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.01)
    write(stream, "a")
    async with aclosing(stream.read()) as reader:
        await anext(reader)
    end(stream)
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, passed.set)
    async with asyncio.timeout(DEADLINE_S):
        await passed.wait()
    assert calls.log == []


# ---------------------------------------------------------------- the window


async def test_waiting_for_the_end_takes_everything_at_once() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=2)
    task = asyncio.create_task(stream.wait())
    await asyncio.sleep(0)
    write(stream, "abcdefgh")  # in one turn of the loop: no task has run meanwhile
    assert (stream.lag(), calls.log, task.done()) == (0, [], False)
    end(stream)
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert (stream.num_readers, stream.text(), calls.log) == (0, "abcdefgh", [])
    await stream.wait()  # once more: it has ended


async def test_it_pauses_above_the_window_and_resumes_at_half_of_it() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=8)
    async with aclosing(stream.read()) as reader:
        write(stream, "a")
        await anext(reader)  # the reader was given 1, and has not asked again
        write(stream, "b" * 7)
        assert (stream.lag(), calls.log) == (8, [])
        write(stream, "c")
        assert (stream.lag(), calls.log) == (9, ["pause"])
        assert stream.is_paused
        await anext(reader)  # it asked again: 1 is consumed, 8 more are given
        assert (stream.lag(), calls.log) == (8, ["pause"])
        waiting = asyncio.create_task(anext(reader))  # and again: all consumed
        await asyncio.sleep(0)
        assert (stream.lag(), calls.log) == (0, ["pause", "resume"])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_the_furthest_reader_counts() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    fast, slow = stream.read(), stream.read()
    write(stream, "a")
    await anext(slow)
    for _ in range(10):
        write(stream, "b")
        await anext(fast)
    assert stream.lag() <= 1
    assert calls.log == []
    await fast.aclose()  # now the slow one is the furthest
    write(stream, "c")
    assert calls.log == ["pause"]
    await slow.aclose()
    assert calls.log == ["pause", "resume"]  # without readers it is not paused


async def test_no_reader_no_pause() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    write(stream, "a" * 100)
    assert (stream.lag(), calls.log) == (0, [])


async def test_no_window_no_pause() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=0)
    async with aclosing(stream.read()) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "a" * 10_000)
        assert (stream.lag(), calls.log) == (10_001, [])


async def test_acknowledgements_replace_what_was_taken() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    number = stream.new_reader()
    async with aclosing(stream.read(reader=number)) as reader:
        write(stream, "a")
        await anext(reader)
        stream.acknowledge(number, 1)
        for _ in range(4):
            write(stream, "b")
            await anext(reader)
        assert (stream.lag(), calls.log) == (4, [])
        write(stream, "c")
        assert (stream.lag(), calls.log) == (5, ["pause"])
        stream.acknowledge(number, 3)
        assert calls.log == ["pause"]  # 3 are left, half of the window is 2
        stream.acknowledge(number, 2)  # older than the last one
        stream.acknowledge(number, 4)
        assert (stream.lag(), calls.log) == (2, ["pause", "resume"])
        stream.acknowledge(number, 10**9)  # taken as the head's number
        assert stream.lag() == 0


async def test_a_caller_and_a_lag_both_pause_and_one_command_is_sent() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    async with aclosing(stream.read()) as reader:
        write(stream, "a")
        await anext(reader)
        stream.hold(True)
        write(stream, "b" * 5)
        assert calls.log == ["pause"]
        stream.hold(False)
        assert calls.log == ["pause"]  # its reader still lags
    assert calls.log == ["pause", "resume"]


async def test_a_finished_stream_is_neither_paused_nor_resumed() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    async with aclosing(stream.read()) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "b" * 5)
        end(stream)
    assert calls.log == ["pause"]


# ---------------------------------------------------------------- dropped readers


async def test_a_reader_that_lags_too_long_is_dropped_and_the_stream_waits_paused() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4, detach_s=0.0, pause_s=0.0, linger_s=60.0)
    reader = stream.new_reader()
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.read(reader=reader)) as batches:
        write(stream, "a")
        await anext(batches)
        stream.acknowledge(reader, 1)
        write(stream, "bcdefgh")
        await anext(batches)
        with pytest.raises(ReaderTooSlow, match="more than 4 tokens"):
            await anext(batches)
    assert (stream.num_readers, stream.is_paused) == (0, True)
    assert calls.log == ["pause"]
    async with aclosing(stream.read(8)) as late:  # has everything: nothing to wait for
        waiting = asyncio.ensure_future(anext(late))
        await asyncio.sleep(0)
        assert calls.log == ["pause", "resume"]
        end(stream)
        await waiting


@pytest.mark.parametrize("window", [0, 8])
async def test_a_reader_that_comes_back_within_the_window_finds_nothing_paused(window: int) -> None:
    calls = Calls()
    stream = lone_stream(calls, window=window, detach_s=None)
    number = stream.new_reader()
    async with aclosing(stream.read(reader=number)) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "b" * 9)
        stream.drop(number)
    assert (calls.log, stream.is_paused) == (["pause"], True)
    late = stream.attach(4, lambda: None)  # 6 behind: more than half of the window
    assert (stream.lag(), calls.log) == (6, ["pause", "resume"])
    stream.detach(late)


async def test_a_second_reader_does_not_make_the_pause_endless() -> None:
    stream = lone_stream(window=8, detach_s=None, pause_s=0.01)
    slow = stream.attach(0, lambda: None)
    write(stream, "a" * 10)
    slow.acknowledged = 0
    gone = asyncio.Event()
    second = stream.attach(4, gone.set)
    second.acknowledged = 4  # and acknowledges no more
    assert stream.is_paused
    async with asyncio.timeout(DEADLINE_S):
        await gone.wait()
    assert second.is_dropped


async def test_a_cursor_beyond_the_head_is_refused_and_flow_control_stays() -> None:
    calls = Calls()
    stream = lone_stream(calls, n=2, window=4, detach_s=None)
    slow = stream.attach(0, lambda: None)
    write(stream, "ab")
    with pytest.raises(InvalidRequest, match="8 tokens beyond the 2 there are") as refusal:
        stream.attach((10, 0), lambda: None)
    assert refusal.value.param == "starting_after"
    end(stream)
    late = stream.attach((10, 0), lambda: None)  # the number of an end is valid too
    assert late.position == 2
    stream.detach(late)
    write(stream, "cdef", choice=1)
    assert calls.log == ["pause"]
    stream.detach(slow)


async def test_without_another_reader_it_is_cancelled() -> None:
    cancelled = asyncio.Event()

    class CountingControl(Calls):
        def cancel(self, request_id: str) -> None:
            cancelled.set()

    stream = lone_stream(CountingControl(), window=4, detach_s=None, pause_s=0.0, linger_s=0.0)
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.read()) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "bcdefgh")
        await cancelled.wait()
    assert stream.is_paused


async def test_dropping_one_of_two_readers_changes_nothing_for_the_other() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4, detach_s=0.0)
    number = stream.new_reader()
    async with aclosing(stream.read()) as first, aclosing(stream.read(reader=number)) as second:
        write(stream, "a")
        await anext(first)
        await anext(second)
        stream.drop(number)
        stream.drop(number)
        assert (stream.num_readers, calls.log) == (1, [])
        write(stream, "b")
        assert [d.text for d in await anext(first)] == ["b"]  # type: ignore[union-attr]


async def test_when_the_furthest_reader_goes_the_others_lag_counts_at_once() -> None:
    for leave in ("drop", "close"):
        calls = Calls()
        stream = lone_stream(calls, window=4, detach_s=None)
        number = stream.new_reader()
        async with aclosing(stream.read()) as slow, aclosing(stream.read(reader=number)) as fast:
            write(stream, "a")
            await anext(slow)
            await anext(fast)
            stream.acknowledge(number, 1)
            write(stream, "bcdef")
            stream.acknowledge(number, 6)
            calls.log.clear()
            if leave == "drop":
                stream.drop(number)
            else:
                await fast.aclose()
            assert (calls.log, stream.lag()) == (["pause"], 6)


async def test_acknowledgements_of_a_dropped_reader_are_ignored() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4)
    number = stream.new_reader()
    async with aclosing(stream.read(reader=number)) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "bcdef")
        stream.drop(number)
        stream.acknowledge(number, 6)
        await anext(reader)
        with pytest.raises(ReaderTooSlow):
            await anext(reader)
    assert (calls.log, stream.is_paused) == (["pause"], True)


async def test_a_missed_reader_counts_as_one_that_left() -> None:
    calls = Calls()
    stream = lone_stream(calls, detach_s=0.0)
    stream.miss()
    assert calls.log == ["cancel"]
    alone = lone_stream(calls, detach_s=None)
    alone.miss()
    assert calls.log == ["cancel"]


async def test_a_missed_resume_leaves_the_wait_for_another_reader_unchanged() -> None:
    calls = Calls()
    stream = lone_stream(calls, window=4, detach_s=0.0)
    number = stream.new_reader()
    async with aclosing(stream.read(reader=number)) as reader:
        write(stream, "a")
        await anext(reader)
        write(stream, "bcdef")
        stream.drop(number)
    stream.miss()
    assert (calls.log, stream.is_paused) == (["pause"], True)

"""TokenStream: cursors, many readers, merging, detaching, and the window."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from streamer.core.plan import Finish, FinishReason, Notice, NoticeKind, TokenLogprob
from streamer.engine.stream import Delta, TokenStream
from streamer.errors import EngineDead, InvalidRequest
from tests.engine.helpers import DEADLINE_S, all_deltas, end, lone_stream, write

# ---------------------------------------------------------------- cursors


async def test_a_late_reader_gets_one_merged_delta_a_choice() -> None:
    stream = lone_stream(n=2)
    write(stream, "hello")
    write(stream, "world", choice=1)
    finishes = [end(stream, 0), end(stream, 1)]
    assert await all_deltas(stream) == [
        Delta(0, 0, tuple(b"hello"), "hello", None, finishes[0]),
        Delta(1, 0, tuple(b"world"), "world", None, finishes[1]),
    ]


@pytest.mark.parametrize("after", range(6))
async def test_any_number_is_a_cursor(after: int) -> None:
    stream = lone_stream()
    write(stream, "hello")
    end(stream)
    (delta,) = await all_deltas(stream, after)
    assert (delta.start, delta.text) == (after, "hello"[after:])
    assert delta.token_ids == tuple(b"hello"[after:])


@pytest.mark.parametrize("text", ["aé😀b", "日本語", "é"])
async def test_a_cut_anywhere_loses_and_doubles_nothing(text: str) -> None:
    """Read up to token k, then resume from k: the two texts joined are the whole."""
    num_tokens = len(text.encode())
    for k in range(num_tokens + 1):
        stream = lone_stream()
        for i, byte in enumerate(text.encode()):
            if i == k:
                first = stream.text()
            stream.push(0, byte, None, None)
        if k == num_tokens:
            first = stream.text()
        end(stream)
        assert first + "".join(d.text for d in await all_deltas(stream, k)) == text


async def test_a_cursor_beyond_the_end_gets_the_finish_alone() -> None:
    stream = lone_stream()
    write(stream, "ab")
    finish = end(stream)
    assert await all_deltas(stream, 7) == [Delta(0, 2, (), "", None, finish)]


@pytest.mark.parametrize("cursor", [-1, (1,), (1, 2, 3), (0, -1)])
async def test_a_wrong_cursor_is_refused(cursor: int | tuple[int, ...]) -> None:
    stream = lone_stream(n=2)
    with pytest.raises(InvalidRequest):
        await anext(stream.read(cursor))
    assert stream.num_readers == 0


async def test_a_cursor_a_choice() -> None:
    stream = lone_stream(n=2)
    write(stream, "hello")
    write(stream, "world", choice=1)
    async with aclosing(stream.read((1, 4))) as reader:
        assert [d.text for d in await anext(reader) if isinstance(d, Delta)] == ["ello", "d"]


# ---------------------------------------------------------------- live


async def test_two_readers_of_different_pace_read_the_same() -> None:
    stream = lone_stream()
    fast, slow = stream.read(), stream.read()
    write(stream, "a")
    texts = [(await anext(fast))[0].text]  # type: ignore[union-attr]
    for letter in "bcd":
        write(stream, letter)
        texts.append((await anext(fast))[0].text)  # type: ignore[union-attr]
    assert texts == ["a", "b", "c", "d"]
    assert [i.text for i in await anext(slow)] == ["abcd"]  # type: ignore[union-attr]
    end(stream)
    assert [i.finish.reason for i in await anext(slow)] == [FinishReason.LENGTH]  # type: ignore[union-attr]
    for reader in (fast, slow):
        await reader.aclose()


async def test_a_waiting_reader_is_woken_once_for_all_that_came() -> None:
    stream = lone_stream(n=3)
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.read()) as reader:
        waiting = asyncio.create_task(anext(reader))
        await asyncio.sleep(0)
        for choice in range(3):
            write(stream, "xy", choice)
        assert [(d.choice, d.text) for d in await waiting] == [  # type: ignore[union-attr]
            (0, "xy"),
            (1, "xy"),
            (2, "xy"),
        ]


async def test_the_last_text_comes_with_the_finish() -> None:
    stream = lone_stream()
    write(stream, "a\N{GRINNING FACE}"[:1])
    stream.push(0, 0xF0, None, None)  # half a character
    end(stream)
    (delta,) = await all_deltas(stream)
    assert delta.text == "a\ufffd"
    (late,) = await all_deltas(stream, 2)
    assert late.text == "\ufffd"


async def test_logprobs_are_carried_one_a_token() -> None:
    stream = lone_stream(logprobs=1)
    values = [TokenLogprob(b, -float(b)) for b in b"abc"]
    for value in values:
        stream.push(0, value.token_id, value, None)
    end(stream)
    (delta,) = await all_deltas(stream, 1)
    assert delta.logprobs == tuple(values[1:])
    assert stream.logprobs() == tuple(values)


async def test_without_logprobs_there_are_none() -> None:
    stream = lone_stream()
    write(stream, "a")
    end(stream)
    assert (await all_deltas(stream))[0].logprobs is None


async def test_an_end_token_is_counted_but_is_no_text() -> None:
    stream = lone_stream()
    write(stream, "ab")
    finish = Finish("r", 0, FinishReason.STOP, 3, text_bytes=2)
    stream.push(0, ord("!"), None, finish)
    assert stream.token_ids() == tuple(b"ab!")
    assert (stream.text(), stream.is_finished) == ("ab", True)


async def test_a_stop_string_is_cut_from_the_text() -> None:
    stream = lone_stream(stop=("END",))
    write(stream, "one EN")
    assert stream.text() == "one "
    finish = Finish("r", 0, FinishReason.STOP, 7, text_bytes=4, stop="END")
    stream.push(0, ord("D"), None, finish)
    assert stream.text() == "one "


async def test_notices_come_first_and_only_the_newest_of_a_kind() -> None:
    stream = lone_stream()
    reader = stream.read()
    running = Notice("r", NoticeKind.RUNNING, cached_tokens=2, shared_tokens=1)
    waiting = asyncio.create_task(anext(reader))
    await asyncio.sleep(0)
    stream.notify(running)
    for done in (10, 20, 30):
        stream.notify(Notice("r", NoticeKind.PREFILL, done, 40))
    write(stream, "a")
    items = await waiting
    assert items[:2] == [running, Notice("r", NoticeKind.PREFILL, 30, 40)]
    assert isinstance(items[2], Delta)
    assert (stream.cached_tokens, stream.shared_tokens) == (2, 1)
    await reader.aclose()


async def test_notices_that_piled_up_keep_the_order_in_which_they_last_came() -> None:
    stream = lone_stream()
    reader = stream.read()
    waiting = asyncio.create_task(anext(reader))
    await asyncio.sleep(0)
    for kind in (NoticeKind.RUNNING, NoticeKind.PREEMPTED, NoticeKind.RUNNING):
        stream.notify(Notice("r", kind))
    stream.wake()
    kinds = [i.kind for i in await waiting if isinstance(i, Notice)]
    assert kinds == [NoticeKind.PREEMPTED, NoticeKind.RUNNING]
    await reader.aclose()


async def test_a_notice_that_repeats_the_one_before_is_not_passed_on() -> None:
    stream = lone_stream()
    reader = stream.attach(0, lambda: None)
    waiting = Notice("r", NoticeKind.WAITING, position=2)
    stream.notify(waiting)
    assert stream.take(reader) == [waiting]
    stream.notify(Notice("r", NoticeKind.WAITING, position=2))
    assert stream.take(reader) == []
    stream.notify(Notice("r", NoticeKind.WAITING, position=1))
    assert stream.take(reader) == [Notice("r", NoticeKind.WAITING, position=1)]
    stream.detach(reader)


async def test_cached_tokens_are_those_of_the_first_run() -> None:
    stream = lone_stream()
    stream.notify(Notice("r", NoticeKind.RUNNING, cached_tokens=2))
    stream.notify(Notice("r", NoticeKind.RUNNING, cached_tokens=99))  # back after a preemption
    assert stream.cached_tokens == 2


async def test_timing_is_filled_in_as_the_stream_goes_on() -> None:
    stream = lone_stream()
    assert stream.timing.queue_s is None
    stream.notify(Notice("r", NoticeKind.RUNNING))
    write(stream, "abc")
    end(stream)
    t = stream.timing
    assert t.queue_s is not None
    assert t.prefill_s is not None
    assert t.first_token_s is not None
    assert t.per_token_s is not None
    assert t.total_s is not None
    assert 0 <= t.queue_s <= t.first_token_s <= t.total_s
    assert t.queue_s + t.prefill_s == pytest.approx(t.first_token_s)
    assert t.per_token_s * 2 <= t.total_s


async def test_the_step_that_first_computes_a_request_is_no_time_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stream, early = lone_stream(), lone_stream()
    now = 103.0
    stream.notify(Notice("r", NoticeKind.RUNNING, age_s=2.0))
    write(stream, "a")
    assert (stream.timing.queue_s, stream.timing.prefill_s) == (1.0, 2.0)
    early.notify(Notice("r", NoticeKind.RUNNING, age_s=4.0))  # it came while that step began
    assert early.timing.queue_s == 0.0


# ---------------------------------------------------------------- the end


async def test_death_comes_after_what_came_before_it() -> None:
    stream = lone_stream()
    write(stream, "abc")
    stream.fail(EngineDead("the engine died: boom"))
    reader = stream.read()
    assert [d.text for d in await anext(reader) if isinstance(d, Delta)] == ["abc"]
    with pytest.raises(EngineDead, match="boom"):
        await anext(reader)


async def test_death_wakes_every_reader() -> None:
    stream = lone_stream()
    waiting = [asyncio.create_task(stream.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    stream.fail(EngineDead("boom"))
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, EngineDead) for r in results)
    assert len({id(r) for r in results}) == 3  # each with a traceback of its own


async def test_a_finish_comes_once() -> None:
    stream = lone_stream()
    end(stream)
    stream.end(Finish("r", 0, FinishReason.CANCELLED, 0))
    assert [f.reason for f in stream.finishes if f] == [FinishReason.LENGTH]
    stream.fail(EngineDead("too late"))
    assert stream.error is None


async def test_observers_are_notified_of_the_end_once() -> None:
    calls: list[str] = []
    stream, other = lone_stream(n=2), lone_stream()

    def see(seen: TokenStream) -> None:
        calls.append(f"{seen.num_output_tokens} {seen.is_finished} {seen.error is not None}")

    stream.observers.append(see)
    other.observers.append(see)
    write(stream, "ab")
    end(stream, 0)
    assert calls == ["1 False False"]
    end(stream, 1)
    end(stream, 1)
    other.fail(EngineDead("gone"))
    assert calls[1:] == ["2 True False", "0 True True"]


@pytest.mark.parametrize("after", range(10))
async def test_a_delta_split_is_the_same_a_token_at_a_time(after: int) -> None:
    stream = lone_stream(logprobs=0)
    for byte in "é😀b".encode() + b"\xf0\x9f":
        stream.push(0, byte, TokenLogprob(byte, -1.0), None)
    end(stream)
    (whole,) = await all_deltas(stream, after)
    *pieces, last = stream.split(whole)
    assert "".join(d.text for d in (*pieces, last)) == whole.text
    assert [(d.start, d.token_ids) for d in pieces] == [
        (whole.start + i, (t,)) for i, t in enumerate(whole.token_ids)
    ]
    assert tuple(lp for d in pieces for lp in d.logprobs or ()) == whole.logprobs
    assert (last.text, last.token_ids, last.finish) == ("\ufffd", (), whole.finish)
    assert stream.has_rest()


async def test_the_text_before_a_token_and_after_it_is_the_text() -> None:
    stream = lone_stream()
    write(stream, "aé😀b")
    for k in range(9):
        assert stream.text_before(k) + stream._choices[0].text_from(k) == "aé😀b"

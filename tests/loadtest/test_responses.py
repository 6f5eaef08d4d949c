"""Events folded into an answer: what is lost, doubled, cut or gone is reported."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.loadtest.responses import DECODER, Event, Log, Response, check_counting
from streamer.loadtest.sse import BadAnswer


def event(kind: str, number: int = -1, **fields: Any) -> Event:
    return Event(type=kind, sequence_number=number, **fields)


def delta(number: int, text: str) -> Event:
    return event("response.output_text.delta", number, delta=text)


def end(number: int, text: str) -> list[Event]:
    return [
        event("response.output_text.done", number, text=text),
        event("response.completed", number + 1, response=Response("r", "completed")),
    ]


def fold(*events: Event) -> Log:
    log = Log()
    for each in [event("response.created", 0, response=Response("r", "in_progress")), *events]:
        log.add(each)
    return log


def test_a_whole_answer() -> None:
    waiting = event("response.waiting", 0)
    log = fold(waiting, delta(1, "a"), delta(3, "bc"), *end(4, "abc"))
    log.check()
    assert (log.id, log.text, log.number, log.status) == ("r", "abc", 5, "completed")


def test_a_lost_piece_is_found_by_the_sum() -> None:
    log = fold(delta(1, "a"), delta(3, "c"), *end(4, "abc"))
    with pytest.raises(BadAnswer, match="differ from 1 on"):
        log.check()


def test_a_doubled_event_is_found_by_its_number() -> None:
    with pytest.raises(BadAnswer, match="doubled"):
        fold(delta(1, "a"), delta(1, "a"))
    with pytest.raises(BadAnswer, match="doubled"):
        fold(delta(4, "a"), delta(3, "b"))


def test_what_is_cut_failed_or_gone() -> None:
    with pytest.raises(BadAnswer, match="without a terminal event"):
        fold(delta(1, "a")).check()
    with pytest.raises(BadAnswer, match="failed"):
        fold(event("response.failed", 1, response=Response("r", "failed")))
    with pytest.raises(BadAnswer, match="gone"):
        fold(event("response.resumed", status="gone", response_id="r"))
    with pytest.raises(BadAnswer, match="no room"):
        fold(DECODER.decode(b'{"type": "error", "error": {"message": "no room"}}'))


@pytest.mark.parametrize("text", [" 1 2", " 1 2 3 4", " 1 3", " 1 2 2", " 1 2 3 ", ""])
def test_counting(text: str) -> None:
    check_counting(" 1 2 3", 3)
    with pytest.raises(BadAnswer):
        check_counting(text, 3)

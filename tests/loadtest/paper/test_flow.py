"""bench paper flow: the figures of an answer, and the whole command over the fake model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamer.errors import StreamerError
from streamer.loadtest.paper import flow as paper_flow
from streamer.loadtest.paper.flow import Counts, Reader, Run, Work, compare, counts


class Socket:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        pass


def test_a_reader_notes_arrivals_and_asks_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, now = Socket(), [10.0]
    monkeypatch.setattr(paper_flow.socket, "create_connection", lambda _: fake)
    monkeypatch.setattr(paper_flow.time, "perf_counter", lambda: now[0])
    reader = Reader(1, Work((), prompt=2, output=3), "x")
    reader.take(b"HTTP/1.1 200 OK\r\n\r\n", 10.5)
    reader.take(b'data: {"text":"a"}\n\ndata: {"text":"b"}', 11.0)
    reader.take(b'\n\ndata: {"text":"c"}\n\ndata: [DO', 11.25)
    assert len(fake.sent) == 1
    now[0] = 12.0
    reader.take(b"NE]\n\n", 12.0)  # cut between two reads
    assert len(fake.sent) == 2
    assert fake.sent[0] != fake.sent[1]  # another prompt, so that the cache has no block of it
    assert b'"max_tokens":3' in fake.sent[0]
    reader.end(15.0)
    assert reader.gaps_ms == [250]
    assert reader.first_ms == [1000, 3000]  # the second answer never began


def view(*requests: tuple[int, int, int]) -> dict[str, Any]:
    listed = [
        {
            "max_tokens": max_tokens,
            "prompt_tokens": 10,
            "sequences": [{"tokens": tokens, "num_blocks": blocks}],
        }
        for max_tokens, tokens, blocks in requests
    ]
    return {"requests": listed, "block_size": 16, "stats": {"generated_tokens": 100}}


def test_tokens_of_stuck_and_other_requests_are_counted_apart() -> None:
    found = counts(view((900, 30, 2), (900, 25, 0), (7, 15, 1)), 900, 2)
    assert found == Counts(stuck=35, others=65, held=32)
    with pytest.raises(StreamerError, match="1 of 2"):
        counts(view((900, 30, 2)), 900, 2)


def test_the_table_has_shares_of_what_readers_have_alone() -> None:
    runs = {
        "no slow reader": Run(100.0, [5.0, 10.0], [50.0], 0, 0.0, 0),
        "flow control": Run(90.0, [6.0, 12.0], [60.0, 70.0], 320, 0.0, 1 << 20),
        "no flow control": Run(0.0, [], [9000.0], 6400, 80.0, 3 << 20),
    }
    work = msgspec.structs.replace(paper_flow.FULL, cases=paper_flow.FULL.cases[:3])
    found = compare(work, runs)
    rows: Any = found.rows
    assert rows[1] == ("flow control", 90.0, 6.0, 12.0, 12.0, 60.0, 70.0, 0.0, 320, 1.0)
    assert rows[2][2:5] == (paper_flow.NONE,) * 3
    assert {len(row) for row in rows} == {len(found.columns)}
    assert "keep 90% of the tokens/s they have alone, without it 0%" in found.finding
    assert "12 ms and no token came (alone 10 ms)" in found.finding
    assert "first token 70 ms and 9,000 ms" in found.finding
    assert [series.points for series in found.plot.series] == [((0, 100),), ((0, 90),), ((0, 0),)]


def test_every_case_runs_on_a_server() -> None:
    alone, on, off = (
        paper_flow.run_case(paper_flow.FAKE, paper_flow.TINY, case)
        for case in paper_flow.TINY.cases
    )
    assert min(run.speed for run in (alone, on, off)) > 0
    assert alone.stuck_tokens == 0
    assert off.stuck_speed > 0
    assert len(on.gaps_ms) > 0

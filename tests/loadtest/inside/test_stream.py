"""bench stream: a small run of every transport, and the parts that compute its figures."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from streamer.cli import main
from streamer.core.plan import StepOutput, StepStats
from streamer.errors import StreamerError
from streamer.loadtest.inside.stream import command as stream
from streamer.loadtest.inside.stream import plain
from streamer.loadtest.inside.stream.client import EVENT, TRANSPORTS, Connection, Counted
from streamer.loadtest.inside.stream.command import Report, StreamCase, Yardstick
from streamer.loadtest.inside.stream.server import Record, Steps
from streamer.server.openai.chat_types import Chunk
from streamer.server.responses.types import DeltaEvent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_has_its_figures(transport: str) -> None:
    m = stream.measure(stream.Run(transport, 16, 50.0, has_journal=transport == "ws"), 1.0)
    assert isinstance(m, StreamCase)
    assert m.tokens_per_s > 0
    assert m.events_per_s > 0
    assert m.num_samples > 0
    assert m.deliver_p50_ms is not None
    assert m.deliver_p99_ms is not None
    assert 0 < m.deliver_p50_ms <= m.deliver_p99_ms
    assert 0 < m.loop_cpu_us <= m.process_cpu_us


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uvicorn_alone_is_measured_over_the_same_sockets(transport: str) -> None:
    yardstick = stream.measure_uvicorn(transport, 16, 0.2)
    assert yardstick.events_per_s > 0
    assert yardstick.loop_cpu_us > 0
    assert 0 < yardstick.client_busy <= 1


def test_a_client_that_the_system_holds_up_counts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine "begin" and "end" came to it in one read, and it answered neither."""
    pids: list[int] = []

    class Held(stream.Process):
        def __init__(self, module: str, order: msgspec.Struct) -> None:
            super().__init__(module, order)
            pids.append(self._process.pid)

        def ask(self, command: str, answer: type[stream.T]) -> stream.T:
            if command == "begin":
                os.kill(pids[-1], signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (pids[-1], signal.SIGCONT)).start()
            return super().ask(command, answer)

    monkeypatch.setattr(stream, "Process", Held)
    assert stream.measure_uvicorn("ws", 16, 0.1).events_per_s > 0
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("event", "kind"), [(plain.CHUNK[6:].strip(), Chunk), (plain.DELTA.encode(), DeltaEvent)]
)
def test_the_events_of_uvicorn_alone_have_our_form(event: bytes, kind: type) -> None:
    assert msgspec.json.encode(msgspec.json.decode(event, type=kind)) == event
    assert EVENT["sse" if kind is Chunk else "ws"] in event


def test_clients_that_never_read_are_not_counted() -> None:
    m = stream.measure(stream.Run("sse", 4, 0.0, num_stuck=2), 0.3)
    assert m.events_per_s > 0


def test_the_command_prints_and_writes_every_case(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["--streams", "1,16", "--transports", "ws16", "--seconds", "0.2", "--rate", "100"]
    assert main(["bench", "stream", *words, "--json", str(file)]) == 0
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert [(m.transport, m.num_streams, m.rate) for m in report.cases] == [
        ("ws16", 16, 0.0),  # one stream does not fill a socket
        ("ws16", 16, 100 / 16),
    ]
    assert [(y.transport, y.num_streams) for y in report.yardsticks] == [("ws16", 16)]
    assert [(m.transport, m.num_streams) for m in report.memory] == [("ws16", 16)]


@pytest.mark.parametrize(
    "words", [["--streams", "0"], ["--slow-readers", "-1"], ["--transports", "tcp"]]
)
def test_a_wrong_flag_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "stream", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_an_event_cut_between_two_reads_is_counted_once() -> None:
    with socket.socket() as sock:
        mark = EVENT["ws"]
        data = b"x" + mark + b'1"}' + mark + b'2"}'
        for cut in range(1, len(data)):
            connection = Connection(sock, mark)
            parts = bytearray(data[:cut] + b"old"), bytearray(data[cut:])
            assert connection.count(parts[0], cut) + connection.count(parts[1], len(parts[1])) == 2
        connection = Connection(sock, mark)
        assert sum(connection.count(bytearray(data[i : i + 1]), 1) for i in range(len(data))) == 2


def test_a_token_is_timed_from_its_own_step() -> None:
    record = Record(2)
    for number, ids in enumerate(["a", "ab", "ab", "b", "ab", "ab"]):
        record.step(_output(number, tuple(f"chatcmpl-{name}" for name in ids)), float(number))
    assert record.steady_from == 4
    assert record.before == {"chatcmpl-a": 3, "chatcmpl-b": 3}
    steps = Steps(list(record.sent), [], record.steady_from, dict(record.before))
    samples = [("a", 3, 4.5), ("b", 4, 5.25), ("a", 2, 9.0)]  # the last from before
    assert list(stream._delays(steps, Counted(0, 0, 0, 1.0, 0.0, 0.0, samples))) == [0.5, 0.25]


def test_a_process_that_ends_is_reported() -> None:
    process = stream.Process(
        "streamer.loadtest.inside.stream.client", stream.stream_client.Opened(0)
    )
    with pytest.raises(StreamerError, match="client ended"):
        process.wait(Counted)
    process.close()


def test_the_table_has_a_row_a_case() -> None:
    text = io.StringIO()
    m = StreamCase("ws16", 1024, 90.0, 1e5, 1e5, 9.5, 12.0, 10.1, 120.5, 0.01, 0.1, 0.97, 0.2, 9)
    y = Yardstick("ws16", 1024, 2e5, 5.0, 0.97, 0.3)
    Console(file=text, width=80).print(stream._table(1.0, [m], [y]))
    assert "…" not in text.getvalue()
    assert "92,160" in text.getvalue()


def _output(number: int, ids: tuple[str, ...]) -> StepOutput:
    return StepOutput(
        number=number,
        request_ids=ids,
        choices=(0,) * len(ids),
        tokens=(1,) * len(ids),
        logprobs={},
        finishes=(),
        notices=(),
        stats=StepStats(),
    )

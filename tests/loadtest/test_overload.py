"""Overload: what counts as a refusal and as recovered, and a short run against a server."""

from __future__ import annotations

import re

import pytest

from streamer.cli import main
from streamer.loadtest import overload
from streamer.loadtest.overload import Found, Outcome, fault, rate_of, recovery, rows, spans
from streamer.loadtest.sse import Head

BODY = b'{"error":{"message":"m","type":"server_error","code":"server_overloaded"}}'


@pytest.mark.parametrize(
    ("status", "head", "body", "says"),
    [
        (503, b"\r\nretry-after: 2", BODY, ""),
        (429, b"\r\nRetry-After: 1\r\nx: y", BODY, ""),
        (500, b"\r\nretry-after: 2", BODY, "status 500"),
        (503, b"", BODY, "retry-after b''"),
        (503, b"\r\nretry-after: 0", BODY, "retry-after b'0'"),
        (503, b"\r\nretry-after: soon", BODY, "retry-after b'soon'"),
        (503, b"\r\nretry-after: 2", b"Service Unavailable", "whose body is no error"),
        (503, b"\r\nretry-after: 2", b'{"error":{"message":"m"}}', "whose body is no error"),
    ],
)
def test_a_refusal_has_a_wait_and_an_error(
    status: int, head: bytes, body: bytes, says: str
) -> None:
    found = fault(Head(status, (b"http/1.1 %d x" % status + head).lower()), body)
    assert says in found
    assert bool(found) == bool(says)


def test_rates_are_of_answers_that_ended_in_time() -> None:
    outcomes = [Outcome("answered", i, i + 0.5) for i in range(10)]
    outcomes += [Outcome("refused", i, i + 0.1) for i in range(10)]
    assert rate_of(outcomes, 2.0, 7.0) == 1.0
    assert spans(0.0, 25.0) == [(0.0, 12.5), (12.5, 25.0)]


def test_the_server_has_recovered_from_the_first_request_after_which_all_are_fast() -> None:
    fast = [Outcome("answered", at, at + 0.1) for at in (10.0, 11.0, 12.0, 13.0)]
    assert recovery(fast, 10.0, 0.2) == 0.0
    assert recovery([*fast, Outcome("refused", 11.5, 11.6)], 10.0, 0.2) == 2.0
    assert recovery([*fast, Outcome("answered", 10.5, 11.5)], 10.0, 0.2) == 1.0
    assert recovery([*fast, Outcome("wrong", 13.5, 13.6)], 10.0, 0.2) is None


def test_every_goal_may_be_missed() -> None:
    good = Found(10.0, 0.95, 0.92, 100, 0.0, 1.0, 80, (0.001, 0.04), [], 1.0)
    assert good.missed == []
    bad = Found(10.0, 0.85, 0.5, 100, 0.0, 1.0, 80, (0.001, 0.06), ["status 500"], None)
    assert len(bad.missed) == 4
    assert ["recovers in, s", "not", "5"] in rows(bad)


def test_a_server_at_ten_times_its_rate_answers_or_refuses_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "AFTER_S", 1.0)
    monkeypatch.setattr(overload, "WARMUP_S", 0.3)
    serve = overload.SERVE.replace("--max-num-seqs 8", "--max-num-seqs 2 --max-wait-s 0.3")
    flags = ["--seconds", "1", "--best-seconds", "0.7", "--tokens", "20", "--clients", "4"]
    code = main(["loadtest", "overload", "--serve", serve, *flags])
    output = capsys.readouterr().out
    found = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|", output, re.MULTILINE))
    assert found["neither answered nor refused"] == "0"
    assert int(found["refused"]) > 0.5 * int(found["requests sent"]) > 10
    assert (code == 0) == ("All goals are met." in output)
    assert code in (0, 1)

"""One line a finished request, on every transport, in text and JSON, without prompts and keys."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from streamer.engine.stream import TokenStream
from streamer.errors import EngineDead
from streamer.server.telemetry.logs import JsonFormatter
from streamer.server.telemetry.metrics import Metrics
from streamer.server.telemetry.records import Finished, Record, RequestInfo
from tests.engine.helpers import end, lone_stream, make_engine, write
from tests.server.responses.test_socket import FINAL, dial, send, until
from tests.server.support.counting import CHAT, ENDLESS, sse
from tests.server.support.running import DEADLINE_S, Running
from tests.test_cli_run import server as serving

SECRET, QUESTION = "sk-very-secret-0123456789", "count to 3, dear zebra"
LOGGER = "streamer.request"


class Lines(logging.Handler):
    """The request log's records."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[Finished] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        assert isinstance(record.args[0], Finished)
        self.finished.append(record.args[0])


@pytest.fixture
def lines() -> Iterator[list[Finished]]:
    handler, logger = Lines(), logging.getLogger(LOGGER)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.finished
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("model", ["server", "bundled"])
def test_a_whole_answer(request: pytest.FixtureRequest, lines: list[Finished], model: str) -> None:
    server = request.getfixturevalue(model)
    body = {**CHAT, "max_tokens": 5, "ignore_eos": True}
    response = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    server.wait_idle()
    (line,) = lines
    assert line.id == response["id"]
    assert (line.operation, line.transport, line.model) == ("chat", "http", response["model"])
    assert line.prompt_tokens == response["usage"]["prompt_tokens"]
    assert (line.output_tokens, line.reason, line.status) == (5, "length", 200)
    assert line.queue_s is not None
    assert line.first_token_s is not None
    assert 0 <= line.queue_s <= line.first_token_s <= line.total_s
    assert line.key is line.prompt is line.error is None


def test_several_prompts_are_one_request(server: Running, lines: list[Finished]) -> None:
    body = {"prompt": ["a", "count to 4"], "n": 2, "stream": True, "max_tokens": 8}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        first, *_ = list(sse(response))
    server.wait_idle()
    (line,) = lines
    assert line.id == first.json["id"]
    assert (line.operation, line.transport, line.reason) == ("completions", "sse", "length")
    assert line.output_tokens == 8 + 8 + 5 + 5  # an end token counts


def test_a_socket_and_one_that_leaves(server: Running, lines: list[Finished]) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="count to 3")
        response = until(socket, *FINAL)[-1]["response"]
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={**CHAT, **ENDLESS, "stream": True}
    ) as chat:
        next(sse(chat))
    server.wait_idle()
    assert [(x.transport, x.reason, x.status) for x in lines] == [
        ("websocket", "stop", 200),
        ("sse", "left", 499),
    ]
    assert (lines[0].id, lines[0].operation) == (response["id"], "responses")


def test_responses_on_every_way_there_is(server: Running, lines: list[Finished]) -> None:
    for more in ({}, {"stream": True}, {"background": True}):
        body = {"input": "count to 3", **more}
        assert httpx.post(server.url + "/v1/responses", json=body).status_code == 200
        server.wait_idle()
    assert [(x.operation, x.transport, x.reason) for x in lines] == [
        ("responses", "http", "stop"),
        ("responses", "sse", "stop"),
        ("responses", "http", "stop"),
    ]


def test_the_worst_choice_names_the_reason_and_death_its_status(lines: list[Finished]) -> None:
    def record(stream: TokenStream) -> None:
        key = hashlib.sha256(SECRET.encode()).hexdigest()
        Record([stream], RequestInfo("chat", "http", "m", key), Metrics(make_engine()))

    two = lone_stream(n=2)
    record(two)
    write(two, "abc", choice=1)
    end(two)
    assert not lines  # one choice has not ended
    end(two, 1)
    dead = lone_stream()
    record(dead)
    dead.fail(EngineDead("out of luck"))
    assert [(x.reason, x.status, x.error) for x in lines] == [
        ("length", 200, None),
        ("failed", 503, "out of luck"),
    ]
    assert lines[0].key == hashlib.sha256(SECRET.encode()).hexdigest()[:12]
    assert lines[0].output_tokens == 3


def test_a_report_that_fails_does_not_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(make_engine())
    monkeypatch.setattr(metrics, "finished", None)
    stream = lone_stream()
    Record([stream], RequestInfo("chat", "http", "m", ""), metrics)
    end(stream)
    assert stream.is_finished
    assert "could not be reported" in caplog.text


def test_json_of_anything_is_one_line() -> None:
    formatter = JsonFormatter()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s and\n%d", ("x", 2), info)
    line = formatter.format(record)
    assert "\n" not in line
    body = json.loads(line)
    assert (body["message"], body["level"], body["logger"]) == ("x and\n2", "error", "a")
    assert "ValueError: two\nlines" in body["exception"]


def logged(process: subprocess.Popen[str], url: str) -> str:
    """What a server writes to standard error over a few requests, good and bad, to its end."""
    key = {"Authorization": f"Bearer {SECRET}"}
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    for headers, status in ((key, 200), ({"Authorization": f"Bearer {SECRET}x"}, 401)):
        response = httpx.post(url + "/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == status
    from websockets.sync.client import connect

    with connect(url.replace("http", "ws") + "/v1/responses", additional_headers=key) as socket:
        socket.send(json.dumps({"type": "response.create", "input": QUESTION}))
        while json.loads(socket.recv(timeout=DEADLINE_S))["type"] not in FINAL:
            pass
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr is not None
    return process.stderr.read()


@pytest.mark.parametrize("asked", [False, True])
def test_json_lines_of_a_process_have_no_key_and_no_prompt_by_default(asked: bool) -> None:
    words: list[Any] = ["fake", "--api-key", SECRET, "--log-format", "json", "--log-level", "debug"]
    with serving(*words, *(["--log-prompts"] if asked else [])) as (process, url, _):
        output = logged(process, url)
    bodies = [json.loads(line) for line in output.splitlines()]
    finished = [b for b in bodies if b["logger"] == LOGGER]
    assert [(b["transport"], b["status"], b["reason"]) for b in finished] == [
        ("http", 200, "stop"),
        ("websocket", 200, "stop"),
    ]
    assert {b["key"] for b in finished} == {hashlib.sha256(SECRET.encode()).hexdigest()[:12]}
    assert all(b["message"] == "finished" and b["level"] == "info" for b in finished)
    assert SECRET not in output
    assert ("zebra" in output) is asked
    if asked:
        assert all(QUESTION in b["prompt"][0] for b in finished)


def test_text_lines_of_a_process() -> None:
    with serving("fake", "--api-key", SECRET) as (process, url, _):
        output = logged(process, url)
    lines = [line for line in output.splitlines() if LOGGER in line]
    assert len(lines) == 2
    assert all("reason=stop status=200" in line and "total_s=0." in line for line in lines)
    assert SECRET not in output
    assert "zebra" not in output

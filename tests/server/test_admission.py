"""Limits of single keys: the rules on a clock that stands still, then on the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from websockets.sync.client import connect

from streamer.config import Config
from streamer.engine.stream import TokenStream
from streamer.errors import InvalidRequest, RateLimited
from streamer.server import admission
from streamer.server.admission import Admission, deadline_of, digest, duration
from tests.engine.helpers import end, lone_stream, write
from tests.server.support.counting import CHAT, ENDLESS, sse
from tests.server.support.running import BUNDLED, Running

KEY, OTHER = "key-of-ours", "key-of-theirs"
ME, THEM = digest(KEY), digest(OTHER)
PROMPT = (1, 2, 3)


class Desk:
    """An Admission with a clock that the test moves."""

    def __init__(self, **limits: Any) -> None:
        self.now = 1000.0
        config = Config(api_key=(KEY, OTHER), **limits)
        self.admission = Admission(config, lambda: self.now)

    def ask(self, tenant: str = ME) -> None:
        self.admission.enter(tenant)

    def refused(self) -> float:
        """The seconds to wait, checked: refused just before they are over, accepted then."""
        with pytest.raises(RateLimited) as caught:
            self.ask()
        wait_s = caught.value.retry_after_s
        assert caught.value.status == 429
        assert KEY not in caught.value.message
        self.now += wait_s - 0.01
        with pytest.raises(RateLimited):
            self.ask()
        self.now += 0.01
        self.ask()
        return wait_s

    def submit(
        self, prompt: tuple[int, ...] = PROMPT, tenant: str = ME, **params: Any
    ) -> TokenStream:
        """A request up to its stream; lone streams have prompts of three tokens."""
        self.ask(tenant)
        self.admission.accept(tenant, [prompt])
        stream = lone_stream(**params)
        self.admission.follow(tenant, stream)
        return stream

    def left(self, tenant: str = ME) -> dict[str, str]:
        headers = self.admission.headers(tenant)
        return {k.decode().removeprefix("x-ratelimit-"): v.decode() for k, v in headers}


# ------------------------------------------------------------ requests


def test_requests_run_out_and_come_back_evenly() -> None:
    desk = Desk(max_requests_per_minute=3)
    for _ in range(3):
        desk.ask()
    assert desk.refused() == pytest.approx(20.0)
    assert desk.refused() == pytest.approx(20.0)
    desk.now += 3600
    for _ in range(3):  # quota unused in an hour is not saved up
        desk.ask()
    assert desk.refused() == pytest.approx(20.0)


def test_each_key_has_its_own_and_no_key_no_limit() -> None:
    desk = Desk(max_requests_per_minute=1)
    desk.ask()
    desk.ask(THEM)
    with pytest.raises(RateLimited):
        desk.ask(THEM)
    free = Admission(Config(api_key=(KEY,), max_requests_per_minute=0))
    for _ in range(20_000):
        free.enter(ME)
    assert free.headers(ME) == []


def test_with_keys_there_are_limits_where_none_is_set() -> None:
    desk = Desk()
    for _ in range(12_000):
        desk.ask()
    assert desk.refused() == pytest.approx(60 / 12_000, abs=0.02)
    assert desk.admission.max_sockets(ME) == 64
    for _ in range(1024):
        desk.admission.follow(THEM, lone_stream())
    with pytest.raises(RateLimited, match="1024 streams"):
        desk.ask(THEM)
    assert Admission(Config()).headers("") == []


def test_a_key_names_no_priority_that_runs_before_its_own() -> None:
    desk = Desk(priority=1, key_limits={OTHER: {"priority": -5}})
    priority = desk.admission.priority
    assert [priority(ME), priority(ME, 1), priority(ME, 9), priority(THEM)] == [1, 1, 9, -5]
    for tenant, requested in ((ME, 0), (ME, -(1 << 31)), (THEM, -6)):
        with pytest.raises(InvalidRequest, match="would run before others") as caught:
            priority(tenant, requested)
        assert caught.value.param == "priority"


def test_without_keys_callers_may_only_lower_their_priority() -> None:
    desk = Admission(Config())
    assert [desk.priority(""), desk.priority("", 5)] == [0, 5]
    with pytest.raises(InvalidRequest):
        desk.priority("", -1)


@pytest.mark.parametrize(
    ("headers", "is_whole", "seconds"),
    [
        ({}, True, None),
        ({"x-request-timeout": "15"}, False, 15.0),
        ({"x-request-timeout": "1e9"}, False, 86_400.0),
        ({"x-stainless-read-timeout": "600"}, True, 601.0),  # openai for Python, which ends first
        ({"x-stainless-read-timeout": "1e9"}, True, 86_400.0),
        ({"x-stainless-timeout": "60", "x-request-timeout": "2.5"}, True, 2.5),  # for JS
        ({"x-stainless-timeout": "60"}, False, None),  # of a stream: until the next byte
        ({"x-stainless-timeout": "NaN"}, True, None),
    ],
)
def test_deadlines_are_what_clients_say(
    headers: dict[str, str], is_whole: bool, seconds: float | None
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert deadline_of({"type": "http", "headers": raw}, is_whole=is_whole) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_deadline_that_is_none_is_refused(text: str) -> None:
    scope = {"type": "http", "headers": [(b"x-request-timeout", text.encode())]}
    with pytest.raises(InvalidRequest, match="seconds above 0") as caught:
        deadline_of(scope, is_whole=True)
    assert caught.value.param == "x-request-timeout"


def test_without_keys_all_callers_share_the_limit() -> None:
    desk = Admission(Config(max_requests_per_minute=1), lambda: 0.0)
    desk.enter("")
    with pytest.raises(RateLimited):
        desk.enter("")


def test_what_is_refused_costs_nothing() -> None:
    desk = Desk(max_requests_per_minute=2, max_tokens_per_minute=60)
    desk.submit()
    desk.ask()
    with pytest.raises(RateLimited):
        desk.admission.accept(ME, [(1,) * 60])
    assert desk.left()["remaining-requests"] == "1"
    assert desk.left()["remaining-tokens"] == "57"


# ------------------------------------------------------------ tokens


def test_prompts_are_taken_when_accepted_and_output_as_it_comes() -> None:
    desk = Desk(max_tokens_per_minute=600)
    stream = desk.submit()
    assert desk.left()["remaining-tokens"] == "597"
    write(stream, "x" * 100)
    assert desk.left()["remaining-tokens"] == "497"
    desk.now += 2.0  # 20 tokens back, 50 more drawn
    write(stream, "x" * 50)
    assert desk.left()["remaining-tokens"] == "467"
    write(stream, "x" * 7)
    end(stream)
    assert desk.left()["remaining-tokens"] == "460"
    assert desk.left()["reset-tokens"] == "14s"
    desk.now += 100.0
    assert desk.left()["remaining-tokens"] == "600"


def test_a_beam_search_takes_the_tokens_of_all_its_hypotheses() -> None:
    desk = Desk(max_tokens_per_minute=6000)
    stream = desk.submit(n=2, use_beam_search=True, beam_width=16)
    for choice in range(2):
        write(stream, "x" * 10, choice)
    assert desk.left()["remaining-tokens"] == str(6000 - 3 - 160)
    for choice in range(2):
        end(stream, choice=choice)
    assert desk.left()["remaining-tokens"] == str(6000 - 3 - 160)


def test_a_stream_at_the_rate_of_the_limit_never_runs_out() -> None:
    desk = Desk(max_tokens_per_minute=600)
    stream = desk.submit()
    for _ in range(600):
        desk.now += 1.0
        write(stream, "x" * 10)
    end(stream)
    assert desk.left()["remaining-tokens"] == "597"


def test_an_overdraft_is_waited_for() -> None:
    desk = Desk(max_tokens_per_minute=60)
    stream = desk.submit()
    write(stream, "x" * 100)
    assert desk.left()["remaining-tokens"] == "0"
    assert desk.refused() == pytest.approx(44.0)  # from -43 to 1


def test_a_prompt_longer_than_the_limit_is_let_in_by_a_full_bucket() -> None:
    desk = Desk(max_tokens_per_minute=60)
    desk.submit()
    with pytest.raises(RateLimited) as caught:
        desk.admission.accept(ME, [(1,) * 100])
    assert caught.value.retry_after_s == pytest.approx(3.0)
    desk.now += caught.value.retry_after_s
    desk.admission.accept(ME, [(1,) * 100])


def test_the_longest_wait_is_the_one_that_is_reported() -> None:
    desk = Desk(max_requests_per_minute=60, max_tokens_per_minute=60)
    write(desk.submit(), "x" * 100)
    for _ in range(59):
        desk.admission._accounts[ME].requests.take(1)  # type: ignore[union-attr]
    assert desk.refused() == pytest.approx(44.0)


# ------------------------------------------------------------ streams


def test_streams_are_counted_until_they_end() -> None:
    desk = Desk(max_streams_per_key=2)
    first, second = desk.submit(), desk.submit()
    with pytest.raises(RateLimited, match="2 streams at once") as caught:
        desk.ask()
    assert caught.value.retry_after_s == 1.0
    desk.submit(tenant=THEM)
    end(first)
    third = desk.submit()
    third.fail(RateLimited("the engine died"))
    desk.submit()
    end(second)
    assert len(desk.admission._accounts[ME]._live) == 1


def test_a_batch_is_as_many_streams_as_prompts() -> None:
    desk = Desk(max_streams_per_key=2)
    desk.submit()
    with pytest.raises(RateLimited):
        desk.admission.accept(ME, [PROMPT, PROMPT])
    with pytest.raises(InvalidRequest) as caught:
        desk.admission.accept(ME, [PROMPT] * 3)
    assert caught.value.param == "prompt"
    assert caught.value.status == 400


# ------------------------------------------------------------ settings


def test_a_key_may_have_limits_of_its_own() -> None:
    own = {KEY: {"max_requests_per_minute": 5, "max_streams_per_key": 0}}
    desk = Desk(max_requests_per_minute=1, max_streams_per_key=1, key_limits=own)
    for _ in range(5):
        desk.submit()
    assert desk.left()["limit-requests"] == "5"
    assert desk.left(THEM)["limit-requests"] == "1"
    desk.submit(tenant=THEM)
    with pytest.raises(RateLimited):
        desk.ask(THEM)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.02, "20ms"), (1.5, "1.5s"), (59.9999, "1m0s"), (61.25, "1m1.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ------------------------------------------------------------ on the wire

HELLO = {"prompt": "x", "max_tokens": 1}
BEARER = {"authorization": f"Bearer {KEY}"}


def post(server: Running, body: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=BEARER)


@pytest.fixture
def long_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas refilled so slowly that nothing comes back during a test."""
    monkeypatch.setattr(admission, "MINUTE_S", 1e9)


@pytest.mark.usefixtures("long_minute")
@pytest.mark.parametrize("settings", [{}, BUNDLED], ids=["fake", "bundled"])
def test_answers_of_a_limited_key_say_what_is_left(
    server_with: Any, settings: dict[str, Any]
) -> None:
    limits = {"max_requests_per_minute": 3, "max_tokens_per_minute": 500}
    server = server_with(**settings, **limits, api_key=(KEY, OTHER))
    first = post(server, {**CHAT, "max_tokens": 8, "ignore_eos": True})
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "500"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(500 - used)
    bad = post(server, {"messages": []})
    assert (bad.status_code, bad.headers["x-ratelimit-remaining-requests"]) == (400, "1")
    body = {**CHAT, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, headers=BEARER) as r:
        assert r.headers["x-ratelimit-remaining-requests"] == "0"
        assert list(sse(r))[-1].is_done
    refused = post(server, CHAT)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) > 0
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(500 - 2 * used)
    assert KEY not in refused.text
    assert httpx.get(server.url + "/v1/models", headers=BEARER).status_code == 200
    theirs = {"authorization": f"Bearer {OTHER}"}
    done = httpx.post(server.url + "/v1/completions", json=HELLO, headers=theirs)
    assert done.status_code == 200


@pytest.mark.usefixtures("long_minute")
def test_responses_and_steers_are_requests_like_others(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=100", api_key=(KEY,), max_requests_per_minute=3)
    first = post(server, {"input": "x", "max_output_tokens": 1}, "responses")
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    with connect(server.ws_url, additional_headers=BEARER, max_size=None) as socket:
        create = {"type": "response.create", "detach_s": 0, "input": "x", "ignore_eos": True}
        socket.send(json.dumps({**create, "max_output_tokens": 100_000}))
        replies = []
        while len(replies) < 2:
            event = json.loads(socket.recv())
            if event["type"] == "response.created":
                steered = event["response"]["id"]
                steer = {"type": "response.steer", "previous_response_id": steered, "input": "no"}
                socket.send(json.dumps(steer))
            if event["type"].startswith("response.steer"):
                replies.append(event)
    assert [e["type"] for e in replies] == ["response.steer.accepted", "response.steer.failed"]
    assert replies[1]["error"]["code"] == "rate_limit_exceeded"
    refused = post(server, {"input": "x"}, "responses")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_streams_at_once_on_every_transport(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=100", api_key=(KEY,), max_streams_per_key=1)
    with connect(server.ws_url, additional_headers=BEARER, max_size=None) as socket:
        create = {"type": "response.create", "detach_s": 0, "input": "x", "ignore_eos": True}
        socket.send(json.dumps({**create, "max_output_tokens": 100_000}))
        while json.loads(socket.recv())["type"] != "response.output_text.delta":
            pass
        bodies = {"chat/completions": CHAT, "completions": {"prompt": "x"}}
        for path, body in (*bodies.items(), ("responses", {"input": "x"})):
            response = post(server, {**body, **ENDLESS}, path)
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        socket.send(json.dumps({**create, "stream_id": "second"}))
        while (event := json.loads(socket.recv()))["type"] != "error":
            pass
        assert (event["status"], event["stream_id"]) == (429, "second")
        assert event["error"]["code"] == "rate_limit_exceeded"
    server.wait_idle()
    assert post(server, {**CHAT, "max_tokens": 1}).status_code == 200


@pytest.mark.usefixtures("long_minute")
def test_the_official_client_knows_it_by_its_exception(server_with: Any) -> None:
    server = server_with(api_key=(KEY,), max_tokens_per_minute=20)
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        client.completions.create(model="fake", prompt="x", max_tokens=100)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="fake", prompt="x", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 60  # more than four minutes


def test_a_full_queue_refuses_before_any_prompt_is_made(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_with(model="fake:tokens_per_s=50", max_num_seqs=1, max_queue=0)
    encoded: list[str] = []
    run = server.engine._prompts.run

    async def noted(work: Any, *args: Any) -> Any:
        encoded.append(work.__qualname__)
        return await run(work, *args)

    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={**CHAT, **ENDLESS, "stream": True}
    ) as running:
        events = sse(running)
        next(events)
        server.wait_metric('streamer_requests{state="running"}', 1)
        monkeypatch.setattr(server.engine._prompts, "run", noted)
        bodies = {"chat/completions": CHAT, "completions": HELLO, "responses": {"input": "x"}}
        for path, body in bodies.items():
            assert post(server, body, path).status_code == 503
        with connect(server.ws_url) as socket:
            socket.send(json.dumps({"type": "response.create", "input": "x"}))
            event = json.loads(socket.recv(timeout=20))
        assert (event["type"], event["error"]["code"]) == ("error", "server_overloaded")
        assert encoded == []
    server.wait_idle()
    assert post(server, {**CHAT, "max_tokens": 1}).status_code == 200
    assert len(encoded) == 1


def test_a_create_that_waits_for_its_lane_is_not_refused_by_a_full_queue(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=200", max_num_seqs=1, max_queue=0)
    with connect(server.ws_url) as socket:
        for _ in range(2):  # the second runs when the first has left the engine
            body = {"input": "x", "max_output_tokens": 20, "ignore_eos": True}
            socket.send(json.dumps({"type": "response.create", **body}))
        kinds = []
        while len(kinds) < 2:
            event = json.loads(socket.recv(timeout=20))
            if event["type"] in ("response.completed", "response.incomplete", "error"):
                kinds.append(event["type"])
    assert kinds == ["response.incomplete"] * 2


def test_priority_is_a_right_of_the_key_on_every_route(server_with: Any) -> None:
    server = server_with(api_key=(KEY,))
    bodies = {
        "chat/completions": {**CHAT, "max_tokens": 1},
        "completions": HELLO,
        "responses": {"input": "x", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        refused = post(server, {**body, "priority": -(1 << 31)}, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert post(server, {**body, "priority": 7}, path).status_code == 200


@pytest.mark.usefixtures("long_minute")
def test_tokenize_and_detokenize_are_requests_like_others(server_with: Any) -> None:
    server = server_with(api_key=(KEY,), max_requests_per_minute=2)
    for path, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [5]})):
        done = httpx.post(f"{server.url}/{path}", json=body, headers=BEARER)
        assert done.status_code == 200
        assert "x-ratelimit-remaining-requests" in done.headers
    assert httpx.post(f"{server.url}/tokenize", json=body, headers=BEARER).status_code == 429


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_ends_at_its_own_deadline(server_with: Any, is_streamed: bool) -> None:
    server = server_with(model="fake:tokens_per_s=20", max_num_seqs=1)
    url, body = server.url + "/v1/chat/completions", {**CHAT, **ENDLESS, "stream": True}
    with httpx.stream("POST", url, json=body) as running:
        next(sse(running))
        given = {"x-request-timeout": "0.2"}
        late = httpx.post(url, json={**CHAT, "stream": is_streamed}, headers=given)
        assert late.status_code == (200 if is_streamed else 504)
        assert '"code":"deadline_exceeded"' in late.text
        server.wait_metric('streamer_requests{state="waiting"}', 0)
        bad = httpx.post(url, json=CHAT, headers={"x-request-timeout": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout")

"""The guard: which Host, Origin and key reach a route, over HTTP and WebSocket, and size limits."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import math
import random
import socket
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from streamer.engine.refusals import draining
from streamer.errors import EngineDead, Forbidden, NotAuthenticated, Overloaded, StreamerError
from streamer.server import security
from streamer.server.prepared import Prepared
from streamer.server.security import Bodies, deny, split_host
from tests.server.support.counting import CHAT
from tests.server.support.running import BUNDLED, Running

SECRET = "a secret of many tokens " * 30
ROUTES = [
    ("GET", "/"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/nowhere"),
]
FOREIGN = [
    "http://evil.example",
    "null",
    "http://localhost",
    "file://",
    "http://127.0.0.1.evil.example",
    "http://[",
    "http://[::1",
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_other_hosts_reach_nothing(server: Running, method: str, path: str, host: str) -> None:
    response = httpx.request(method, server.url + path, headers={"host": host}, json=CHAT)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8000"])
def test_our_own_names_pass(server: Running, host: str) -> None:
    assert httpx.get(server.url + "/v1/models", headers={"host": host}).status_code == 200


def test_health_skips_host_but_not_origin(server: Running) -> None:
    url = server.url + "/health"
    assert httpx.get(url, headers={"host": "10.0.0.7"}).status_code == 200
    assert httpx.get(url, headers={"origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("origin", FOREIGN)
def test_other_origins_reach_nothing(server: Running, method: str, path: str, origin: str) -> None:
    response = httpx.request(method, server.url + path, headers={"origin": origin}, json=CHAT)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_our_own_origin_passes(server: Running) -> None:
    response = httpx.get(server.url + "/v1/models", headers={"origin": server.url})
    assert response.status_code == 200


@pytest.mark.parametrize("origin", [*FOREIGN, None])
def test_websocket_from_elsewhere_is_denied(
    server: Running, origin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Host": "evil.example"} if origin is None else {}
    if origin is None:
        status = _raw_upgrade(server, headers["Host"])
    else:
        with pytest.raises(InvalidStatus) as caught:
            connect(server.ws_url, origin=origin)
        assert b"forbidden" in (caught.value.response.body or b"")
        status = caught.value.response.status_code
    assert status == 403
    assert caplog.records == []  # a page that keeps trying must not fill the log


def _raw_upgrade(server: Running, host: str) -> int:
    address, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address, int(port))) as raw:
        raw.sendall(
            f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        return int(raw.recv(100).split()[1])


def test_allowed_hosts_and_origins(server_with: Any) -> None:
    origin = "https://chat.example"
    server = server_with(allowed_hosts=("api.example",), allowed_origins=(origin,))
    headers = {"host": "api.example", "origin": origin}
    response = httpx.get(server.url + "/v1/models", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["vary"] == "Origin"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
    preflight = httpx.options(
        server.url + "/v1/chat/completions",
        headers={**headers, "access-control-request-method": "POST"},
    )
    assert preflight.status_code == 204
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for asked, is_allowed in (
        ("x-stainless-lang,x-stainless-os", True),
        ("x-bad header", False),
        ("x" * 10_000, False),
    ):
        preflight = httpx.options(
            server.url + "/v1/chat/completions",
            headers={
                **headers,
                "access-control-request-method": "POST",
                "access-control-request-headers": asked,
            },
        )
        allowed = preflight.headers["access-control-allow-headers"]
        assert (asked in allowed) == is_allowed
        assert "authorization" in allowed
    with connect(server.ws_url, origin=origin):  # type: ignore[arg-type]
        pass
    other = httpx.get(server.url + "/v1/models", headers={"origin": "https://evil.example"})
    assert other.status_code == 403


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("LOCALHOST", "localhost"),
        ("localhost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("fe80::2", "fe80::2"),
        ("", ""),
        ("[::1].evil.example", ""),
        ("[::1]x:80", ""),
        ("[::1", ""),
        ("localhost:evil.example", ""),
        ("evil@localhost", ""),
        ("localhost/x", ""),
    ],
)
def test_split_host(value: str, name: str) -> None:
    assert split_host(value) == name


@pytest.mark.parametrize("error", [NotAuthenticated("no key"), Forbidden("elsewhere")])
async def test_a_handshake_is_closed_by_a_code_where_it_cannot_be_answered(
    error: StreamerError,
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await deny({"type": "websocket"}, send, error)
    assert sent == [{"type": "websocket.close", "code": 4000 + error.status}]


def test_keys(server_with: Any) -> None:
    server = server_with(api_key=("first-key", "second-key"))
    for path in ("/", "/health", "/ready"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/metrics", "/v1/models", "/nowhere"):
        assert httpx.get(server.url + path).status_code == 401
    for bad in ("Bearer nope", "Bearer", "Basic first-key", "first-key", "Bearer first-keyx"):
        response = httpx.get(server.url + "/v1/models", headers={"authorization": bad})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key"):
        good = {"authorization": f"Bearer {key}"}
        assert httpx.get(server.url + "/v1/models", headers=good).status_code == 200
        with connect(server.ws_url, additional_headers=good):
            pass
    with pytest.raises(InvalidStatus) as caught:
        connect(server.ws_url)
    assert caught.value.response.status_code == 401


def test_a_compressed_body_is_refused_by_the_name_of_its_header(server: Running) -> None:
    body = gzip.compress(b'{"prompt": "x", "max_tokens": 1}')
    url, headers = server.url + "/v1/completions", {"content-encoding": "gzip"}
    error = httpx.post(url, content=body, headers=headers).json()["error"]
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_encoding")
    plain = httpx.post(
        url, json={"prompt": "x", "max_tokens": 1}, headers={"content-encoding": "identity"}
    )
    assert plain.status_code == 200


def test_a_body_over_the_limit_is_refused_by_its_length(server: Running) -> None:
    response = httpx.post(server.url + "/v1/completions", content=b"x" * ((4 << 20) + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_over_the_limit_is_refused_while_it_comes(server: Running) -> None:
    address, port = server.url.removeprefix("http://").split(":")
    chunk = b"%x\r\n%s\r\n" % (1 << 18, b"x" * (1 << 18))
    with socket.create_connection((address, int(port))) as raw:
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}:{port}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(17):
            raw.sendall(chunk)
        assert raw.recv(100).split()[1] == b"413"


async def reading(bodies: Bodies, *parts: bytes, more: asyncio.Event) -> bytes:
    """Read a body of these parts, and a last one when `more` is set."""
    coming = list(parts)

    async def receive() -> Any:
        if coming:
            return {"type": "http.request", "body": coming.pop(0), "more_body": True}
        await more.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    return await bodies.read(Request({"type": "http", "headers": []}, receive))


async def test_of_bodies_that_never_end_the_oldest_gives_way() -> None:
    bodies, more = Bodies(max_bytes=2 * 1000), asyncio.Event()
    free = b"x" * security.FREE_BYTES
    small = asyncio.create_task(reading(bodies, b"x" * 900, more=more))  # not counted
    await asyncio.sleep(0)
    large = [asyncio.create_task(reading(bodies, free, b"y" * 900, more=more)) for _ in range(3)]
    with pytest.raises(Overloaded):
        await large[0]
    more.set()
    assert [len(await task) for task in (small, *large[1:])] == [900] + [len(free) + 900] * 2
    assert bodies._num_bytes == 0
    late = await reading(bodies, free, b"y" * 2000, more=more)  # the whole budget is there again
    assert len(late) == len(free) + 2000


@pytest.mark.parametrize("root", ["/api/", "/api"])
def test_a_root_path_may_end_with_a_slash(server_with: Any, root: str) -> None:
    server = server_with(root_path=root)
    assert httpx.get(server.url + "/v1/models").status_code == 200
    assert httpx.get(server.url + "/openapi.json").json()["servers"] == [{"url": "/api"}]
    with connect(server.ws_url):
        pass


def test_the_page_may_run_its_own_script_alone(server: Running) -> None:
    response = httpx.get(server.url)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(server.url, headers={"if-none-match": response.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_the_page_holds_nothing_that_its_policy_would_stop(server: Running) -> None:
    html = httpx.get(server.url).text
    assert html.count("<script") == html.count(' src="./assets/') == 1
    for word in ("<style", " style=", " onclick=", "http://", "https://", "javascript:"):
        assert word not in html, word


def _cached(server: Running, key: str | None, **fields: Any) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {**CHAT, "max_tokens": 1, **fields}
    body["messages"] = [{"role": "user", "content": SECRET}]
    response = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers)
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _cached_by_socket(server: Running, key: str) -> int:
    with connect(server.ws_url, additional_headers={"authorization": f"Bearer {key}"}) as socket:
        body = {"input": SECRET, "max_output_tokens": 1}
        socket.send(json.dumps({"type": "response.create", **body}))
        while True:
            event = json.loads(socket.recv(timeout=20))
            if event["type"] in ("response.completed", "response.incomplete"):
                return int(event["response"]["usage"]["input_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("settings", [{}, BUNDLED], ids=["fake", "bundled"])
def test_the_blocks_of_one_key_are_not_found_by_another(
    server_with: Any, settings: dict[str, Any]
) -> None:
    server = server_with(**settings, api_key=("first-key", "second-key"))
    assert _cached(server, "first-key") == 0
    assert _cached(server, "second-key") == 0
    assert _cached(server, "first-key") > 100
    assert _cached(server, "second-key", cache_salt="x") == 0
    assert _cached(server, "first-key", cache_salt="x") == 0
    assert _cached(server, "first-key", cache_salt="x") > 100
    assert _cached_by_socket(server, "first-key") > 100


def _seconds(client: httpx.Client, key: str, prompt: list[int]) -> float:
    """How long a prompt takes to its first token."""
    body = {"prompt": prompt, "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    began = time.perf_counter()
    client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    return time.perf_counter() - began


def _telling(client: httpx.Client) -> float:
    """How well time tells a prompt that another key has sent from one that it has not.

    The share of pairs in which the first was the faster one: 0.5 tells nothing, 1.0 all. What the
    machine does besides falls on both alike, as their order in each round is drawn.
    """
    chance, first = random.Random(5), itertools.count(300)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(NUM_ROUNDS):
        sent, other = ([next(first), *range(10, 910)] for _ in range(2))
        _seconds(client, "first-key", sent)
        for is_sent in chance.sample((True, False), 2):
            times[is_sent].append(_seconds(client, "second-key", sent if is_sent else other))
    return sum(a < b for a in times[True] for b in times[False]) / NUM_ROUNDS**2


NUM_ROUNDS = 16
# 4 standard deviations of that share where nothing is told (Mann and Whitney): by chance alone
# one run of 16,000 is further from a half.
DOUBT = 4 * math.sqrt((2 * NUM_ROUNDS + 1) / 12) / NUM_ROUNDS


def test_neither_time_nor_count_shows_a_prompt_of_another_key(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the salt both would."""
    settings = {**BUNDLED, "num_gpu_blocks_override": 1024}
    server = server_with(**settings, api_key=("first-key", "second-key"))
    assert _cached(server, "first-key") == 0
    assert _cached(server, "second-key") == 0
    with httpx.Client(base_url=server.url, timeout=20.0) as client:
        assert abs(_telling(client) - 0.5) < DOUBT
        monkeypatch.setattr(Prepared, "salt", "")
        assert _cached(server, "first-key") == 0
        assert _cached(server, "second-key") > 100
        assert _telling(client) > 0.5 + DOUBT


def test_a_socket_finds_nothing_of_another_key(server_with: Any) -> None:
    server = server_with(api_key=("first-key", "second-key"))
    assert _cached_by_socket(server, "first-key") == 0
    assert _cached_by_socket(server, "second-key") == 0
    assert _cached_by_socket(server, "first-key") > 100


def test_metrics_may_have_a_key_of_their_own(server_with: Any) -> None:
    def status(server: Running, path: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.get(server.url + path, headers=headers).status_code

    with_keys = server_with(api_key=("a", "b"), metrics_key="scraper")
    paths = ("/metrics", "/v1/models")
    found = {key: [status(with_keys, path, key) for path in paths] for key in ("scraper", "a", "")}
    assert found == {"scraper": [200, 401], "a": [401, 200], "": [401, 401]}
    without = server_with(metrics_key="scraper")
    found = {key: [status(without, path, key) for path in paths] for key in ("scraper", "")}
    assert found == {"scraper": [200, 200], "": [401, 200]}


def test_large_bodies_of_which_prompts_are_made_are_bounded_by_key() -> None:
    bodies, size = Bodies(), security.MAX_USED_BYTES // 2
    with bodies.used("many", size), bodies.used("many", size):
        with pytest.raises(Overloaded), bodies.used("many", security.FREE_BYTES + 1):
            pass
        with bodies.used("many", security.FREE_BYTES), bodies.used("few", size):
            pass
    with bodies.used("many", 2 * size):  # the whole budget is there again
        pass


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1000}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1000}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1000}),
        ("/v1/messages", {**CHAT, "max_tokens": 1000}),
    ],
)
async def test_a_request_that_waits_does_not_hold_the_bytes_of_its_body(
    server_with: Any, path: str, asked: dict[str, Any]
) -> None:
    server = server_with(model="fake:tokens_per_s=20", max_num_seqs=1, max_wait_s=0)
    many, padding = 12, 1 << 20
    body = json.dumps({**asked, "ignore_eos": True, "padding": "x" * padding}).encode()
    async with httpx.AsyncClient(timeout=60.0) as client:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        asking = [
            asyncio.create_task(client.post(server.url + path, content=body)) for _ in range(many)
        ]
        waiting = 'streamer_requests{state="waiting"}'
        await asyncio.to_thread(server.wait_metric, waiting, many - 1)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert after - before < many * padding / 2


@pytest.mark.parametrize("turns", range(6))
async def test_bodies_refused_twice_end_with_an_error_whenever_that_is(turns: int) -> None:
    """A drain, then the engine's death, while the time of a body is just up."""
    bodies, never = Bodies(), asyncio.Event()

    async def receive() -> Message:
        await never.wait()
        raise AssertionError

    bodies.refuse(draining())
    reading = asyncio.create_task(bodies.read(Request({"type": "http", "headers": []}, receive)))
    for _ in range(turns):
        await asyncio.sleep(0)
    bodies.refuse(EngineDead("the engine died"))
    with pytest.raises(StreamerError):
        await reading

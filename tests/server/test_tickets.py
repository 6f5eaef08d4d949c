"""Tickets on real sockets: for one socket, of the asking key, for a limited time; not logged."""

from __future__ import annotations

import json
import socket as sockets
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from streamer.errors import NotAuthenticated, Overloaded, RateLimited
from streamer.server import service
from streamer.server.tickets import MAX_PER_KEY, MAX_TICKETS, PREFIX, TICKET_S, Tickets
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.support.counting import CHAT
from tests.server.support.greedy import NAME, telling
from tests.server.support.running import BUNDLED, Running
from tests.test_cli_run import DEADLINE_S
from tests.test_cli_run import server as serving

JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"
KEYS = ("first-key", "second-key")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(
    url: str, key: str | None = KEYS[0], body: bytes = b"{}", client: Any = httpx
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response: httpx.Response = client.post(url + "/v1/tickets", content=body, headers=headers)
    return response


def ticket_of(server: Running, key: str | None = KEYS[0], client: Any = httpx) -> str:
    """The subprotocol that carries a new ticket of this key."""
    response = ask(server.url, key, client=client)
    assert response.status_code == 200, response.text
    return PREFIX + str(response.json()["ticket"])


def refusal(server: Running, *protocols: str, **options: Any) -> tuple[int, str]:
    """The status and the body of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as caught:
        connect(server.ws_url, subprotocols=[Subprotocol(p) for p in protocols], **options)
    response = caught.value.response
    return response.status_code, (response.body or b"").decode()


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def keyed(clock: Clock) -> Iterator[Running]:
    """A server with two keys, whose tickets expire by a clock of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "Tickets", partial(Tickets, clock))
        running = Running(model="fake:tokens_per_s=400", api_key=KEYS).start()
    yield running
    running.stop()


def test_the_answer(keyed: Running) -> None:
    response = ask(keyed.url)
    assert response.status_code == 200
    assert set(response.json()) == {"ticket", "expires_in_s"}
    assert response.json()["expires_in_s"] == TICKET_S == 30
    assert response.headers["cache-control"] == "no-store"
    assert response.json()["ticket"] != ask(keyed.url).json()["ticket"]
    for body in (b"", b"[]", b"null", b"{"):
        assert ask(keyed.url, body=body).status_code == 400


@pytest.mark.parametrize("key", [None, "third-key"])
def test_without_a_key_no_ticket_is_issued(keyed: Running, key: str | None) -> None:
    response = ask(keyed.url, key)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("protocol", [JSON, MSGPACK])
def test_it_opens_one_socket_and_is_never_selected(keyed: Running, protocol: str) -> None:
    ticket = ticket_of(keyed)
    with dial(keyed, ticket, protocol) as socket:
        assert socket.subprotocol == protocol
        assert socket.response is not None
        assert socket.response.headers.get_all("sec-websocket-protocol") == [protocol]
    status, body = refusal(keyed, ticket, protocol)
    assert status == 401
    assert ticket.removeprefix(PREFIX) not in body


def test_the_socket_streams(keyed: Running) -> None:
    with dial(keyed, JSON, ticket_of(keyed)) as socket:
        assert receive(socket)["type"] == "session.created"
        send(socket, "response.create", input="count", max_output_tokens=5, ignore_eos=True)
        assert until(socket, *FINAL)[-1]["response"]["usage"]["output_tokens"] == 5


def test_bundled_it_opens_the_socket_of_its_key(server_with: Any) -> None:
    server = server_with(**BUNDLED, api_key=KEYS)
    with dial(server, MSGPACK, ticket_of(server)) as socket:
        session = msgspec.msgpack.decode(socket.recv(timeout=DEADLINE_S))
        assert (session["type"], session["model"]) == ("session.created", NAME)
    with dial(server, JSON, ticket_of(server)) as socket:
        receive(socket)
        send(socket, "response.create", **telling(30))
        made = until(socket, *FINAL)[-1]["response"]
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in KEYS)
    url = f"{server.url}/v1/responses/{made['id']}"
    assert httpx.get(url, headers=mine).json()["output"] == made["output"]
    assert httpx.get(url, headers=theirs).status_code == 404


def test_a_ticket_expires(keyed: Running, clock: Clock) -> None:
    young, old = ticket_of(keyed), ticket_of(keyed)
    clock.now += TICKET_S - 0.001
    dial(keyed, JSON, young).close()
    clock.now += 0.001
    assert refusal(keyed, JSON, old)[0] == 401


def test_it_belongs_to_the_key_of_its_request(keyed: Running) -> None:
    with dial(keyed, JSON, ticket_of(keyed)) as mine:
        receive(mine)
        send(mine, "response.create", input="count", max_output_tokens=5, ignore_eos=True)
        made = until(mine, *FINAL)[-1]["response"]["id"]
    path = f"{keyed.url}/v1/responses/{made}"
    for key, status in zip(KEYS, (200, 404), strict=True):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(path, headers=headers).status_code == status
    for key, status in zip(KEYS, ("finished", "gone"), strict=True):
        with dial(keyed, JSON, ticket_of(keyed, key)) as socket:
            receive(socket)
            send(socket, "response.resume", response_id=made, starting_after=3)
            assert receive(socket)["status"] == status


def test_a_key_in_the_header_counts_first_and_uses_nothing_up(keyed: Running) -> None:
    ticket = ticket_of(keyed)
    wrong = {"authorization": "Bearer third-key"}
    assert refusal(keyed, JSON, ticket, additional_headers=wrong)[0] == 401
    dial(keyed, JSON, ticket).close()


def test_it_opens_nothing_but_sockets(keyed: Running) -> None:
    ticket = ticket_of(keyed)
    secret = ticket.removeprefix(PREFIX)
    for headers in ({"sec-websocket-protocol": ticket}, {"authorization": f"Bearer {secret}"}):
        url = keyed.url + "/v1/chat/completions"
        assert httpx.post(url, headers=headers, json=CHAT).status_code == 401
        assert ask(keyed.url, secret).status_code == 401
    dial(keyed, JSON, ticket).close()


def test_a_page_from_elsewhere_uses_nothing_up(keyed: Running) -> None:
    ticket = ticket_of(keyed)
    assert refusal(keyed, JSON, ticket, origin="http://evil.example")[0] == 403
    dial(keyed, JSON, ticket).close()


@pytest.mark.parametrize("protocol", ["streamer.v9.json", "streamer.ticket", "streamer.ticketx"])
def test_an_unknown_subprotocol_is_still_refused_without_the_ticket(
    keyed: Running, protocol: str
) -> None:
    ticket = ticket_of(keyed)
    with dial(keyed, ticket, protocol) as socket, pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=DEADLINE_S)
    closed = caught.value.rcvd
    assert closed is not None
    assert closed.code == 4406
    assert protocol in closed.reason
    assert ticket not in closed.reason


def test_a_standard_client_may_show_one_too(keyed: Running) -> None:
    offer = [Subprotocol(ticket_of(keyed))]
    with connect(keyed.ws_url, subprotocols=offer) as socket:
        assert socket.subprotocol is None
        send(socket, "response.create", input="count", max_output_tokens=2, ignore_eos=True)
        assert receive(socket)["type"] == "response.created"  # and no session.created


def test_a_key_has_a_limit_and_room_again_later(keyed: Running, clock: Clock) -> None:
    clock.now += TICKET_S  # no ticket is unused now
    first = ticket_of(keyed)
    clock.now += 10
    with httpx.Client() as client:
        for _ in range(MAX_PER_KEY - 1):
            ticket_of(keyed, client=client)
    full = ask(keyed.url)
    assert full.status_code == 429
    assert full.headers["retry-after"] == str(TICKET_S - 10)
    ticket_of(keyed, KEYS[1])
    dial(keyed, JSON, first).close()
    ticket_of(keyed)
    assert ask(keyed.url).status_code == 429
    clock.now += TICKET_S
    ticket_of(keyed)


def test_all_keys_together_have_a_limit() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    for i in range(MAX_TICKETS):
        last = tickets.issue(f"key {i // MAX_PER_KEY}")
    with pytest.raises(Overloaded) as caught:
        tickets.issue("another key")
    assert not isinstance(caught.value, RateLimited)
    assert caught.value.retry_after_s == TICKET_S
    assert tickets.redeem(last) == f"key {(MAX_TICKETS - 1) // MAX_PER_KEY}"
    secret = tickets.issue("another key")
    clock.now += TICKET_S
    with pytest.raises(NotAuthenticated):
        tickets.redeem(secret)


def test_where_no_keys_are_required_a_ticket_does_no_harm(server: Running) -> None:
    with httpx.Client() as client:  # these are not stored, so they have no bound
        tickets = [ticket_of(server, None, client) for _ in range(MAX_PER_KEY + 1)]
    for offered in (tickets[0], tickets[0], PREFIX + "anything"):
        with dial(server, offered, JSON) as socket:
            assert socket.subprotocol == JSON
            assert receive(socket)["type"] == "session.created"


def test_one_serves_while_the_model_loads_or_the_server_drains(server_with: Any) -> None:
    server = server_with(api_key=KEYS)
    server.on_loop(server.engine.drain(0.0))
    with dial(server, JSON, ticket_of(server)) as socket, pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=DEADLINE_S)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1013


def test_no_ticket_is_in_the_log_of_a_process() -> None:
    words = ["fake:length=5", "--api-key", KEYS[0], "--log-level", "debug"]
    with serving(*words) as (process, url, announced):
        secrets = [str(ask(url).json()["ticket"]) for _ in range(2)]
        used, _ = secrets
        offer = [Subprotocol(JSON), Subprotocol(PREFIX + used)]
        with connect(url.replace("http", "ws") + "/v1/responses", subprotocols=offer) as socket:
            socket.send(json.dumps({"type": "response.create", "input": "count"}))
            until(socket, *FINAL)
        with pytest.raises(InvalidStatus):
            connect(url.replace("http", "ws") + "/v1/responses", subprotocols=offer)
        host, port = url.removeprefix("http://").split(":")
        with sockets.create_connection((host, int(port))) as raw:  # no valid handshake
            head = f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            head += f"Connection: Upgrade\r\nSec-WebSocket-Protocol: {PREFIX}{secrets[1]}\r\n\r\n"
            raw.sendall(head.encode())
            assert secrets[1].encode() not in raw.recv(1000)
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        output = announced + process.stdout.read() + process.stderr.read()
    assert "streamer.request" in output
    assert not any(secret in output for secret in (*secrets, KEYS[0]))

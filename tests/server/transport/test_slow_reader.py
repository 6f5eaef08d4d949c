"""A client that never reads, its answer 1 GB: its cost to the server, and what becomes of it.

The server is a process of its own, whose resident memory is read, over the fake model with few
blocks; sixteen clients read as fast as they can beside it. Rates are measured by the benchmark.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from streamer.engine.log import LOGPROB_BYTES, TOP_BYTES
from streamer.fake.model import expected_text, expected_tokens
from tests.server.responses.test_resume import chat_of
from tests.server.responses.test_resume_everywhere import CHAT as CHAT_SSE
from tests.server.responses.test_resume_everywhere import is_last, standard
from tests.server.support.bare import JSON, MSGPACK, Bare, BareSocket, BareSse
from tests.server.support.counting import CHAT, check_counting, sse
from tests.server.support.greedy import story, telling
from tests.server.support.running import BUNDLED
from tests.test_cli_run import server as serving

DEADLINE_S = 20.0
GB_TOKENS = 790_000  # more than 1.3 KB each with twenty log probabilities
NUM_TOKENS = 2000  # of the answer that is read to its end
LARGE_TOKENS, LARGE_BYTES = 10_000, 10 << 20
KEPT_BYTES = LARGE_TOKENS * (LOGPROB_BYTES + 20 * TOP_BYTES)  # counted for late readers
BLOCK_SIZE, NUM_BLOCKS = 1024, 780  # no more than the large answer may need
NUM_FAST, FAST_TOKENS = 16, 600
CROWD = {"prompt": ["x"] * 256, "max_tokens": 200, "ignore_eos": True}
NUM_CROWDS = 4  # three that meet need all blocks, and on a busy machine they come one by one
MOST_BYTES = 32 << 20


class Server:
    """The process, seen from outside."""

    def __init__(self, pid: int, url: str) -> None:
        self.url = url
        self._status = Path(f"/proc/{pid}/status")

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and their peak."""
        found = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", self._status.read_text()))
        return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10

    def requests(self) -> dict[str, Any]:
        """The requests in the engine, by id."""
        body = httpx.get(self.url + "/v1/engine", timeout=20).json()
        return {r["request_id"]: SimpleNamespace(**r) for r in body["scheduler"]["requests"]}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Poll until `is_so` holds; each poll is a request, so there is no sleep."""
        end = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < end, f"it never came to hold: {self.requests()}"

    def states(self, *names: str) -> set[str]:
        """The states of these requests."""
        found = self.requests()
        return {found[name].status for name in names}

    def fast_ones(self) -> None:
        """Sixteen chats at once beside a crowd that needs every block, read to their ends."""
        url = self.url + "/v1/completions"
        with ThreadPoolExecutor(NUM_FAST + NUM_CROWDS) as pool:
            crowds = [
                pool.submit(httpx.post, url, json=CROWD, timeout=60) for _ in range(NUM_CROWDS)
            ]
            for text in pool.map(lambda _: self._chat(), range(NUM_FAST)):
                assert text == expected_text(FAST_TOKENS)
            assert {crowd.result().status_code for crowd in crowds} == {200}

    def _chat(self) -> str:
        body = {**CHAT, "max_tokens": FAST_TOKENS, "ignore_eos": True, "stream": True}
        url = self.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            return chat_of(list(sse(response)), 1)[0][0]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """With a host pool of the given GiB; warm. It retains few finished answers: those of the fast
    clients, repeated until the blocks are gone, would count as the slow client's."""
    blocks = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE))
    words = (*blocks, "--swap-space", request.param, "--max-num-seqs", "1024")
    words += ("--max-wait-s", "0")
    words += ("--retain-bytes", "4000000")
    words += ("--speculative-config", '{"method": "none"}')  # its index is memory too, bounded
    with serving("fake", *words, "--pause-timeout", "600") as (process, url, _):
        running = Server(process.pid, url)
        running.fast_ones()
        yield running


def begin(server: Server, transport: str, num_tokens: int) -> tuple[Bare, str]:
    """A client that has read the id of its answer, and no more."""
    body: dict[str, Any] = {"ignore_eos": True, "top_logprobs": 20, "return_token_ids": True}
    client: Bare
    if transport == CHAT_SSE:
        body |= {**CHAT, "max_tokens": num_tokens, "logprobs": True, "stream": True}
        client = BareSse(server.url, "/v1/chat/completions", body)
        client.read_until(bool)
        return client, client.events[0].json["id"]
    body |= {"input": "count", "max_output_tokens": num_tokens}
    if transport == "sse":
        client = BareSse(server.url, "/v1/responses", {**body, "stream": True})
    else:
        client = BareSocket(server.url, transport.removesuffix(" acks"))
        client.send("response.create", **body)
    client.read_until(lambda _: bool(standard(client)))
    assert standard(client)[0].kind == "response.created", client.events
    response_id = standard(client)[0].json["response"]["id"]
    if transport.endswith(" acks"):
        acknowledge(client, response_id)
    return client, response_id


def acknowledge(client: Bare, response_id: str) -> None:
    """Acknowledge all that was read."""
    assert isinstance(client, BareSocket)
    number = client.events[-1]["sequence_number"]
    client.send("response.ack", response_id=response_id, sequence_number=number)


def read_on(client: Bare, response_id: str, transport: str) -> str:
    """The whole text, acknowledged as it comes where the transport has acks."""
    while transport.endswith(" acks") and not is_last(client.events[-1]):
        acknowledge(client, response_id)
        seen = len(client.events)
        client.read_until(lambda _: len(client.events) > seen)  # noqa: B023
    client.read_until(is_last)
    if transport == CHAT_SSE:
        (text,), (ids,) = chat_of(client.events, 1)
        ends = [c["finish_reason"] for e in client.events[:-1] for c in e.json["choices"]]
        assert [end for end in ends if end] == ["length"]
    else:
        deltas = [e.json for e in standard(client) if e.kind == "response.output_text.delta"]
        text, ids = "".join(d["delta"] for d in deltas), [t for d in deltas for t in d["token_ids"]]
        final = standard(client)[-1].json["response"]
        assert final["output"][0]["content"][0]["text"] == text
    assert ids == expected_tokens(0, len(ids))
    assert len(check_counting(text)) == len(ids)
    return text


def wait_until_given_up(server: Server, *names: str) -> None:
    """Wait until all are paused, and other requests have taken all their blocks."""
    server.wait_until(lambda: server.states(*names) == {"paused"})
    while not server.states(*names) <= {"swapped", "preempted"}:
        server.fast_ones()
    for name in names:
        found = server.requests()[name]
        assert (found.sequences[0]["num_blocks"], found.is_held) == (0, True)


NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc"
)


@NEEDS_PROC
@pytest.mark.parametrize(
    ("server", "transport"),
    [("1", "sse"), ("0", CHAT_SSE), ("1", JSON + " acks"), ("0", MSGPACK)],
    indirect=["server"],
)
def test_a_client_that_never_reads(server: Server, transport: str) -> None:
    before, _ = server.memory()
    slow, slow_id = begin(server, transport, GB_TOKENS)
    back, back_id = begin(server, transport, NUM_TOKENS)
    with slow, back:
        wait_until_given_up(server, slow_id, back_id)
        grown = server.memory()[1] - before
        assert grown < MOST_BYTES
        assert check_counting(read_on(back, back_id, transport))[-1] == NUM_TOKENS
        assert back.num_bytes / NUM_TOKENS * GB_TOKENS > 1e9
        assert server.requests()[slow_id].is_held


@NEEDS_PROC
@pytest.mark.parametrize("server", ["1"], indirect=True)
def test_a_large_answer_is_read_to_its_end_after_all(server: Server) -> None:
    before, _ = server.memory()
    client, chat_id = begin(server, CHAT_SSE, LARGE_TOKENS)
    with client:
        wait_until_given_up(server, chat_id)
        peak = server.memory()[1]  # with what the crowd left, more on a busy machine
        assert peak - before < MOST_BYTES
        assert check_counting(read_on(client, chat_id, CHAT_SSE))[-1] == LARGE_TOKENS
    assert client.num_bytes > LARGE_BYTES
    # The log, which takes two thirds of that, and less than one copy of what was sent.
    assert server.memory()[1] - peak < KEPT_BYTES


@pytest.mark.parametrize("transport", ["sse", MSGPACK])
def test_bundled_a_paused_answer_gives_up_its_blocks_and_is_what_it_would_have_been(
    server_with: Any, transport: str
) -> None:
    server = server_with(**BUNDLED, stream_window=32)
    expected = story(server, 400)
    body = telling(400, top_logprobs=20, return_token_ids=True)
    if transport == "sse":
        client: Bare = BareSse(server.url, "/v1/responses", {**body, "stream": True})
    else:
        client = BareSocket(server.url, transport)
        client.send("response.create", **body)
    with client:
        client.read_until(lambda _: bool(standard(client)))
        server.wait_metric('streamer_requests{state="paused"}', 1)
        crowd = {"prompt": [5] * 900, "max_tokens": 60, "ignore_eos": True}  # 60 of 64 blocks
        others = httpx.post(server.url + "/v1/completions", json=crowd, timeout=60)
        assert others.json()["usage"]["completion_tokens"] == 60
        assert server.metric('streamer_preemptions_total{kind="swap"}') == 1
        assert server.metric('streamer_requests{state="swapped"}') == 1
        client.read_until(is_last)
    deltas = [e.json for e in standard(client) if e.kind == "response.output_text.delta"]
    assert "".join(d["delta"] for d in deltas) == expected
    assert sum(len(d["token_ids"]) for d in deltas) == 400

"""A client that never reads, its answer 1 GB: what it costs the server, and what becomes of it.

A server in a process of its own, whose resident memory is read, over the fake model with few
blocks; sixteen clients that read as fast as they can beside it. Rates are the benchmark's.
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

from streamer.bench.fake import expected_text
from tests.server.bare import JSON, MSGPACK, Bare, BareSocket, BareSse
from tests.server.counting import CHAT, check_counting, sse
from tests.server.test_resume import chat_of
from tests.server.test_resume_everywhere import is_last, standard
from tests.test_cli_run import server as serving

DEADLINE_S = 20.0
GB_TOKENS = 600_000  # nearly 2 KB each with twenty log probabilities
NUM_TOKENS = 2000  # of the answer that is read after all
BLOCK_SIZE, NUM_BLOCKS = 1024, 590  # no more than the large answer might need
NUM_FAST, FAST_TOKENS = 16, 600
CROWD = {"prompt": ["x"] * 256, "max_tokens": 50, "ignore_eos": True}  # thrice: want every block
MOST_BYTES = 32 << 20


class Server:
    """The process, seen from outside."""

    def __init__(self, pid: int, url: str) -> None:
        self.url = url
        self._status = Path(f"/proc/{pid}/status")

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and the most there ever were."""
        found = dict(re.findall(r"(VmRSS|VmHWM):\s*(\d+) kB", self._status.read_text()))
        return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10

    def requests(self) -> dict[str, Any]:
        """Those in the engine, by id."""
        body = httpx.get(self.url + "/v1/engine", timeout=20).json()
        return {r["request_id"]: SimpleNamespace(**r) for r in body["scheduler"]["requests"]}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Ask until it holds; the answers are the pace."""
        end = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < end, f"it never came to hold: {self.requests()}"

    def states(self, *names: str) -> set[str]:
        """Where these requests are."""
        found = self.requests()
        return {found[name].status for name in names}

    def fast_ones(self) -> None:
        """Sixteen chats at once beside a crowd that wants every block, read to their ends."""
        url = self.url + "/v1/completions"
        with ThreadPoolExecutor(NUM_FAST + 3) as pool:
            crowds = [pool.submit(httpx.post, url, json=CROWD, timeout=60) for _ in range(3)]
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
    """With a host pool of so many GiB; warm."""
    blocks = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE))
    words = (*blocks, "--swap-space", request.param, "--max-num-seqs", "1024")
    with serving("fake", *words, "--pause-timeout", "600") as (process, url, _):
        running = Server(process.pid, url)
        running.fast_ones()
        yield running


def begin(server: Server, transport: str, num_tokens: int) -> tuple[Bare, str]:
    """A client that has read the name of its answer, and no more."""
    body = {"input": "count", "max_output_tokens": num_tokens, "ignore_eos": True}
    body |= {"top_logprobs": 20, "return_token_ids": True}
    client: Bare
    if transport == "sse":
        client = BareSse(server.url, "/v1/responses", {**body, "stream": True})
    else:
        client = BareSocket(server.url, transport.removesuffix(" acks"))
        client.say("response.create", **body)
    client.read_until(lambda _: bool(standard(client)))
    assert standard(client)[0].kind == "response.created", client.events
    response_id = standard(client)[0].json["response"]["id"]
    if transport.endswith(" acks"):
        acknowledge(client, response_id)
    return client, response_id


def acknowledge(client: Bare, response_id: str) -> None:
    """All that was read."""
    assert isinstance(client, BareSocket)
    number = client.events[-1]["sequence_number"]
    client.say("response.ack", response_id=response_id, sequence_number=number)


def read_on(client: Bare, response_id: str, transport: str) -> str:
    """The text up to the last event, acknowledged as it comes where that is the way."""
    while transport.endswith(" acks") and not is_last(client.events[-1]):
        acknowledge(client, response_id)
        seen = len(client.events)
        client.read_until(lambda _: len(client.events) > seen)  # noqa: B023
    client.read_until(is_last)
    deltas = [e.json for e in standard(client) if e.kind == "response.output_text.delta"]
    assert sum(len(d["token_ids"]) for d in deltas) == NUM_TOKENS
    return "".join(d["delta"] for d in deltas)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("server", "transport"),
    [("1", "sse"), ("0", JSON), ("1", JSON + " acks"), ("0", MSGPACK)],
    indirect=["server"],
)
def test_a_client_that_never_reads(server: Server, transport: str) -> None:
    before, _ = server.memory()
    slow, slow_id = begin(server, transport, GB_TOKENS)
    back, back_id = begin(server, transport, NUM_TOKENS)
    names = slow_id, back_id
    with slow, back:
        server.wait_until(lambda: server.states(*names) == {"paused"})
        while not server.states(*names) <= {"swapped", "preempted"}:
            server.fast_ones()
        for name in names:
            found = server.requests()[name]
            assert (found.sequences[0]["num_blocks"], found.is_held) == (0, True)
        grown = server.memory()[1] - before
        assert grown < MOST_BYTES
        text = read_on(back, back_id, transport)
        assert check_counting(text)[-1] == NUM_TOKENS
        final = standard(back)[-1].json["response"]
        assert final["output"][0]["content"][0]["text"] == text
        assert back.num_bytes / NUM_TOKENS * GB_TOKENS > 1e9
        assert server.requests()[slow_id].is_held

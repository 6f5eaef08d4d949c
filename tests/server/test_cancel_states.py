"""Cancel in every way, in every state of a request that can be seen from outside.

The ways: `cancel(id)`, `response.cancel`, closing an SSE connection, closing a socket with
`--detach-timeout 0`. Each ends the request, and frees all its blocks in both pools. A gate in
front of the fake model stops a prefill, or the copies of a swap, until the cancel has come.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import httpx
import msgspec
import pytest

from streamer.config import SpeculativeConfig
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Facts, FinishReason, Plan, StepResult
from streamer.core.sampling import SamplingParams
from streamer.core.sizes import ModelInfo
from streamer.engine.core import InFlight, Owner, Runner
from streamer.engine.engine import AsyncEngine, GenerateRequest, TokenStream
from tests.server.responses.test_socket import dial, receive, send
from tests.server.support.running import BUNDLED, DEADLINE_S, Running

PROMPT_TOKENS = 300
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True}
WAYS = ("cancel(id)", "response.cancel", "closing SSE", "closing the socket")
# State, and GiB of host pool: without a host pool a preempted request is recomputed.
STATES = {
    "waiting": 0.25,
    "prefilling": 0.25,
    "decoding": 0.25,
    "paused": 0.25,
    "swapping": 0.25,
    "swapped": 0.25,
    "preempted": 0.0,
}


ROOMY = {"max_num_seqs": 4, "num_gpu_blocks_override": 72}
SERVERS: dict[str, dict[str, Any]] = {
    "fake": {"model": "fake:tokens_per_s=200"},
    "bundled": {**BUNDLED, "num_gpu_blocks_override": 40},
    "features": {**BUNDLED, **ROOMY, "speculative_config": SpeculativeConfig(method="suffix")},
}
# Of a request; its prompt, one letter over and over, is what speculation goes on with.
FEATURES: dict[str, dict[str, Any]] = {
    "speculation": {},
    "choices": {"n": 2},
    "beams": {"use_beam_search": True, "beam_width": 2},
    "grammar": {"structured_outputs": {"regex": "[a-z ]{900}"}},
}


class Gate:
    """A runner whose prefills or swap copies stop while it is closed."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._is_open = threading.Event()
        self._is_open.set()
        self._stops = ""
        self._copies_done = 0

    @property
    def depth(self) -> int:
        return self._inner.depth

    def close_for(self, what: str) -> None:
        """Stop every prefill after its first chunk ("prefill"), or all swaps ("copies")."""
        self._stops = what
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def constrain(self, grammars: Grammars) -> None:
        self._inner.constrain(grammars)

    def reset(self, launched: int) -> None:
        self._inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        in_flight, gate = self._inner.launch(plan), self
        is_prefill = any(chunk.start > 0 for chunk in plan.chunks)

        class Held:
            def collect(self) -> StepResult:
                if is_prefill and gate._stops == "prefill":
                    gate._is_open.wait(DEADLINE_S)
                elif not plan.num_rows:  # it waits for copies, and looks for commands meanwhile
                    gate._is_open.wait(0.005)
                return in_flight.collect()

        return Held()

    def facts(self) -> Facts:
        facts = self._inner.facts()
        if self._is_open.is_set() or self._stops != "copies":
            self._copies_done = facts.copies_done
        return msgspec.structs.replace(facts, copies_done=self._copies_done)

    def close(self) -> None:
        self._inner.close()


class Gated(Running):
    """A server over the gate; a cancel that reached the engine opens it."""

    gate: Gate

    def build(self) -> AsyncEngine:
        engine = super().build()
        load, cancel = engine._load, engine.cancel

        def load_gated(owner: Owner) -> tuple[Runner, ModelInfo]:
            runner, info = load(owner)
            self.gate = Gate(runner)
            return self.gate, info

        def cancel_and_open(request_id: str) -> None:
            cancel(request_id)
            self.gate.open()

        engine._load = load_gated
        engine.cancel = cancel_and_open  # type: ignore[method-assign]
        return engine


class Client(Protocol):
    """A client whose request is to be cancelled."""

    def read(self) -> None: ...
    def cancel(self) -> None: ...


class OverSse:
    """A chat over SSE, ended by closing the connection or by the engine's own cancel."""

    def __init__(
        self, server: Running, exits: contextlib.ExitStack, is_closing: bool, **fields: Any
    ) -> None:
        self._server, self._is_closing, self._exits = server, is_closing, contextlib.ExitStack()
        exits.enter_context(self._exits)
        body = {"stream": True, **LONG, "prompt": "x" * PROMPT_TOKENS, **fields}
        client = self._exits.enter_context(httpx.Client(timeout=20))
        response = self._exits.enter_context(
            client.stream("POST", server.url + "/v1/completions", json=body)
        )
        assert response.status_code == 200
        self._lines = response.iter_lines()

    def read(self) -> None:
        next(line for line in self._lines if '"text":' in line)

    def cancel(self) -> None:
        if self._is_closing:
            self._exits.close()
        else:
            request_id = subject(self._server).request_id
            self._server.on_loop(run(self._server.engine.cancel, request_id))


class OverSocket:
    """A response over WebSocket, ended by an event or by closing the socket."""

    def __init__(self, server: Running, exits: contextlib.ExitStack, is_closing: bool) -> None:
        self._is_closing = is_closing
        self._socket = exits.enter_context(dial(server, "streamer.v1.json"))
        receive(self._socket)
        send(
            self._socket,
            "response.create",
            input="x" * PROMPT_TOKENS,
            max_output_tokens=LONG["max_tokens"],
        )
        while (event := receive(self._socket))["type"] != "response.created":
            pass
        self._response_id = event["response"]["id"]

    def read(self) -> None:
        while receive(self._socket)["type"] != "response.output_text.delta":
            pass

    def cancel(self) -> None:
        if self._is_closing:
            self._socket.close()
        else:
            send(self._socket, "response.cancel", response_id=self._response_id)


async def run(call: Any, *args: Any) -> Any:
    """A plain call, on the server's loop."""
    return call(*args)


def live(server: Running) -> list[TokenStream]:
    streams: list[TokenStream] = server.on_loop(run(server.engine._streams.live))
    return streams


def subject(server: Running) -> TokenStream:
    """The client's request: its prompt has the 300 tokens, and what a template adds."""
    (stream,) = (s for s in live(server) if PROMPT_TOKENS <= s.num_prompt_tokens < 400)
    return stream


def crowd(server: Running, num_tokens: int) -> TokenStream:
    """Another request, which runs until it is cancelled."""
    request = GenerateRequest(
        prompt=(65,) * num_tokens,
        params=SamplingParams(max_tokens=100, ignore_eos=True),
        detach_s=None,
    )
    stream: TokenStream = server.on_loop(run(server.engine.submit, request))
    return stream


@pytest.fixture(scope="module")
def pressed() -> Iterator[Callable[[str, float], Gated]]:
    """Servers with few rows and blocks of 16 tokens, 16 tokens a step; fakes do 200 tokens/s."""
    started: dict[tuple[str, float], Gated] = {}

    def get(model: str, swap_space: float) -> Gated:
        key = model, swap_space
        if key not in started:
            sizes = {"max_num_seqs": 2, "num_gpu_blocks_override": 40, **SERVERS[model]}
            started[key] = Gated(
                **sizes,
                max_num_batched_tokens=16,
                swap_space=swap_space,
                detach_timeout=0.0,
                stream_window=0,
                enable_prefix_caching=False,  # every prefill has a second chunk
            )
            started[key].start()
        return started[key]

    yield get
    for server in started.values():
        server.stop()


def reach(server: Gated, state: str, client: Client) -> list[TokenStream]:
    """Bring the client's request into the state and check it; returns the other requests."""
    requests = 'streamer_requests{{state="{}"}}'.format
    stream = subject(server)
    if state == "waiting":
        server.wait_metric(requests("waiting"), 1)
        assert not stream.is_started
        return []
    if state == "prefilling":
        wait_until(server, lambda: stream.is_started, "not started")
        server.wait_metric(requests("running"), 1)
        assert stream.num_output_tokens == 0
        return []
    client.read()
    if state == "decoding":
        assert stream.num_output_tokens > 0
        server.wait_metric(requests("running"), 1)
        return []
    server.on_loop(run(server.engine.pause, stream.request_id))
    server.wait_metric(requests("paused"), 1)
    if state == "paused":
        return []
    if state == "swapping":
        server.gate.close_for("copies")
    num_blocks = server.config.num_gpu_blocks_override or 0
    others = [crowd(server, num_blocks * 25 // 2)]  # more than is free
    server.wait_metric(requests("swapped" if state == "swapping" else state), 1)
    if state == "swapped":  # its copies are done: the request that took its blocks runs
        server.wait_metric(requests("running"), 1)
    return others


def wait_until(server: Running, is_true: Callable[[], bool], says: str) -> None:
    """Wait until `is_true` holds, without a reader of the stream, which would keep it alive."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        server.metric("streamer_steps_total")  # each poll is a request, so there is no sleep
        assert time.monotonic() < end, says


BY_FAKE = [("fake", state, way) for state in STATES for way in WAYS]
BY_BUNDLED = [("bundled", state, "closing SSE") for state in [*STATES][2:]]  # those with KV


def ended(server: Gated, others: list[TokenStream], stream: TokenStream) -> None:
    """Check that the cancelled request has left nothing, once the others are cancelled, too."""
    assert {f.reason for f in stream.finishes if f} == {FinishReason.CANCELLED}
    for other in others:
        server.on_loop(run(server.engine.cancel, other.request_id))
    server.wait_idle()


@pytest.mark.parametrize(("model", "state", "way"), BY_FAKE + BY_BUNDLED)
def test_cancel(pressed: Callable[[str, float], Gated], model: str, state: str, way: str) -> None:
    server = pressed(model, STATES[state])
    others = []
    if state == "waiting":
        others = [crowd(server, 20), crowd(server, 30)]
        wait_until(server, lambda: all(o.is_started for o in others), "not started")
        server.gate.close_for("prefill")  # both rows stay taken: each of their steps is delayed
    elif state == "prefilling":
        server.gate.close_for("prefill")
    with contextlib.ExitStack() as exits:
        kind = OverSocket if way in ("response.cancel", "closing the socket") else OverSse
        client = kind(server, exits, is_closing=way.startswith("closing"))
        others += reach(server, state, client)
        stream = subject(server)
        client.cancel()
        wait_until(server, lambda: stream.is_finished, "not cancelled")
    if state in ("waiting", "prefilling"):
        assert stream.num_output_tokens == 0
    ended(server, others, stream)


@pytest.mark.parametrize("state", [*STATES][1:])
@pytest.mark.parametrize("feature", FEATURES)
def test_cancel_of_each_feature(
    pressed: Callable[[str, float], Gated], feature: str, state: str
) -> None:
    server = pressed("features", STATES[state])
    if state == "prefilling":
        server.gate.close_for("prefill")
    with contextlib.ExitStack() as exits:
        client = OverSse(server, exits, is_closing=True, **FEATURES[feature])
        others = reach(server, state, client)
        stream = subject(server)
        if feature == "speculation" and state == "decoding":
            drafts = "streamer_spec_decode_num_drafts_total"
            wait_until(server, lambda: server.metric(drafts) > 0, "nothing was proposed")
        client.cancel()
        wait_until(server, lambda: stream.is_finished, "not cancelled")
    ended(server, others, stream)

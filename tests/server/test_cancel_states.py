"""Cancel in every way, in every state of a request that can be seen from outside.

The ways: `cancel(id)`, `response.cancel`, closing an SSE connection, closing a socket with
`--detach-timeout 0`. Each ends the request, and frees all its blocks in both pools. A gate in
front of the model stops a prefill, or the copies of a swap, until the cancel has come.
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
from streamer.constraints.masks import Constraint
from streamer.core.plan import Facts, FinishReason, Plan, StepResult
from streamer.core.sampling import SamplingParams
from streamer.core.sizes import ModelInfo
from streamer.engine.core import InFlight, Owner, Runner
from streamer.engine.engine import AsyncEngine, GenerateRequest, TokenStream
from tests.server.responses.test_socket import dial, receive, send, until
from tests.server.support.running import BUNDLED, DEADLINE_S, Running

PROMPT_TOKENS = 300
CROWD = 65  # every token of the prompts of other requests
# Not ignore_eos: an end has no text to read, and the bundled model draws up to 45 in a row.
LONG: dict[str, Any] = {"max_tokens": 250, "min_tokens": 250}
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
    "features": {
        **BUNDLED,
        **ROOMY,
        # With one draft a step, 250 tokens of decodes that are slowed down take 12 s or longer.
        "speculative_config": SpeculativeConfig(method="suffix", num_speculative_tokens=1),
        "tool_call_parser": "hermes",
    },
}
DRAFTS = "streamer_spec_decode_num_drafts_total"
# Of a request; its prompt, one letter over and over, is what speculation goes on with.
FEATURES: dict[str, dict[str, Any]] = {
    "speculation": {},
    "choices": {"n": 2},
    "beams": {"use_beam_search": True, "beam_width": 2},
    "grammar": {"structured_outputs": {"regex": "[a-z ]{900}"}},
}
TEXT = {"type": "object", "properties": {"a": {"type": "string", "minLength": 900}}}
TOOL = {"type": "function", "name": "f", "parameters": {**TEXT, "required": ["a"]}}
# Of a response on a socket; a fork's and a steer's answer follow one that was begun before.
ON_SOCKETS: dict[str, dict[str, Any]] = {
    "speculation": {},
    "grammar": FEATURES["grammar"],
    "calls": {"tools": [TOOL], "tool_choice": "required"},
    "fork": {},
    "steer": {},
}


class Gate:
    """A runner whose prefills or swap copies stop while it is closed."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._is_open = threading.Event()
        self._is_open.set()
        self._stops = ""
        self.late: tuple[int, ...] = ()  # rows whose masks are not there
        self._copies_done = 0

    @property
    def depth(self) -> int:
        return self._inner.depth

    def close_for(self, what: str) -> None:
        """Stop every prefill after its first chunk ("prefill") or all swaps ("copies"); slow steps
        without a chunk down ("decode", "prefill")."""
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
                elif gate._stops in ("prefill", "decode") and not plan.chunks:
                    gate._is_open.wait(0.1)
                elif not plan.num_rows:  # it waits for copies, and looks for commands meanwhile
                    gate._is_open.wait(0.005)
                return in_flight.collect()

        return Held()

    def facts(self) -> Facts:
        facts = self._inner.facts()
        self.late = facts.late
        if self._is_open.is_set() or self._stops != "copies":
            self._copies_done = facts.copies_done
        return msgspec.structs.replace(facts, copies_done=self._copies_done)

    def close(self) -> None:
        self._inner.close()


class Gated(Running):
    """A server over the gate; a cancel that reached the engine opens it."""

    gate: Gate
    steered = ""  # its cancel opens nothing

    def build(self) -> AsyncEngine:
        engine = super().build()
        load, cancel = engine._load, engine.cancel

        def load_gated(owner: Owner) -> tuple[Runner, ModelInfo]:
            runner, info = load(owner)
            self.gate = Gate(runner)
            return self.gate, info

        def cancel_and_open(request_id: str) -> None:
            cancel(request_id)
            if request_id != self.steered:
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
    """A response over WebSocket, ended by an event or by closing the socket.

    before  called when there is nothing left to do but to begin the response
    """

    def __init__(
        self,
        server: Gated,
        exits: contextlib.ExitStack,
        is_closing: bool,
        feature: str = "",
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_closing = is_closing
        self._socket = exits.enter_context(dial(server, "streamer.v1.json"))
        receive(self._socket)
        num_tokens = LONG["max_tokens"]
        body: dict[str, Any] = {"input": "x" * PROMPT_TOKENS, "min_tokens": num_tokens}
        body |= {"max_output_tokens": num_tokens, **ON_SOCKETS.get(feature, {})}
        if feature == "fork":
            first = {**body, "min_tokens": 4, "max_output_tokens": 4}
            send(self._socket, "response.create", **first)
            name = until(self._socket, "response.incomplete")[-1]["response"]["id"]
            del body["input"]
            body |= {"previous_response_id": name, "fork": {"at": 2}}
        if feature == "steer":
            server.gate.close_for("decode")  # or what is steered has ended before it is
            send(self._socket, "response.create", **body)
            server.steered = until(self._socket, "response.created")[-1]["response"]["id"]
            self.read()
            before()
            named = {"previous_response_id": server.steered, "input": "y"}
            send(self._socket, "response.steer", **named)
        else:
            before()
            send(self._socket, "response.create", **body)
        created = until(self._socket, "response.created")[-1]
        self._response_id = created["response"]["id"]
        if feature == "fork":
            self.read()  # the text that it begins with

    def read(self) -> None:
        while not receive(self._socket)["type"].endswith(".delta"):
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
    """The client's request: the only one that is not of the crowd."""
    (stream,) = (s for s in live(server) if set(s.prompt) != {CROWD})
    return stream


def crowd(server: Running, num_tokens: int) -> TokenStream:
    """Another request, which runs until it is cancelled."""
    request = GenerateRequest(
        prompt=(CROWD,) * num_tokens,
        params=SamplingParams(max_tokens=120, ignore_eos=True),
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
    server.gate.open()
    if state == "paused":
        return []
    # "decode": what takes its blocks runs until it has been seen
    server.gate.close_for("copies" if state == "swapping" else "decode")
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
        server.gate.close_for("decode")  # both rows stay taken: each of their steps is delayed
        others = [crowd(server, 20), crowd(server, 30)]
        wait_until(server, lambda: all(o.is_started for o in others), "not started")
    elif state == "prefilling":
        server.gate.close_for("prefill")
    elif model == "bundled":
        server.gate.close_for("decode")  # or it has ended before it is paused or cancelled
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
    server.gate.close_for("prefill" if state == "prefilling" else "decode")
    num_drafts = server.metric(DRAFTS)
    with contextlib.ExitStack() as exits:
        client = OverSse(server, exits, is_closing=True, **FEATURES[feature])
        others = reach(server, state, client)
        stream = subject(server)
        if feature == "speculation" and state == "decoding":
            wait_until(server, lambda: server.metric(DRAFTS) > num_drafts, "nothing was proposed")
        client.cancel()
        wait_until(server, lambda: stream.is_finished, "not cancelled")
    ended(server, others, stream)


@pytest.mark.parametrize("way", ["response.cancel", "closing the socket"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("feature", ON_SOCKETS)
def test_cancel_on_a_socket(
    pressed: Callable[[str, float], Gated], feature: str, state: str, way: str
) -> None:
    server = pressed("features", STATES[state])
    others: list[TokenStream] = []

    def before() -> None:
        server.gate.close_for("prefill" if state == "prefilling" else "decode")
        if state == "waiting":  # a steered response leaves a row, which the last of these takes
            num_rows = server.config.max_num_seqs - (feature == "steer")
            others.extend(crowd(server, 20) for _ in range(server.config.max_num_seqs))
            wait_until(server, lambda: sum(o.is_started for o in others) >= num_rows, "not full")

    with contextlib.ExitStack() as exits:
        client = OverSocket(server, exits, way.startswith("closing"), feature, before)
        others += reach(server, state, client)
        stream = subject(server)
        client.cancel()
        wait_until(server, lambda: stream.is_finished, "not cancelled")
    ended(server, others, stream)


@pytest.mark.parametrize("way", WAYS)
def test_a_cancel_does_not_wait_for_a_mask(
    pressed: Callable[[str, float], Gated], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    server, may_fill = pressed("features", 0.0), threading.Event()
    advance = Constraint.advance

    def held(row: Constraint) -> Any:
        if threading.current_thread().name.startswith("streamer-masks"):
            assert may_fill.wait(DEADLINE_S)
        return advance(row)

    server.gate.close_for("decode")
    with contextlib.ExitStack() as exits:
        exits.callback(may_fill.set)
        if "socket" in way or way == "response.cancel":
            client: Client = OverSocket(server, exits, way.startswith("closing"), "grammar")
        else:
            client = OverSse(server, exits, way.startswith("closing"), **FEATURES["grammar"])
        client.read()
        monkeypatch.setattr(Constraint, "advance", held)
        stream = subject(server)
        wait_until(server, lambda: bool(server.gate.late), "its mask is not late")
        client.cancel()
        wait_until(server, lambda: stream.is_finished, "not cancelled")
        assert not may_fill.is_set()
    ended(server, [], stream)

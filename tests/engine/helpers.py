"""Shared by the engine's tests: an engine over the fake model, gates, streams without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Facts, Finish, FinishReason, Plan, StepOutput, StepResult
from streamer.core.sampling import SamplingParams
from streamer.core.sizes import ModelInfo
from streamer.engine.core import InFlight, Owner, Runner
from streamer.engine.engine import AsyncEngine, GenerateRequest
from streamer.engine.flow import Limits
from streamer.engine.requests import Progress
from streamer.engine.stream import Delta, TokenStream
from streamer.fake.model import FakeRunner, fake_tokenizer, load_fake

DEADLINE_S = 20.0
PROMPT = tuple(b"count, please")


class Wrapped:
    """A runner around another; tests override a method."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.plans: list[Plan] = []
        self.is_closed = False

    @property
    def depth(self) -> int:
        return self.inner.depth

    def constrain(self, grammars: Grammars) -> None:
        self.inner.constrain(grammars)

    def reset(self, launched: int) -> None:
        self.inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        self.plans.append(plan)
        return self.inner.launch(plan)

    def facts(self) -> Facts:
        return self.inner.facts()

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class Gated(Wrapped):
    """Each step waits until the test permits it."""

    def __init__(self, inner: FakeRunner) -> None:
        super().__init__(inner)
        self._gate = threading.Semaphore(0)
        self._is_open = False
        self.waits = threading.Semaphore(0)  # released whenever a step begins to wait

    def launch(self, plan: Plan) -> InFlight:
        return _Held(super().launch(plan), self)

    def allow(self, n: int = 1) -> None:
        """Permit n steps."""
        for _ in range(n):
            self._gate.release()

    def open(self) -> None:
        """Permit all steps from now on."""
        self._is_open = True
        self._gate.release()

    def wait(self) -> None:
        self.waits.release()
        if not self._is_open and not self._gate.acquire(timeout=DEADLINE_S):
            raise TimeoutError("the test never let this step go")


class _Held:
    def __init__(self, inner: InFlight, gate: Gated) -> None:
        self._inner = inner
        self._gate = gate

    def collect(self) -> StepResult:
        self._gate.wait()
        return self._inner.collect()


def make_engine(
    wrap: Callable[[FakeRunner], Runner] | None = None,
    *,
    depth: int = 0,
    tokens_per_s: float = 0.0,
    **settings: Any,
) -> AsyncEngine:
    """An engine over the fake model, not started."""
    config = Config(**{"model": "fake", "num_gpu_blocks_override": 256, **settings})

    def load(owner: Owner) -> tuple[Runner, ModelInfo]:
        runner, info = load_fake(config, depth=depth, tokens_per_s=tokens_per_s)
        return runner if wrap is None else wrap(runner), info

    return AsyncEngine(load, fake_tokenizer, config)


class GatedEngine:
    """An engine whose steps the test permits one by one."""

    def __init__(self, **settings: Any) -> None:
        self.gates: list[Gated] = []
        self.engine = make_engine(self._wrap, **settings)

    def _wrap(self, inner: FakeRunner) -> Gated:
        self.gates.append(Gated(inner))
        return self.gates[0]

    @property
    def gate(self) -> Gated:
        return self.gates[0]

    async def __aenter__(self) -> GatedEngine:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.gate.open()
        await self.engine.aclose()


def request(max_tokens: int | None = 8, **fields: Any) -> GenerateRequest:
    """A request; sampling fields go to its params."""
    known = GenerateRequest.__struct_fields__
    own = {k: fields.pop(k) for k in list(fields) if k in known}
    return GenerateRequest(
        **{"prompt": PROMPT, "params": SamplingParams(max_tokens=max_tokens, **fields), **own}
    )


class Calls:
    """Records a stream's calls to its engine."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def cancel(self, request_id: str) -> None:
        self.log.append("cancel")

    def hold(self, request_id: str, is_held: bool) -> None:
        self.log.append("pause" if is_held else "resume")


LETTERS = tuple(bytes([b]) for b in range(256))


def lone_stream(
    calls: Calls | None = None, *, request_id: str = "r", n: int = 1, window: int = 0,
    detach_s: float | None = None, pause_s: float = 60.0, linger_s: float = 30.0,
    progress: Progress | None = None, **params: Any,
) -> TokenStream:  # fmt: skip
    """A stream without an engine: tokens are bytes."""
    asked = SamplingParams(n=n, seed=5, **params)
    return TokenStream(
        GenerateRequest(prompt=(1, 2, 3), params=asked, request_id=request_id, progress=progress),
        Limits(window, detach_s, pause_s, linger_s),
        calls or Calls(),
        LETTERS,
        {},
    )


def write(stream: TokenStream, text: str, choice: int = 0) -> None:
    """Append a text, one token per byte."""
    for byte in text.encode():
        stream.draw(choice, byte, time.perf_counter())


def end(stream: TokenStream, choice: int = 0) -> Finish:
    """Finish a choice by length."""
    finish = Finish("r", choice, FinishReason.LENGTH, len(stream.token_ids(choice)))
    stream.end(finish)
    stream.wake()
    return finish


async def all_deltas(stream: TokenStream, after: int = 0) -> list[Delta]:
    """Everything that a reader gets, except notices."""
    return [d async for items in stream.read(after) for d in items if isinstance(d, Delta)]


async def until(engine: AsyncEngine, **counts: int) -> None:
    """Wait until the counts after a step are these."""
    stepped = asyncio.Event()
    original = engine.on_output

    def on_output(output: StepOutput, sent: float) -> None:
        original(output, sent)
        stepped.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "on_output", on_output)
        async with asyncio.timeout(DEADLINE_S):
            while {name: getattr(engine.stats, name) for name in counts} != counts:
                stepped.clear()
                with contextlib.suppress(TimeoutError):  # one on its way calls the original
                    await asyncio.wait_for(stepped.wait(), 0.05)


async def assert_all_back(engine: AsyncEngine) -> None:
    """No request is left, and every block of both pools is free."""
    stats = engine.stats
    await until(
        engine,
        waiting=0,
        running=0,
        paused=0,
        preempted=0,
        swapped=0,
        blocks_free=stats.blocks_total,
        host_blocks_free=stats.host_blocks_total,
    )


def reasons(stream: TokenStream) -> list[FinishReason | None]:
    return [f and f.reason for f in stream.finishes]

"""Ranks as processes: the tokens of one, through everything, and deaths that name a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from streamer import AsyncEngine, ConfigError, RankFailed, SamplingParams
from streamer.config import Config
from streamer.core.plan import Plan
from streamer.engine.engine import GenerateRequest
from streamer.kernels import ops
from streamer.model.ranks import leader, processes, runner, wire
from streamer.model.ranks.runner import load_ranked
from streamer.model.runner.cpu import CpuRunner, Done
from tests.chaos.killable import free_port
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import MIXED
from tests.model.test_speculation import (
    ASKS,
    ROOMY,
    TIGHT,
    TOKEN_BYTES,
    Answer,
    Key,
    Oracle,
    add,
    answers_of,
)

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

DEADLINE_S = 60.0
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "load_progress": False}
TOLERANCE = 1e-4


def agree(found: Answer, expected: Answer) -> bool:
    """Tokens and ends to the last one; log probabilities within the rounding of other sums."""
    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    return (found.tokens, found.finish) == (expected.tokens, expected.finish) and all(
        abs(a.logprob - b.logprob) < TOLERANCE for a, b in pairs
    )


@pytest.fixture(scope="module")
def answers(checkpoint: Any) -> dict[Key, Answer]:
    """Of one rank, alone, with room for all."""
    engine = SyncEngine(checkpoint("llama", 1), dtype="float32", token_bytes=TOKEN_BYTES, **ROOMY)
    found: dict[Key, Answer] = {}
    for i in range(len(ASKS)):
        add(engine, i, found)
        engine.run()
        found |= answers_of(engine, i)
    return found


IN_PAIRS = """
import sys
from streamer.model.ranks.worker import main
from tests.model.sync_engine import grammars_in_pairs
from tests.model.test_speculation import TOKEN_BYTES
sys.exit(main(lambda config, info: grammars_in_pairs(TOKEN_BYTES)))
"""


def test_every_kind_of_request_has_the_answers_of_one_rank(
    checkpoint: Any, answers: dict[Key, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps, recomputes, forks, grammars and verifications, in too little memory."""
    monkeypatch.setattr(processes, "PROGRAM", IN_PAIRS)
    engine = SyncEngine(
        checkpoint("llama", 1),
        speculation=Oracle(answers, 3),
        costs=MIXED,
        dtype="float32",
        token_bytes=TOKEN_BYTES,
        tensor_parallel_size=2,
        **TIGHT,
    )
    try:
        for i in range(len(ASKS)):
            add(engine, i, answers)
        engine.run()
    finally:
        engine.runner.close()
    for i in range(len(ASKS)):
        for key, answer in answers_of(engine, i).items():
            assert agree(answer, answers[key]), f"request {key}"
    assert min(engine.preemptions) > 0


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        prompt=tuple(range(5, 25)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3),
    )


def others() -> list[int]:
    """Processes of this one's other ranks."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())]
    table = subprocess.run(command, capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in table.splitlines() if "run_rank" in line]


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_rank_that_is_gone_is_a_death_that_names_it(
    monkeypatch: pytest.MonkeyPatch, signal_: signal.Signals, is_busy: bool
) -> None:
    monkeypatch.setattr(leader, "SILENT_S", 2.5)
    config = Config(model=None, tensor_parallel_size=2, **SETTINGS)
    async with asyncio.timeout(DEADLINE_S), AsyncEngine.from_config(config) as engine:
        stream = engine.submit(request(900 if is_busy else 3))
        async for _ in stream.read():
            if is_busy:
                break
        (process,) = others()
        os.kill(process, signal_)
        while not engine.is_dead:  # noqa: ASYNC110 -- an engine has no event of its death
            await asyncio.sleep(0.02)
        why = "ended with code -9" if signal_ is signal.SIGKILL else "has been silent for 2.5 s"
        cause = engine.death.__cause__ if engine.death is not None else None
        assert isinstance(cause, RankFailed)
        assert str(cause) == f"rank 1 (process {process}) {why}"
    assert not others()


async def test_the_watch_forgives_what_stopped_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine, or SIGSTOP to the whole set: no beat came, and none could."""
    monkeypatch.setattr(leader, "SILENT_S", 1.5)
    config = Config(model=None, tensor_parallel_size=2, **SETTINGS)
    async with asyncio.timeout(DEADLINE_S), AsyncEngine.from_config(config) as engine:
        (process,) = others()
        script = "sleep 2.5; kill -CONT $1; kill -CONT $2"
        waker = subprocess.Popen(  # noqa: ASYNC220 -- it wakes this process up
            ["sh", "-c", script, "sh", str(process), str(os.getpid())]
        )
        os.kill(process, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
        stream = engine.submit(request(20))
        await stream.wait()
        assert len(stream.token_ids()) == 20


async def test_a_rank_that_can_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = processes.start
    monkeypatch.setattr(
        processes, "start", lambda given: start(replace(given, model="/no/such/folder"))
    )
    config = Config(model=None, tensor_parallel_size=2, **SETTINGS)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\): .*/no/such/folder"):
            await AsyncEngine.from_config(config).__aenter__()
    assert not others()


def test_a_stop_while_the_ranks_start_ends_them_at_once(
    checkpoint: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    config = Config(model=str(checkpoint("llama")), tensor_parallel_size=2, **SETTINGS)
    began = time.monotonic()
    with pytest.raises(Stop):
        load_ranked(config, stop, lambda _: None)
    assert time.monotonic() - began < processes.END_S / 4
    assert not others()
    assert not capfd.readouterr().err


FAULTY = """
import sys
from pathlib import Path
from streamer import build
from streamer.model.runner.cpu import CpuRunner
launch = CpuRunner._launch
def faulty(self, plan):
    if plan.number == 6:
        raise MemoryError("no memory for this")
    return launch(self, plan)
CpuRunner._launch = faulty
grammars_of = build.read_tokenizer
def slow(path):
    Path({!r}).touch()
    return grammars_of(path)
build.read_tokenizer = slow
sys.exit(build.run_rank())
"""


async def test_a_step_that_fails_on_one_rank_is_computed_again_by_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of memory on another rank; then here, within a step, while the other waits in a sum.

    No request ends. Both ranks show how far they have loaded, and are ready before the engine is.
    """
    tokenizer = tmp_path / "read"
    monkeypatch.setattr(processes, "PROGRAM", FAULTY.format(str(tokenizer)))
    shown: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def bars(names: list[str], *_: object) -> Iterator[Callable[[int, int], None]]:
        assert [name[-6:] for name in names] == ["rank 0", "rank 1"]
        yield lambda index, done: shown.add((index, done))

    monkeypatch.setattr(runner, "progress_bars", bars)
    config = Config(model=None, tensor_parallel_size=2, **SETTINGS)
    async with asyncio.timeout(DEADLINE_S), AsyncEngine.from_config(config) as engine:
        assert tokenizer.exists()
        assert {(0, 1), (0, 6), (1, 6)} <= shown
        stream = engine.submit(request(60))
        await stream.wait()
        launch, faults = CpuRunner._launch, [RuntimeError("a kernel failed")]

        def faulty(self: CpuRunner, plan: Plan) -> Done:
            if faults and again.token_ids()[20:]:
                raise faults.pop()
            return launch(self, plan)

        monkeypatch.setattr(CpuRunner, "_launch", faulty)
        again = engine.submit(request(60))
        await again.wait()
        assert not faults
        assert again.token_ids() == stream.token_ids()
        assert len(again.token_ids()) == 60
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len([line for line in lines if "all is computed again" in line]) == 2


def test_models_that_can_not_be_shared_are_refused(checkpoint: Any) -> None:
    for family, count, why in (("gpt2", 2, "transformers' code"), ("llama", 3, "2 KV heads")):
        config = Config(model=str(checkpoint(family)), tensor_parallel_size=count, **SETTINGS)
        with pytest.raises(ConfigError, match=why) as refusal:
            load_ranked(config, lambda: None, lambda _: None)
        assert refusal.value.param == "tensor_parallel_size"
    assert not others()


def test_messages_are_bounded_and_end_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    channel, other = wire.Channel(ours), wire.Channel(theirs)
    channel.send(wire.Beat(7))
    assert other.receive() == wire.Beat(7)
    ours.sendall(wire.LENGTH.pack(1 << 40))
    with pytest.raises(ConnectionError, match="a message of"):
        other.receive()
    channel.close()
    with pytest.raises(ConnectionError, match="gone"):
        other.receive()
    other.close()


def test_a_rank_that_comes_again_replaces_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host was started again while the first one waited for others; a rank that is none is not
    let in, and one of another version is named."""
    secret = tmp_path / "secret"
    secret.write_text("only these hosts know this")
    config = Config(
        tensor_parallel_size=3, nnodes=3, master_addr="127.0.0.1", master_port=free_port(),
        ranks_secret_file=str(secret),
    )  # fmt: skip
    found = leader.Leader(config, lambda _: None)
    visits = [(7, 41, b""), (1, 42, wire.dialect()), (1, 43, wire.dialect()), (2, 44, b"another")]
    visitors: list[threading.Thread] = []
    kept: list[socket.socket] = []

    def come(_: int) -> None:
        if visits and not any(thread.is_alive() for thread in visitors):
            visitors.append(threading.Thread(target=visit, args=visits.pop(0)))
            visitors[-1].start()

    def visit(index: int, process: int, dialect: bytes) -> None:
        kept.append(socket.create_connection(("127.0.0.1", config.master_port)))
        wire.greet(kept[-1], index, secret.read_bytes())
        with contextlib.suppress(OSError):
            wire.Channel(kept[-1]).send(wire.Joined(process, "there", dialect))

    with pytest.raises(RankFailed, match=r"rank 2 .* runs another version of this program"):
        found.start(torch.device("cpu"), b"", come)
    found.close()
    for thread in visitors:
        thread.join()
    for connection in kept:
        connection.close()
    assert "rank 1 (process 42 on there) came again" in caplog.text

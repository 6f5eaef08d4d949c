"""A row whose mask is late sits out: its neighbours go on, and it draws what it would alone.

Masks are late here because of an event that a test sets; at random: test_speculation.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.constraints import filler
from streamer.constraints.filler import MaskFiller
from streamer.constraints.masks import Constraint
from streamer.core.plan import Cancel, FinishReason, Pause, Resume
from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from tests.model.sync_engine import END, SyncEngine
from tests.model.test_decoder import random_tokens
from tests.model.test_speculation import LETTERS, LONG, TOKEN_BYTES

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

P = SamplingParams
DEADLINE_S = 60.0


class Gate:
    """Masks of requests whose names begin with "slow" are not filled before `opened` is set.

    waits  how often a step waited for nothing but a mask
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.engine: SyncEngine | None = None
        self.waits = 0
        caller, advance, wait = threading.get_ident(), Constraint.advance, MaskFiller.wait_for_late

        def held(row: Constraint) -> Any:
            if threading.get_ident() != caller and self._name(row).startswith("slow"):
                assert self.opened.wait(DEADLINE_S)
            return advance(row)

        def counted(masks: MaskFiller) -> None:
            self.waits += bool(masks.late_rows())
            wait(masks)

        monkeypatch.setattr(Constraint, "advance", held)
        monkeypatch.setattr(MaskFiller, "wait_for_late", counted)

    def _name(self, row: Constraint) -> str:
        assert self.engine is not None
        owner = self.engine.scheduler.state.rows.owners[row.row]
        return owner.request.request_id if owner is not None else ""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@pytest.fixture(scope="module")
def folder(checkpoint: Any) -> Path:
    found: Path = checkpoint("llama", 1)
    return found


def engine_of(folder: Path, gate: Gate | None = None, **settings: Any) -> SyncEngine:
    given = {"max_num_seqs": 24, "max_num_batched_tokens": 512, **settings}
    engine = SyncEngine(folder, token_bytes=TOKEN_BYTES, **given)
    if gate is not None:
        gate.engine = engine
    return engine


def add(engine: SyncEngine, name: str, seed: int, params: SamplingParams, count: int = 20) -> None:
    ends = frozenset((END,) if params.structured_outputs else ())
    engine.add(name, random_tokens(9 + seed, seed), count, params, stop_ids=ends)


def alone(folder: Path, seed: int, params: SamplingParams, count: int = 20) -> list[list[int]]:
    engine = engine_of(folder)
    add(engine, "one", seed, params, count)
    engine.run()
    return [engine.tokens["one", choice] for choice in range(params.n)]


def finish(engine: SyncEngine, names: list[str]) -> None:
    """Steps until these have ended; while others wait, each of them blocks no step."""
    for _ in range(400):
        if all((name, 0) in engine.finishes for name in names):
            return
        engine.step()
    raise AssertionError(f"{names} have drawn {engine.tokens}")


SLOW = [
    P(seed=1, structured_outputs=LETTERS),
    P(temperature=0.0, structured_outputs=LONG),
    P(seed=3, n=2, structured_outputs=LETTERS, repetition_penalty=1.2),
]


@pytest.mark.parametrize("params", SLOW)
def test_neighbours_go_on_while_a_mask_is_awaited(
    folder: Path, gate: Gate, params: SamplingParams
) -> None:
    engine = engine_of(folder, gate)
    add(engine, "plain", 2, P(seed=2))
    add(engine, "slow", 3, params)
    finish(engine, ["plain"])
    assert not engine.tokens["slow", 0]
    assert gate.waits == 0
    engine.step()  # the plain one's row is empty
    engine.step()
    assert gate.waits == 1
    gate.opened.set()
    engine.run()
    assert engine.tokens["plain", 0] == alone(folder, 2, P(seed=2))[0]
    assert [engine.tokens["slow", i] for i in range(params.n)] == alone(folder, 3, params)


def test_a_grammar_that_was_slow_keeps_no_other_grammar_waiting(folder: Path, gate: Gate) -> None:
    """The first mask that takes long holds up the thread that all masks come from; from then on
    those of its grammar have their own."""
    params = P(seed=1, structured_outputs=LETTERS)
    other = P(seed=4, structured_outputs={"regex": "([a-f][b-d])*"})
    engine = engine_of(folder, gate)
    runner: Any = engine.runner
    runner._sampler.grammars.compile(params.structured_outputs).took(1.0, 1)
    add(engine, "plain", 2, P(seed=2))
    add(engine, "slow", 3, params)
    add(engine, "other", 5, other)
    finish(engine, ["plain", "other"])
    assert not engine.tokens["slow", 0]
    gate.opened.set()
    engine.run()
    assert engine.tokens["other", 0] == alone(folder, 5, other)[0]
    assert engine.tokens["slow", 0] == alone(folder, 3, params)[0]


def test_sixteen_rows_that_wait_hold_up_no_other(folder: Path, gate: Gate) -> None:
    params = [SLOW[i % 2] for i in range(16)]
    engine = engine_of(folder, gate)
    for i, one in enumerate(params):
        add(engine, f"slow{i}", i % 4, one)
    add(engine, "plain", 2, P(seed=2))
    finish(engine, ["plain"])
    assert not any(engine.tokens[f"slow{i}", 0] for i in range(16))
    gate.opened.set()
    engine.run()
    expected = [alone(folder, i % 4, params[i])[0] for i in range(4)]
    assert [engine.tokens[f"slow{i}", 0] for i in range(16)] == 4 * expected


def test_what_waits_is_cancelled_and_paused_at_once(folder: Path, gate: Gate) -> None:
    engine = engine_of(folder, gate, max_num_seqs=3)
    for i, name in enumerate(("slow-a", "slow-b", "plain")):
        add(engine, name, i, SLOW[0] if i < 2 else P(seed=2))
    while len(engine.tokens["plain", 0]) < 3:
        engine.step()
    engine.scheduler.command(Cancel("slow-a"))
    engine.scheduler.command(Pause("slow-b"))
    add(engine, "next", 3, P(seed=5))  # takes a row that waited
    finish(engine, ["slow-a", "plain", "next"])
    assert engine.finishes["slow-a", 0].reason is FinishReason.CANCELLED
    engine.scheduler.command(Resume("slow-b"))
    engine.step()
    gate.opened.set()
    engine.run()
    assert engine.tokens["next", 0] == alone(folder, 3, P(seed=5))[0]
    assert engine.tokens["slow-b", 0] == alone(folder, 1, SLOW[0])[0]


def test_a_row_alone_waits_in_its_step(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in steps of their own, one after the other, while nothing else could be computed."""
    monkeypatch.setattr(filler, "ALONE_S", DEADLINE_S)
    engine = engine_of(folder, gate)
    add(engine, "slow", 3, SLOW[0])
    threading.Timer(0.02, gate.opened.set).start()
    engine.step()
    assert engine.tokens["slow", 0] == alone(folder, 3, SLOW[0])[0][:1]
    engine.run()
    assert gate.waits == 0

"""Recorded programs: the same results as op by op, in less memory, for any number of rows."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import torch

from streamer.kernels import ops
from streamer.kernels.cpu import native
from streamer.kernels.cpu.program import Count, Program, team
from tests.kernels.oracle import Case

WIDTH, ROWS = 48, 40
MANY = 5_000


def layers(count: int) -> list[tuple[ops.Linear, ops.Linear, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * 0.1

    return [
        (
            native.pack_weight([weight(6 * WIDTH, WIDTH)], None, "silu"),
            native.pack_weight([weight(WIDTH, 3 * WIDTH)], weight(WIDTH)),
            weight(WIDTH) + 1,
        )
        for _ in range(count)
    ]


def forward(
    stack: list[tuple[ops.Linear, ops.Linear, torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    for up, down, norm in stack:
        down(up(native.rms_norm(x, norm, 1e-5)), add_to=x)
    return native.rms_norm(x, stack[0][2], 1e-5)


def record(depth: int) -> tuple[Program, torch.Tensor, torch.Tensor]:
    """(program, tokens, table): embed, then layers."""
    stack, tokens = layers(depth), torch.zeros(ROWS, dtype=torch.int64)
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    program = Program.record(
        {Count.TOKENS: [tokens]}, lambda: forward(stack, native.embedding(tokens, table))
    )
    return program, tokens, table


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equals_op_by_op(threads: int) -> None:
    """For every number of rows up to the limit, in any order, zero included."""
    team.set_threads(threads)
    program, tokens, table = record(3)
    stack = layers(3)
    for rows in (1, 40, 7, 0, 23, 1):
        chosen = torch.arange(rows) * 7 % ROWS
        tokens[:rows] = chosen
        out = program.run((rows, 0, 0))
        assert out.shape == (rows, WIDTH)
        if rows:
            assert torch.equal(out, forward(stack, table[chosen]))
    team.set_threads(1)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_program_that_began_is_joined(threads: int) -> None:
    """At once, in the middle of it, or when the other threads have ended it."""
    team.set_threads(threads)
    program, tokens, _ = record(40)
    tokens[:] = torch.arange(ROWS)
    for rows, pause_s in [(1, 0.0), (9, 1e-5), (40, 1e-4), (3, 1e-3), (40, 0.05)] * 20:
        expected = program.run((rows, 0, 0)).clone()
        program.run((rows, 0, 0)).zero_()
        owner = object()
        program.begin((rows, 0, 0), owner)
        time.sleep(pause_s)
        out = program.join((rows, 0, 0), owner)
        assert out is not None
        assert torch.equal(out, expected)
        assert program.join((rows, 0, 0), owner) is None
    team.set_threads(1)


@pytest.mark.parametrize("threads", [2, 5])
def test_whatever_else_runs_ends_what_began(threads: int) -> None:
    """Another op, the same program, another begin, other threads, or `stop`; none waits for it."""
    team.set_threads(threads)
    program, tokens, _ = record(40)
    tokens[:] = torch.arange(ROWS)
    expected = program.run((ROWS, 0, 0)).clone()
    other = record(1)[0]

    def close() -> None:
        team.set_threads(threads + 1)
        team.set_threads(threads)

    kinds = (
        lambda: native.best(torch.zeros(2, 8)),
        lambda: program.run((7, 0, 0)),
        lambda: other.begin((3, 0, 0), other),
        close,
        team.stop,
    )
    for end in kinds * 30:
        program.begin((ROWS, 0, 0), program)
        end()
        assert program.join((ROWS, 0, 0), program) is None
        assert torch.equal(program.run((ROWS, 0, 0)), expected)
    team.set_threads(1)


def test_one_thread_computes_what_began_when_it_joins() -> None:
    """There is none beside the caller; a graph begins nothing then."""
    team.set_threads(1)
    program, tokens, _ = record(2)
    tokens[:] = torch.arange(ROWS)
    expected = program.run((7, 0, 0)).clone()
    assert not team.has_others
    program.begin((7, 0, 0), program)
    out = program.join((7, 0, 0), program)
    assert out is not None
    assert torch.equal(out, expected)


def test_a_signal_at_any_moment_loses_nothing() -> None:
    """The team runs what Python does not know of, if a handler raises right after it began."""
    team.set_threads(2)
    program, tokens, _ = record(20)
    tokens[:] = torch.arange(ROWS)
    expected = program.run((ROWS, 0, 0)).clone()
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        for i in range(300):
            with contextlib.suppress(InterruptedError):
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + i * 1e-6)
                while True:
                    program.begin((ROWS, 0, 0), program)
            assert torch.equal(program.run((ROWS, 0, 0)), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    team.set_threads(1)


def _interrupt(number: int, frame: object) -> None:
    raise InterruptedError


def test_depth_costs_no_memory() -> None:
    """Buffers with different lifetimes share memory."""
    few, many = record(1)[0], record(12)[0]
    assert many._arena.numel() == few._arena.numel()


def test_threads_that_sleep_are_woken() -> None:
    """Runs far apart and close together, more threads than cores."""
    team.set_threads(4)
    program, tokens, _ = record(2)
    tokens[:] = torch.arange(ROWS)
    first = program.run((ROWS, 0, 0)).clone()
    for pause_s in (0.0, 0.001, 0.02) * 60:
        time.sleep(pause_s / 10)
        assert torch.equal(program.run((ROWS, 0, 0)), first)
    team.set_threads(1)


def test_many_runs_end_with_more_threads_than_cores() -> None:
    """Threads that are descheduled anywhere between two chunks leave nothing undone."""
    team.set_threads(5)
    program, _, _ = record(3)

    def work() -> None:
        for i in range(MANY):
            program.run((1 + i * 7 % ROWS, 0, 0))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(300)  # emulated (arm.py) it takes up to two minutes
    assert not thread.is_alive()
    team.set_threads(1)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those that it was forked from are not there to be woken, nor to give back a lock."""
    team.set_threads(3)
    x = torch.tensor([[1.0, 3.0, 2.0]] * ROWS)
    native.best(x)
    child = os.fork()
    if not child:
        signal.alarm(20)
        is_right = native.best(x)[1].tolist() == [1] * ROWS
        os._exit(not (is_right and len(os.listdir("/proc/self/task")) == 3))
    assert os.waitpid(child, 0)[1] == 0
    team.set_threads(1)


def test_a_foreign_tensor_is_refused() -> None:
    """The program would not know how many of its rows to take."""
    foreign, weight = torch.zeros(ROWS, WIDTH), native.pack_weight([torch.zeros(8, WIDTH)])
    with pytest.raises(ValueError, match="no part of the recording"):
        Program.record({}, lambda: weight(foreign))
    assert torch.equal(weight(foreign), torch.zeros(ROWS, 8))


def test_a_graph_equals_its_forward() -> None:
    """Prefill chunks and decodes, and a step beyond the limits, which is not recorded."""
    case = Case([(3, 20), (1, 33), (40, 50)], heads=4, kv_heads=2, dim=16, block=16)
    layer = ops.layer_view(case.pool, case.layer)
    projection = native.pack_weight(
        [torch.randn(8 * 16, 24, generator=torch.Generator().manual_seed(2))]
    )
    table = torch.randn(50, 24, generator=torch.Generator().manual_seed(3))
    rope = native.rope_tables(torch.arange(60.0)[:, None] * torch.ones(8), torch.float32)
    norm = torch.ones(64)

    def compute(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        qkv = projection(native.embedding(tokens, table))
        q = native.rope_and_store(qkv, rope, positions, layer, batch)
        y = native.paged_attention(q, layer, batch, 0.25)
        return native.rms_norm(y.view(y.shape[0], -1), norm, 1e-5, rows=last)

    tokens = torch.arange(44) % 50
    positions = torch.cat([torch.arange(17, 20), torch.arange(32, 33), torch.arange(10, 50)])
    expected = compute(tokens, positions, case.batch(), None)
    for max_tokens in (44, 60, 43):
        limits = ops.Limits(max_tokens=max_tokens, max_rows=3, block_size=16)
        graph = native.graph(compute, limits)
        for last in (None, torch.tensor([2, 43])):
            out = graph(tokens, positions, case.batch(), last)
            assert torch.equal(out, expected if last is None else expected[last])


def test_two_engines_in_one_process() -> None:
    """One engine's running threads and another's recording do not disturb each other."""
    team.set_threads(2)
    stack = layers(2)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    expected = forward(stack, x.clone())
    wrong: list[int] = []

    def work(number: int) -> None:
        same = (torch.equal(forward(stack, x.clone()), expected) for _ in range(60))
        wrong.extend(number for is_same in same if not is_same)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        program, tokens, table = record(2)
        tokens[:] = torch.arange(ROWS)
        assert torch.equal(program.run((ROWS, 0, 0)), forward(layers(2), table.clone()))
    for thread in threads:
        thread.join()
    team.set_threads(1)
    assert wrong == []

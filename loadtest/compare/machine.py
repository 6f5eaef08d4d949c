"""Measures this machine's memory and GEMM rates: `python -m streamer.loadtest.compare.machine N`.

Runs as a separate process and prints one line of JSON: the rate of memory reads, and of GEMMs in
bfloat16 (or in float32, where that is faster: a CPU without bfloat16's products emulates them) with
the rows of a decode step and of a prompt. The best of several tries counts, since a limit is what
the machine can do; with `read` only memory's mean rate over a few seconds, for what runs as long:
of tries of 0.1 s the best read 67 GB/s and the median 43 (2026-11-23, nothing else of ours running;
a virtual machine).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROWS = (8, 16, 32, 1024)
READ_BYTES = 1 << 30  # far beyond any cache
PIECE_BYTES = 1 << 25  # of one call: short, so that the threads stop nearly together
GEMM_OUT, GEMM_IN = 3072, 1024  # 6 or 12 MiB a thread: most are in the last cache
TRIES, TRY_S = 8, 0.1


def total_rate(
    make: Callable[[], Callable[[], object]], threads: int, work: float, tries: int = TRIES
) -> float:
    """`work` units a second of all threads together, each on its own data: the best of some tries.

    The threads share no barrier, so another process on the machine costs its share of CPU time and
    not a wait of all threads.
    """
    runs = [make() for _ in range(threads)]
    start = threading.Barrier(threads)

    def calls_s(run: Callable[[], object]) -> float:
        run()
        start.wait()
        calls, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < TRY_S:
            run()  # releases the GIL
            calls += 1
        return calls / took

    with ThreadPoolExecutor(threads) as pool:
        return max(work * sum(pool.map(calls_s, runs)) for _ in range(tries))


def read_gb_s(threads: int, of: Callable[[list[float]], float] = max) -> float:
    """Memory read by all threads, in 1e9 bytes a second: `of` the tries of the best of a few plain
    reductions. These take turns, so that a mean of each is of the same seconds."""
    import torch

    data = [torch.ones(READ_BYTES // 4 // threads) for _ in range(threads)]

    def rate(read: Callable[[torch.Tensor], object]) -> float:
        mine = iter(data)

        def make() -> Callable[[], object]:
            pieces = itertools.cycle(torch.split(next(mine), PIECE_BYTES // 4))
            return lambda: read(next(pieces))

        return total_rate(make, threads, PIECE_BYTES, tries=1)

    reads: list[Callable[[torch.Tensor], object]] = [
        torch.sum,
        torch.amax,
        lambda x: torch.dot(x, x),
        lambda x: x.view(torch.int32).amax(),
    ]
    rates = [list(map(rate, reads)) for _ in range(TRIES)]
    return max(of(list(tries)) for tries in zip(*rates, strict=True)) / 1e9


def read_now_gb_s(threads: int, environment: Mapping[str, str]) -> float | None:
    """Memory's mean rate now, by a process of its own; None where it can't be measured."""
    command = [sys.executable, "-m", __name__, str(threads), "read"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    return None if done.returncode else float(json.loads(done.stdout)["read_gb_s"])


def gemm_gflops(rows: int, threads: int) -> float:
    """1e9 operations a second of [rows, in] x [in, out], weights packed where torch can."""
    import torch

    def plain(dtype: torch.dtype) -> Callable[[], object]:
        x, weight = _operands(rows, dtype)
        return lambda: torch.nn.functional.linear(x, weight)

    def packed(dtype: torch.dtype) -> Callable[[], object]:
        x, weight = _operands(rows, dtype)
        laid = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        linear = torch.ops.mkldnn._linear_pointwise
        return lambda: linear(x, laid, None, "none", [], "")

    operations = 2 * rows * GEMM_OUT * GEMM_IN
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        rates.append(total_rate(partial(plain, dtype), threads, operations))
        with contextlib.suppress(AttributeError, RuntimeError):  # not in every build of torch
            rates.append(total_rate(partial(packed, dtype), threads, operations))
    return max(rates) / 1e9


def _operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    x = torch.randn(rows, GEMM_IN).to(dtype)
    return x, torch.randn(GEMM_OUT, GEMM_IN).to(dtype)


def main() -> None:
    """Print one line of JSON for compare."""
    import torch

    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(1)  # of each thread here
    torch.set_grad_enabled(False)
    is_now = "read" in sys.argv
    found: dict[str, object] = {"read_gb_s": read_gb_s(threads, statistics.mean if is_now else max)}
    if not is_now:
        found["gflops"] = {rows: gemm_gflops(rows, threads) for rows in ROWS}
    with open(1, "w", encoding="utf-8", closefd=False) as out:
        out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

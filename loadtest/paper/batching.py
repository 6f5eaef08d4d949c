"""Continuous against static batching: transformers, this engine held to batches, this engine.

All three have the same requests and weights. A static batch takes waiting requests, up to its size,
and the next one begins when all of the last have ended; this engine held to that separates the gain
of scheduling from that of its kernels. Arrival rates, the papers' other measure, are left out: a
rate that transformers can't sustain shows only after minutes, and 32 requests (half a minute) did
not distinguish 16 a second from one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from streamer.loadtest.paper.comparison import (
    CONTEXT,
    MODEL,
    Ask,
    Comparison,
    Kind,
    Plot,
    Series,
    Steps,
    asks,
    checkpoint,
    settings,
)

if TYPE_CHECKING:
    import torch


# ---------------------------------------------------------------- the systems


PAD = 2


class Run(msgspec.Struct, frozen=True):
    """Requests served to their ends.

    seconds  until the last one ended;  slots  rows of the batch, summed over the steps
    ends     seconds until each ended;  answers  each one's tokens
    """

    seconds: float
    slots: int
    ends: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Requested tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def slot_efficiency(self) -> float:
        """Share of the slots that drew a requested token."""
        return self.num_tokens / self.slots

    @property
    def latency_s(self) -> float:
        """Mean over requests of the seconds from the start to their end, per output token."""
        each = zip(self.ends, self.answers, strict=True)
        return sum(end / len(answer) for end, answer in each) / len(self.ends)


class Server(Protocol):
    """A system that serves requests, all of which are waiting at the start."""

    def __call__(self, requests: Sequence[Ask]) -> Run: ...


class Generate:
    """transformers: static batches of up to `size`, padded on the left, until the longest ends."""

    def __init__(self, folder: Path, size: int, dtype: torch.dtype, threads: int) -> None:
        import transformers

        bars: Any = transformers.utils.logging
        bars.disable_progress_bar()
        self._size = size
        self._threads = threads
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            # with a mask for padding, in bfloat16, SDPA takes several times as long on a CPU
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
        )
        self._model.generation_config.eos_token_id = None  # every answer has its requested length

    def __call__(self, requests: Sequence[Ask]) -> Run:
        now, slots = 0.0, 0
        ends: list[float] = []
        answers: list[tuple[int, ...]] = []
        for first in range(0, len(requests), self._size):
            batch = requests[first : first + self._size]
            began = time.perf_counter()
            answers += self._answer(batch)
            now += time.perf_counter() - began
            ends += [now] * len(batch)
            slots += self._size * max(ask.num_output for ask in batch)
        return Run(now, slots, tuple(ends), tuple(answers))

    def _answer(self, batch: Sequence[Ask]) -> list[tuple[int, ...]]:
        import torch

        torch.set_num_threads(self._threads)
        width = max(len(ask.prompt) for ask in batch)
        longest = max(ask.num_output for ask in batch)
        padding = [width - len(ask.prompt) for ask in batch]
        ids = torch.tensor([[PAD] * n + [*a.prompt] for n, a in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=False,
                pad_token_id=PAD,
            )
        came = out[:, width:].tolist()
        return [tuple(row[: a.num_output]) for row, a in zip(came, batch, strict=True)]


class Engine:
    """This engine with up to `size` rows; `is_static`: it gets a batch when the last has ended."""

    def __init__(self, steps: Steps, size: int, *, is_static: bool) -> None:
        self._steps = steps
        self._num_served = 0
        self._size = size
        self._is_static = is_static

    def __call__(self, requests: Sequence[Ask]) -> Run:
        now, num_steps = 0.0, 0
        names = [str(self._num_served + i) for i in range(len(requests))]
        self._num_served += len(requests)
        waiting = deque(zip(names, requests, strict=True))
        inside: set[str] = set()
        ends: dict[str, float] = {}
        while waiting or inside:
            for _ in range(self._num_welcome(len(waiting), len(inside))):
                name, ask = waiting.popleft()
                self._steps.add(name, *ask)
                inside.add(name)
            began = time.perf_counter()
            output = self._steps.step()
            now += time.perf_counter() - began
            num_steps += 1
            if output is None:
                raise RuntimeError(f"the engine stopped before {len(inside)} requests had ended")
            for finish in output.finishes:
                ends[finish.request_id] = now
                inside.remove(finish.request_id)
        self._steps.run()  # rows leave with a step of their own
        answers = tuple(tuple(self._steps.answers[name]) for name in names)
        return Run(now, num_steps * self._size, tuple(ends[name] for name in names), answers)

    def _num_welcome(self, num_waiting: int, num_inside: int) -> int:
        """How many waiting requests are added now."""
        if not self._is_static:
            return num_waiting  # the engine has a queue of its own
        return 0 if num_inside else min(num_waiting, self._size)


# ---------------------------------------------------------------- the comparison


ROUNDS = 3  # of this engine, which takes seconds; the middle one counts
System = Literal["transformers, static", "this engine, static", "this engine, continuous"]
TRANSFORMERS: System = "transformers, static"
STATIC: System = "this engine, static"
CONTINUOUS: System = "this engine, continuous"
SYSTEMS: tuple[System, ...] = (TRANSFORMERS, STATIC, CONTINUOUS)


class Throughput(msgspec.Struct, frozen=True):
    """A workload's runs with one batch size, by system; all requests at once."""

    kind: Kind
    size: int
    runs: dict[str, Run]
    num_equal: int  # answers of transformers and of this engine with the same tokens


class Plan(msgspec.Struct, frozen=True):
    """What is measured: batch sizes, requests and their lengths' divisors."""

    sizes: tuple[int, ...]
    counts: dict[Kind, int]
    scales: dict[Kind, int]
    alpaca_size: int
    context: int
    threads: int  # of transformers; 0: as many as there are cores


# ShareGPT's lengths are a sixth: the whole ones would take transformers half an hour.
PLAN = Plan(
    sizes=(8, 16, 32),
    counts={"ShareGPT": 64, "Alpaca": 64},
    scales={"ShareGPT": 6, "Alpaca": 1},
    alpaca_size=16,
    context=CONTEXT,
    threads=0,
)
TINY_PLAN = Plan(
    sizes=(2,),
    counts={"ShareGPT": 4, "Alpaca": 4},
    scales={"ShareGPT": 32, "Alpaca": 8},
    alpaca_size=2,
    context=CONTEXT // 4,
    threads=1,
)


def measure(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure every batch size, all requests waiting at the start."""
    plan = TINY_PLAN if tiny else PLAN
    progress("writing the model")
    with checkpoint(tiny=tiny) as folder:
        requests = {
            kind: asks(kind, plan.counts[kind], scale=plan.scales[kind], context=plan.context)
            for kind in plan.counts
        }
        cases: list[tuple[Kind, int]] = [("ShareGPT", size) for size in plan.sizes]
        cases.append(("Alpaca", plan.alpaca_size))
        found = [
            _throughput(folder, kind, size, requests[kind], plan, progress) for kind, size in cases
        ]
    return _compare(found, plan)


def _server(
    folder: Path, system: System, size: int, plan: Plan
) -> tuple[Server, Callable[[], None]]:
    """A warmed-up system, and the function that closes it."""
    import torch

    from streamer.loadtest.compare.command import num_cores

    if system == TRANSFORMERS:
        server: Server = Generate(folder, size, torch.bfloat16, plan.threads or num_cores())
        close = _nothing
    else:
        config = settings(
            dtype="bfloat16",
            max_num_seqs=size,
            num_gpu_blocks_override=size * plan.context // 16,
            swap_space=0.01,
            max_model_len=plan.context,
        )
        steps = Steps(folder, config)
        server, close = Engine(steps, size, is_static=system == STATIC), steps.close
    first = [Ask((7, 8, 9, 10), 4)] * size
    server(first)  # compiles, records
    return server, close


def _nothing() -> None:
    """transformers' model ends with its last reference."""


def _throughput(
    folder: Path,
    kind: Kind,
    size: int,
    requests: Sequence[Ask],
    plan: Plan,
    progress: Callable[[str], None],
) -> Throughput:
    runs: dict[str, Run] = {}
    for system in SYSTEMS:
        progress(f"{kind}, batches of {size}: {system}")
        server, close = _server(folder, system, size, plan)
        rounds = 1 if system == TRANSFORMERS else ROUNDS
        found = sorted((server(requests) for _ in range(rounds)), key=lambda run: run.seconds)
        runs[system] = found[rounds // 2]
        close()
    pairs = zip(runs[TRANSFORMERS].answers, runs[CONTINUOUS].answers, strict=True)
    return Throughput(kind, size, runs, sum(a == b for a, b in pairs))


# ---------------------------------------------------------------- the table


def _compare(
    found: Sequence[Throughput],
    plan: Plan,
) -> Comparison:
    rows: list[tuple[str | float, ...]] = []
    for one in found:
        where = f"{one.kind}, batch {one.size}"
        runs = [one.runs[system] for system in SYSTEMS]
        speeds = [run.tokens_per_s for run in runs]
        rows.append((f"{where}: tokens/s", *speeds, *_ratios(speeds)))
        shares = [run.slot_efficiency for run in runs]
        rows.append((f"{where}: slots used", *(f"{s:.0%}" for s in shares), *_ratios(shares)))
        waits = [1000 * run.latency_s for run in runs]
        rows.append((f"{where}: latency, ms a token", *waits, "", ""))
    return Comparison(
        name="batching",
        title="Continuous batching beside static batches",
        published=(
            "2 to 4 times the throughput of Orca and FasterTransformer at equal latency "
            "(PagedAttention, abstract), up to 24 times transformers' (vLLM's launch post, 2023); "
            "36.9 times FasterTransformer's at equal latency (Orca, abstract)."
        ),
        columns=("", *SYSTEMS, "continuous / transformers", "continuous / static"),
        rows=tuple(rows),
        finding=_finding(found),
        setting=_setting(found, plan),
        plot=Plot(
            "bars",
            "batch size",
            "tokens/s",
            tuple(
                Series(
                    system,
                    tuple((float(i), one.runs[system].tokens_per_s) for i, one in enumerate(found)),
                )
                for system in reversed(SYSTEMS)
            ),
            tuple(f"{one.kind}, {one.size}" for one in found),
        ),
    )


def _ratios(values: Sequence[float]) -> tuple[str, str]:
    """The ratios of the last value to the others."""
    first, second = (f"{values[-1] / v:.2f}" if v else "" for v in values[:2])
    return first, second


def _finding(found: Sequence[Throughput]) -> str:
    def span(system: System) -> str:
        ratios = [
            one.runs[CONTINUOUS].tokens_per_s / one.runs[system].tokens_per_s for one in found
        ]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    used = [[one.runs[s].slot_efficiency for one in found] for s in (STATIC, CONTINUOUS)]
    shares = [f"{min(of):.0%} to {max(of):.0%}" for of in used]
    return (
        f"All at once {span(TRANSFORMERS)} times transformers' tokens a second, and {span(STATIC)} "
        f"times its own when held to static batches: {shares[1]} of the slots draw a useful "
        f"token, static {shares[0]}."
    )


def _setting(found: Sequence[Throughput], plan: Plan) -> str:
    counts = ", ".join(
        f"{count} requests of {kind}'s lengths"
        + (f" divided by {plan.scales[kind]}" if plan.scales[kind] > 1 else "")
        for kind, count in plan.counts.items()
    )
    equal = sum(one.num_equal for one in found)
    total = sum(len(one.runs[CONTINUOUS].ends) for one in found)
    return (
        f"{MODEL} (42 million parameters, random weights, bfloat16), {counts}, greedy; "
        "all there from the start; transformers with eager attention, its "
        "prompts padded on the left. Slots are batch size times steps; "
        "an answer of this engine's static batches counts as ended when it has its last token, "
        f"transformers' when its batch has. {equal} of {total} answers of the two have the same "
        "tokens: random weights in bfloat16 leave the best two within rounding. "
        f"The middle one of {ROUNDS} runs of this engine, one of transformers."
    )

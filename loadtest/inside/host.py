"""Host time of a step: schedule, launch and apply of the real scheduler and runner, no forward.

One thread steps the scheduler and a CpuRunner whose model fills the kernels' input buffers and
computes nothing; its greedy rows are drawn from logits of two tokens. It then does the loop's part:
the output goes to the requests' streams, each with a reader that takes it at once. Part of
`streamer bench step`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, SchedulerConfig
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from streamer.engine.requests import GenerateRequest
    from streamer.kernels import ops
    from streamer.model.runner.cpu import CpuRunner

Case = Literal["decode", "stop", "mixed"]

SIZES = (1, 16, 256, 1024, 4096)
STOPS = 256  # sequences from which on decoding is measured with a stop string as well
MIXED = 256
BLOCK_SIZE = 16
NUM_SHARED = 256  # tokens of the cached prefix that all prompts share
MAX_MODEL_LEN = 1024
CHUNK_TOKENS = 512  # of prefill in a step of the mixed case, beside its decodes
MIXED_OUTPUT = 64  # tokens a sequence draws there: four of 256 leave and join a step
ROUNDS = 3  # of each case, the best of which is shown


class HostTime(msgspec.Struct, frozen=True):
    """One case: the median of its steps, microseconds.

    inputs      from the plan to the kernels' buffers;  draw  from the logits to the StepResult
    step        all of these, on the engine's thread
    distribute  the loop's part, without sockets
    """

    case: Case
    num_sequences: int
    num_steps: int
    schedule_us: float
    inputs_us: float
    draw_us: float
    apply_us: float
    step_us: float
    distribute_us: float


def report_host(console: Console, num_steps: int, sizes: tuple[int, ...] = SIZES) -> None:
    """Measure and print a table: every size decoding, with a stop string too, then mixed."""
    heading = ("case", "sequences", "schedule", "inputs", "draw", "apply", "step", "a sequence")
    rows: list[Sequence[str]] = [(*heading, "distribute")]
    cases: list[tuple[int, Case]] = [(n, "decode") for n in sizes]
    cases += [(n, "stop") for n in sizes if n >= STOPS]
    for num_sequences, case in (*cases, (MIXED, "mixed")):
        rounds = [measure_host(num_sequences, num_steps, case) for _ in range(ROUNDS)]
        m = min(rounds, key=lambda m: m.step_us)
        phases = (m.schedule_us, m.inputs_us, m.draw_us, m.apply_us, m.step_us)
        cells = [f"{us:,.1f}" for us in phases]
        each = f"{m.step_us / num_sequences:.2f}"
        rows.append((m.case, f"{num_sequences:,}", *cells, each, f"{m.distribute_us:,.1f}"))
    title = f"host time of a step without a forward, us, p50 of {num_steps} steps"
    console.print(terminal(rows, title))


class NoModel:
    """A stand-in for CpuRunner's model: fills the kernels' inputs, and computes nothing.

    filled  when the latest step's buffers were full, seconds of perf_counter
    """

    vocab_size = 2
    num_layers = 1
    num_kv_heads = 1
    head_dim = 16
    recordable = None

    def __init__(self) -> None:
        import torch

        self.dtype = torch.float32
        self.filled = 0.0
        self._logits = torch.zeros(0)
        self._inputs: _Inputs | None = None

    def begin(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> bool:
        """Nothing is computed."""
        return False

    def prepare(self, limits: ops.Limits) -> None:
        """See decoder.Decoder.prepare."""
        import torch

        from streamer.kernels import ops

        self._logits = torch.zeros(limits.max_tokens, self.vocab_size)
        if not ops.why_not_native():
            self._inputs = _Inputs(limits, self.head_dim)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """See decoder.Decoder.forward."""
        if self._inputs is not None:
            self._inputs.fill(tokens, positions, batch, last)
        logits = self._logits[: len(tokens) if last is None else len(last)]
        self.filled = time.perf_counter()
        return logits

    def forward_hidden(self, *given: Any) -> Any:
        """See decoder.Decoder.forward_hidden; no row here reports its hidden state."""
        logits = self.forward(*given)
        return logits, logits


class _Inputs:
    """A recorded graph of the native kernels whose inputs are filled but which is never run."""

    def __init__(self, limits: ops.Limits, head_dim: int) -> None:
        import torch

        from streamer.kernels.cpu import native

        table, pool = torch.zeros(1, head_dim), torch.zeros(1, 2, 1, limits.block_size, head_dim)

        def compute(
            tokens: torch.Tensor,
            positions: torch.Tensor,
            batch: ops.AttentionBatch,
            last: torch.Tensor | None,
        ) -> torch.Tensor:
            q = native.embedding(tokens, table).view(-1, 1, head_dim)
            out = native.paged_attention(q, pool, batch, 1.0)
            return native.rms_norm(out.view(-1, head_dim), table[0], 1e-6, rows=last)

        self.fill = native.Graph(compute, limits).fill


def measure_host(num_sequences: int, num_steps: int, case: Case = "decode") -> HostTime:
    """One case, on this thread. "stop": each has a stop string, that never comes; "mixed": some
    prefill, join and leave in every step."""
    bench = _Bench(num_sequences, case)
    while bench.num_drawing < num_sequences:
        bench.step()
    for _ in range(MIXED_OUTPUT if case == "mixed" else BLOCK_SIZE):  # to its steady state
        bench.step()
    times = [bench.step() for _ in range(num_steps)]
    medians = (statistics.median(t) * 1e6 for t in zip(*times, strict=True))
    schedule, inputs, draw, apply, distribute = medians
    return HostTime(
        case=case,
        num_sequences=num_sequences,
        num_steps=num_steps,
        schedule_us=schedule,
        inputs_us=inputs,
        draw_us=draw,
        apply_us=apply,
        step_us=statistics.median(sum(t[:4]) for t in times) * 1e6,
        distribute_us=distribute,
    )


class _Bench:
    """One scheduler over one runner, and the requests that keep it busy."""

    def __init__(self, num_sequences: int, case: Case) -> None:
        from streamer.engine.registry import Registry

        self._is_mixed = case == "mixed"
        self._stop = ("stop",) if case == "stop" else ()
        self._num_added = 0
        self.num_drawing = 0
        budget = num_sequences + CHUNK_TOKENS
        num_blocks = (num_sequences + 1) * (MAX_MODEL_LEN // BLOCK_SIZE)
        self._model = NoModel()
        self._runner = self._new_runner(num_sequences, budget, num_blocks)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_bytes=self._runner.block_bytes,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            token_bytes=(b"a", b"b"),
        )
        self._scheduler = Scheduler(config, BlockHasher(BLOCK_SIZE, b"h" * 32))
        self._token_bytes = config.token_bytes
        self._registry = Registry(retain_s=0.0, retain_bytes=0)
        for _ in range(num_sequences):
            self._add()

    def _new_runner(self, num_sequences: int, budget: int, num_blocks: int) -> CpuRunner:
        from streamer.kernels import ops
        from streamer.model.runner.cpu import CpuRunner
        from streamer.model.runner.interface import RunnerSizes

        sizes = RunnerSizes(
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
        )
        return CpuRunner(ops.for_cpu(), self._model, sizes)

    def _add(self) -> None:
        """Add a request whose blocks fill in another step than those of the requests before it."""
        from streamer.engine.requests import GenerateRequest

        number = self._num_added
        self._num_added += 1
        own = [number, *range(number % BLOCK_SIZE)]
        max_tokens = MAX_MODEL_LEN // 2
        if self._is_mixed:
            own = [number] * (CHUNK_TOKENS // 4)
            # The first ones end one after the other, as if they had begun one after the other.
            max_tokens = MIXED_OUTPUT + number % MIXED_OUTPUT if number < MIXED else MIXED_OUTPUT
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, stop=self._stop)
        stop = tuple(word.encode() for word in self._stop)
        prompt = (*[7] * NUM_SHARED, *own)
        self._scheduler.command(Add(str(number), prompt, params, stop=stop))
        self._read(GenerateRequest(prompt=prompt, params=params, request_id=str(number)))

    def _read(self, request: GenerateRequest) -> None:
        """The request's stream, with a reader that takes each step's news."""
        from streamer.engine.flow import Limits
        from streamer.engine.requests import QueueNeeds
        from streamer.engine.stream import TokenStream

        stream = TokenStream(request, Limits(), _NoEngine(), self._token_bytes, {})
        self._registry.add(stream, QueueNeeds())

        def take() -> None:
            stream.take(reader)
            stream.took(reader)

        reader = stream.attach(0, take)

    def step(self) -> tuple[float, float, float, float, float]:
        """Seconds of schedule, inputs, draw, apply and distribute."""
        facts = self._runner.facts()
        began = time.perf_counter()
        plan = self._scheduler.schedule(facts)
        if plan is None:
            raise RuntimeError(f"nothing to do after {self._num_added} requests")
        scheduled = time.perf_counter()
        result = self._runner.launch(plan).collect()
        drawn = time.perf_counter()
        output = self._scheduler.apply(plan, result)
        applied = time.perf_counter()
        self._registry.distribute(output)
        distributed = time.perf_counter()
        self.num_drawing = plan.num_samples
        for _ in output.finishes:
            self._add()
        filled = self._model.filled
        return (
            scheduled - began,
            filled - scheduled,
            drawn - filled,
            applied - drawn,
            distributed - applied,
        )


class _NoEngine:
    """A stand-in for the engine that no stream here asks for anything."""

    def cancel(self, request_id: str) -> None:
        """See flow.Control."""

    def hold(self, request_id: str, is_held: bool) -> None:
        """See flow.Control."""

"""The sections of `streamer bench gpu` with whole models: one stream, 256 requests, a step's parts.

Requests go through the real scheduler and runner on this thread (models.Bed); no event loop and no
sockets, which `bench step` and `bench stream` measure.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from streamer.loadtest.inside.gpu.kernels import GB, memory_rate
from streamer.loadtest.inside.gpu.models import (
    BLOCK_SIZE,
    SHAPES,
    Bed,
    Model,
    Where,
    blocks_for,
    make_model,
)
from streamer.loadtest.inside.gpu.report import AtMost, Report

if TYPE_CHECKING:
    from streamer.core.plan import StepTimes

SMALLEST = "Qwen3-0.6B"
SINGLE_PROMPT, SINGLE_OUTPUT = 32, 512
SINGLE_SHARES = {"Llama-3.1-8B": 0.75, "Llama-3.2-1B": 0.5}  # of what memory allows
SINGLE_SPEED = 500.0  # tokens/s of the smallest
BATCH_SPEED = 20_000.0
BATCH_TOKENS = 16_384  # computed in a step
STEP_ROWS, STEP_PROMPT, STEPS = 256, 128, 200
HOST_MS = AtMost(0.3)
PROFILED, KERNELS = 8, 12  # steps, and kernels that are listed
MIXED_TOKENS, MIXED_ROWS = (64, 512, 2048), 16
MIXED_STEPS = 15  # whose chunks are one prompt, within the model's limit


class Request(NamedTuple):
    """Token ids, and the number of output tokens."""

    prompt: list[int]
    num_output: int


def nano_vllm_requests(*, is_tiny: bool) -> list[Request]:
    """The requests of nano-vllm's bench.py: its seed, and its order of drawing from it.

    256, with 142,827 tokens of prompts and 133,966 of output; the tiny stand-in has 4.
    """
    source = random.Random(0)
    count, shortest, longest, last = (4, 4, 12, 500) if is_tiny else (256, 100, 1024, 10_000)
    prompts = [
        [source.randint(0, last) for _ in range(source.randint(shortest, longest))]
        for _ in range(count)
    ]
    return [Request(prompt, source.randint(shortest, longest)) for prompt in prompts]


def single(where: Where, report: Report) -> None:
    """Tokens a second of one stream, beside the limit of reading its weights from memory."""
    from streamer.model.runner.interface import RunnerSizes

    output = 16 if where.is_tiny else SINGLE_OUTPUT
    rate = memory_rate(where, report)
    quantized = {f"{name}, 4 bits": name for name in SHAPES if name != SMALLEST}
    for name, shape in {**{name: name for name in SHAPES}, **quantized}.items():
        report.doing(f"making {name}")
        model = make_model(shape, where, is_4_bit=name in quantized)
        bed = Bed(
            model,
            where,
            RunnerSizes(
                num_host_blocks=0,
                block_size=BLOCK_SIZE,
                max_num_seqs=1,
                num_blocks=2 * blocks_for(SINGLE_PROMPT + SINGLE_OUTPUT),
                max_model_len=1024,
                max_num_batched_tokens=256,
            ),
        )
        try:
            prompt = list(range(SINGLE_PROMPT))
            _run_to_end(bed, where, report, name, [Request(prompt, output)])  # compiles, records
            prompt.reverse()
            speed = output / _run_to_end(bed, where, report, name, [Request(prompt, output)])
        finally:
            bed.close()
        limit = rate / model.step_bytes
        note = f"{model.step_bytes / GB:.2f} GB of weights a token; memory allows {limit:,.0f}/s"
        target = SINGLE_SPEED if name == SMALLEST else None
        report.add(name, "one stream", speed, "tokens/s", note, target=target)
        share = SINGLE_SHARES.get(name)
        report.add(name, "share", speed / limit, "x", "of what memory allows", target=share)
        del model, bed
        free(where)


def batch(where: Where, report: Report) -> None:
    """The requests of nano-vllm's bench, all at once, with each kind of KV cache."""
    requests = nano_vllm_requests(is_tiny=where.is_tiny)
    report.doing(f"making {SMALLEST}")
    model = make_model(SMALLEST, where)
    for kind in (None, torch.int8, torch.float8_e4m3fn):
        name = {None: SMALLEST, torch.int8: f"{SMALLEST}, int8 KV"}.get(kind, f"{SMALLEST}, fp8 KV")
        speed, took_s = _run_requests(model, where, report, name, requests, kind)
        note = f"{sum(r.num_output for r in requests):,} tokens of output in {took_s:.1f} s"
        target = BATCH_SPEED if kind is None else None
        measure = f"{len(requests)} requests"
        report.add(name, measure, speed, "tokens/s", note, target=target)


def _run_requests(
    model: Model,
    where: Where,
    report: Report,
    name: str,
    requests: list[Request],
    kind: torch.dtype | None,
) -> tuple[float, float]:
    """Tokens of output a second, and the seconds."""
    from streamer.model.runner.interface import RunnerSizes

    longest = max(len(r.prompt) + r.num_output for r in requests)
    blocks = sum(blocks_for(len(r.prompt) + r.num_output) for r in requests)
    bed = Bed(
        model,
        where,
        RunnerSizes(
            num_host_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_seqs=len(requests),
            num_blocks=blocks + blocks // 16,  # above the watermark: no request is preempted
            max_model_len=longest,
            max_num_batched_tokens=64 if where.is_tiny else BATCH_TOKENS,
            kv_dtype=kind,
        ),
    )
    try:
        _run_to_end(bed, where, report, name, [Request([7] * 8, 4)])  # compiles, records
        took_s = _run_to_end(bed, where, report, name, requests, temperature=0.6)
    finally:
        bed.close()
        free(where)
    return sum(r.num_output for r in requests) / took_s, took_s


class StepCase(NamedTuple):
    """A steady decode: its rows, with filters or without, and the context it is recorded for."""

    rows: int
    has_filters: bool
    max_model_len: int

    @property
    def name(self) -> str:
        filters = ", top-k and top-p" if self.has_filters else ""
        return f"{SMALLEST}, {self.rows} rows{filters}, context up to {self.max_model_len:,}"


def step(where: Where, report: Report) -> None:
    """Times of a steady decode step on the host and on the device: 1, 32 and 256 rows, with filters
    and without, recorded for a short context and for the model's own, as a server does by default;
    and of steps with a chunk beside decodes, recorded and op by op.
    """
    report.doing(f"making {SMALLEST}")
    model = make_model(SMALLEST, where)
    default = int(where.config_of(SMALLEST)["max_position_embeddings"])
    most, short = (4, 256) if where.is_tiny else (STEP_ROWS, 1024)
    cases = [StepCase(rows, False, default) for rows in (1, min(32, most // 2), most)]
    cases += [StepCase(most, True, default), StepCase(most, False, short)]
    for case in cases:
        _step(model, where, report, case)
    for tokens in (24,) if where.is_tiny else MIXED_TOKENS:
        _mixed(model, where, report, tokens)


def _step(model: Model, where: Where, report: Report, case: StepCase) -> None:
    """Report one case, and the kernels of its steps."""
    from streamer.model.runner.interface import RunnerSizes

    count, longest = (4, 64) if where.is_tiny else (STEPS, 1024)
    prompt = min(STEP_PROMPT, longest // 2)
    bed = Bed(
        model,
        where,
        RunnerSizes(
            num_host_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_seqs=case.rows,
            num_blocks=max(case.rows * blocks_for(longest) * 17 // 16, blocks_for(longest) + 2),
            max_model_len=case.max_model_len,
            max_num_batched_tokens=64 if where.is_tiny else BATCH_TOKENS,
        ),
    )
    try:
        for i in range(case.rows):
            tokens = [i + 1, *range(prompt - 1)]
            bed.add(tokens, longest - prompt, 0.6, has_filters=case.has_filters)
        report.doing(f"{case.name}: prefill")
        _until(bed, report, lambda tokens: tokens == case.rows)
        for _ in range(count // 4):
            bed.step()
        report.doing(f"{case.name}: {count} steps")
        times, wall_s = _timed_steps(bed, count)
        _report_step(report, case.name, times, wall_s, where)
        report.doing(f"{case.name}: the profiler")
        _profile(bed, report, case.name, where)
    finally:
        bed.close()
        free(where)


def _mixed(model: Model, where: Where, report: Report, tokens: int) -> None:
    """Report steps of so many tokens: decodes, and a chunk of a long prompt."""
    rows = 2 if where.is_tiny else MIXED_ROWS
    what = f"{SMALLEST}, {tokens:,} tokens, {rows} of them decodes"
    took = []
    for name in ("recorded", "op by op"):
        report.doing(f"{what}: {name}")
        times, wall_s = _mixed_steps(model, where, report, tokens, rows, name == "recorded")
        launch_ms = statistics.median(t.launch_s for t in times) * 1e3
        note = f"from one to the next; launched in {launch_ms:.3f} ms"
        report.add(what, f"step, {name}", wall_s * 1e3, "ms", note)
        took.append(wall_s)
    report.add(what, "op by op", took[1] / took[0], "x", "of the recorded step's time")


def _mixed_steps(
    model: Model, where: Where, report: Report, tokens: int, rows: int, is_recorded: bool
) -> tuple[list[StepTimes], float]:
    """As _timed_steps."""
    from streamer.model.runner.interface import RunnerSizes

    count, first = (3 if where.is_tiny else MIXED_STEPS), 4  # steps; the first are not timed
    prompt, output = (tokens - rows) * (count + first + 1), 2 * count + 64
    bed = Bed(
        model,
        where,
        RunnerSizes(
            num_host_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_seqs=rows + 1,
            num_blocks=(blocks_for(prompt + 1) + rows * blocks_for(output + 8)) * 17 // 16 + 2,
            max_model_len=prompt + output,
            max_num_batched_tokens=tokens,
        ),
        is_recorded=is_recorded,
    )
    try:
        for i in range(rows):
            bed.add([i + 1, *range(7)], output, 0.6)
        _until(bed, report, lambda drawn: drawn == rows)
        bed.add([i % 500 for i in range(prompt)], 1, 0.6)
        for _ in range(first):
            bed.step()
        return _timed_steps(bed, count)
    finally:
        bed.close()
        free(where)


def _report_step(
    report: Report, what: str, times: list[StepTimes], wall_s: float, where: Where
) -> None:
    """Report medians of the whole step and of its parts on the host."""
    on_host = [t.schedule_s + t.launch_s + t.apply_s for t in times]
    waits = [t.collect_s for t in times]
    parts = ("schedule", "launch", "apply")
    each = [statistics.median(getattr(t, f"{part}_s") for t in times) * 1e3 for part in parts]
    note = ", ".join(f"{part} {ms:.3f}" for part, ms in zip(parts, each, strict=True))
    if where.device.type == "cpu":
        note += "; on a CPU launch is the model"
    report.add(what, "step", wall_s * 1e3, "ms", "from one to the next")
    host_ms = statistics.median(on_host) * 1e3
    report.add(what, "host", host_ms, "ms", note, target=HOST_MS)
    wait_ms = statistics.median(waits) * 1e3
    report.add(what, "waiting for the device", wait_ms, "ms", "of the host's thread")


def _timed_steps(bed: Bed, count: int) -> tuple[list[StepTimes], float]:
    """Each step's times, and the mean seconds from one step to the next."""
    times = []
    began = time.perf_counter()
    for _ in range(count):
        output = bed.step()
        if output is None:
            raise RuntimeError("the requests ended before the steps did")
        times.append(output.times)
    return times, (time.perf_counter() - began) / count


def _profile(bed: Bed, report: Report, what: str, where: Where) -> None:
    """Report the time of all kernels and copies on the device a step, and of the longest ones."""
    from torch.profiler import ProfilerActivity

    is_cuda = where.device.type == "cuda"
    steps = 2 if where.is_tiny else PROFILED
    with torch.profiler.profile(
        activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU],
        acc_events=True,  # else torch 2.11 warns that it could forget some
    ) as profile:
        for _ in range(steps):
            bed.step()
        where.synchronize()
    took = {
        event.key: event.self_device_time_total if is_cuda else event.self_cpu_time_total
        for event in profile.key_averages()
    }
    total_us = sum(took.values())
    if not total_us:
        raise RuntimeError("the profiler saw no kernel")
    report.add(what, "device", total_us / 1e3 / steps, "ms", "kernels, by the profiler")
    for name, us in sorted(took.items(), key=lambda item: -item[1])[:KERNELS]:
        share = f"{us / total_us:.0%} of the device's time"
        report.add(what, f"kernel {name[:60]}", us / steps, "us", share)


def _run_to_end(
    bed: Bed,
    where: Where,
    report: Report,
    name: str,
    requests: list[Request],
    temperature: float = 0.0,
) -> float:
    """Seconds of all requests, from the first plan to the last token."""
    expected, drawn, reported = sum(r.num_output for r in requests), 0, 0.0
    where.synchronize()
    began = time.perf_counter()
    for request in requests:
        bed.add(request.prompt, request.num_output, temperature)
    while (output := bed.step()) is not None:
        drawn += len(output.tokens)
        if (now := time.perf_counter()) - reported > 1.0:
            reported = now
            report.doing(f"{name}: {drawn:,} of {expected:,} tokens")
    took_s = time.perf_counter() - began
    if drawn != expected:
        raise RuntimeError(f"{drawn} tokens were drawn of {expected}")
    return took_s


def _until(bed: Bed, report: Report, is_there: Callable[[int], bool]) -> None:
    """Step until `is_there` accepts a step's number of tokens."""
    while (output := bed.step()) is not None:
        report.check()
        if is_there(len(output.tokens)):
            return
    raise RuntimeError("the requests ended before all of them ran")


def free(where: Where) -> None:
    """Give the device's unused memory back, for the next model."""
    import gc

    gc.collect()
    if where.device.type == "cuda":
        torch.cuda.empty_cache()

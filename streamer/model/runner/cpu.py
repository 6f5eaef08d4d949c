"""ModelRunner: applies Plans to the rows, the KV pools and the model, and returns what was drawn.

Owns both KV pools and the resident rows; decides nothing about who runs. Called only from the
engine's GPU thread. This is the CPU's: a launched plan is done when `launch` returns (depth 0).
`load_runner` makes it, or runner/cuda.py's.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from pathlib import Path
from typing import Protocol

import torch

from streamer.config import Config
from streamer.core.model_info import ModelInfo
from streamer.core.moves import check_moves
from streamer.core.plan import Facts, Plan, StepResult
from streamer.core.sizes import batched_tokens
from streamer.errors import ConfigError, InvariantViolated
from streamer.kernels import ops
from streamer.model import memory
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import Recognized, model_info, recognize
from streamer.model.loader import DTYPES, load_decoder
from streamer.model.runner.costs import Costs, probe_copy
from streamer.model.runner.cuda import CudaRunner, step_bytes
from streamer.model.runner.device import CudaDevice, Device, choose_device
from streamer.model.runner.inputs import Rows, StepInputs, step_result
from streamer.model.sampling.host import Sampler

logger = logging.getLogger(__name__)

SINGLE_THREAD_BYTES = 32 << 20  # weights below this are computed by one of torch's threads


class CausalModel(Protocol):
    """What the runner needs of a model: decoder.Decoder and fallback.FallbackModel."""

    dtype: torch.dtype
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    is_recordable: bool  # whether a GPU may replay its forward

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [S, V] of the packed tokens named by `last` (None: all), as Decoder.forward."""
        ...

    def prepare(self, limits: ops.Limits) -> None:
        """No step will be larger than this."""
        ...


class Done:
    """A plan that finished inside `launch`."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def collect(self) -> StepResult:
        """The plan's result; nothing to wait for."""
        return self._result


class ModelRunner:
    """See core.plan.Plan for the order of effects; raises InvariantViolated on a plan's mistake."""

    depth = 0

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: of both pools; the model's if None."""
        shape = (
            model.num_layers,
            block_size,
            model.num_kv_heads,
            model.head_dim,
            kv_dtype or model.dtype,
        )
        self._model = model
        self._pool = ops.new_pool(num_blocks, *shape)
        self._host_pool = ops.new_pool(num_host_blocks, *shape)
        width = -(-max_model_len // block_size)
        self._rows = Rows(max_num_seqs, width, num_blocks, block_size)
        model.prepare(
            ops.Limits(
                max_tokens=max_num_batched_tokens,
                max_rows=max_num_seqs,
                block_size=block_size,
            )
        )
        self._sampler = Sampler(model.vocab_size, max_num_seqs)
        self._block_bytes = self._pool[:1].numel() * self._pool.element_size()
        self._costs = Costs(self._block_bytes, probe_copy)
        self._host_upto = 0  # host blocks below are memory already, which the first write makes
        self._copies_done = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return self._block_bytes

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Done:
        """Apply the plan; an exception in here is the end of the engine."""
        self._update_rows(plan)
        self._move_blocks(plan)
        inputs = self._rows.inputs(plan)
        began = time.perf_counter()
        result = self._draw(plan.number, inputs)
        if inputs.scored is None:  # what scoring takes is no cost of a prefill
            took_s = time.perf_counter() - began
            self._costs.saw_step(took_s, inputs.num_tokens, inputs.num_chunk_tokens)
        self._copies_done = plan.number
        return Done(result)

    def facts(self) -> Facts:
        """Measured costs; on the CPU the copies of every launched plan are done."""
        return self._costs.facts(self._copies_done)

    def close(self) -> None:
        """Free pools and weights."""
        empty = torch.empty(0)
        self._pool = self._host_pool = empty
        self.__dict__.pop("_model", None)

    def _update_rows(self, plan: Plan) -> None:
        for row in plan.leaves:
            self._rows.leave(row)
            self._sampler.leave(row)
        for join in plan.joins:
            self._rows.join(join)
            self._sampler.join(
                join.row, join.params, join.tokens, join.num_prompt, join.choice, join.stop_ids
            )
        for update in plan.tables:
            self._rows.update_table(update)

    def _move_blocks(self, plan: Plan) -> None:
        if not (plan.swap_out or plan.copies or plan.swap_in):
            return
        check_moves(plan, self._pool.shape[0], self._host_pool.shape[0])
        began = time.perf_counter()
        if plan.swap_out:
            ops.swap_blocks(self._pool, self._host_pool, list(plan.swap_out))
            upto = 1 + max(block for _, block in plan.swap_out)
            took_s, is_first = time.perf_counter() - began, upto > self._host_upto
            self._costs.saw_swap(took_s, len(plan.swap_out), is_first=is_first)
            self._host_upto = max(upto, self._host_upto)
        if plan.copies:
            src, dst = torch.tensor(plan.copies).T
            ops.copy_blocks(self._pool, src, dst)
        began = time.perf_counter()
        if plan.swap_in:
            ops.swap_blocks(self._host_pool, self._pool, list(plan.swap_in))
            self._costs.saw_swap(time.perf_counter() - began, len(plan.swap_in))

    def _draw(self, number: int, inputs: StepInputs) -> StepResult:
        """Forward, sample, remember."""
        logits, scores = self._logits(inputs), {}
        if logits is not None and inputs.scored is not None:
            scored, (logits, before) = inputs.scored, inputs.scored.split(logits)
            targets = torch.from_numpy(scored.targets)
            scores = scored.by_row(scored.compute(before[:, : self._model.vocab_size], targets))
        if logits is None or not inputs.rows:
            return StepResult(number, prompt_logprobs=scores)
        if inputs.parents:
            logits = torch.cat([logits, logits[inputs.parents]])
        drawn = self._sampler.sample(logits, inputs.rows, inputs.draw_at)
        self._rows.append(inputs.at, drawn.tokens)
        return step_result(number, inputs, drawn.tokens, drawn.logprobs, drawn.failed, scores)

    def _logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """[S + P, V] for the rows that draw and the tokens that are scored."""
        if inputs.tokens is None or inputs.positions is None or inputs.batch is None:
            return None
        return self._model.forward(
            inputs.tokens, inputs.positions, inputs.batch, self._pool, inputs.last
        )


def load_runner(
    config: Config, device: Device | None = None
) -> tuple[ModelRunner | CudaRunner, ModelInfo]:
    """Load config.model (a folder) on this thread, which is the one that runs it later.

    ModelNotSupported, NotEnoughMemory and ConfigError come before the weights are read, where they
    can be known by then. A `device` takes the place of the GPU that the config names.
    """
    if config.model is None:
        raise ConfigError("no checkpoint folder to load", param="model")
    where = choose_device(config.device) if device is None else device.where
    if device is None and where.type == "cuda":
        device = CudaDevice(where)
    ops.use(where)
    known = recognize(open_checkpoint(Path(config.model)), config.dtype, where)
    free = memory.device_free_bytes(where)
    memory.check_weights_fit(known.weight_bytes, free)
    kv_dtype = known.kv_dtype(config.kv_cache_dtype, where)
    block_bytes = known.block_bytes(config, where)

    def plan_pools(free: int) -> memory.PoolSizes:
        return memory.plan_pools(
            config,
            block_bytes=block_bytes,
            model_limit=known.model_limit,
            free=free,
            host_free=None if device is None else memory.free_bytes(),
        )

    plan_pools(free - known.weight_bytes)  # refused now, not after minutes
    if device is None:
        _set_threads(known)
    model = _load_model(known, where, config.load_progress)
    peak = 0 if device is None else step_bytes(device, model, config, known.model_limit, kv_dtype)
    left = memory.device_free_bytes(where) if device is None else device.free_bytes()
    pools = plan_pools(left - peak)
    if pools.limited_by:
        logger.warning(
            "context limited to %d of the model's %d tokens: %s",
            pools.max_model_len,
            known.model_limit,
            pools.limited_by,
        )
    sizes = {
        "num_blocks": pools.num_blocks,
        "num_host_blocks": pools.num_host_blocks,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": batched_tokens(config, where.type),
        "max_model_len": pools.max_model_len,
    }
    info = model_info(known, config, pools, block_bytes, where)
    if device is None:
        return ModelRunner(model, **sizes, kv_dtype=kv_dtype), info
    runner = CudaRunner(device, model, **sizes, kv_dtype=kv_dtype)
    if model.is_recordable:
        runner.record(peak, config.load_progress)
    return runner, info


def _load_model(known: Recognized, device: torch.device, show_progress: bool) -> CausalModel:
    dtype = DTYPES[known.dtype]
    if known.decoder is not None:
        return load_decoder(
            known.checkpoint, known.decoder, dtype, device, show_progress=show_progress
        )
    from streamer.model.fallback import load_fallback  # transformers' modelling code

    if known.fallback is None:
        raise InvariantViolated("a recognized checkpoint has neither decoder nor fallback")
    return load_fallback(
        known.checkpoint, known.fallback, dtype, device, show_progress=show_progress
    )


def _set_threads(known: Recognized) -> None:
    """Beside the native kernels torch only samples, or runs what transformers' code has of its own;
    two pools of threads that spin would be in each other's way.

    Where torch computes a small model it gets one thread: its many short parallel regions gain
    nothing from a second one and lose everything when another process wants that core (the bundled
    model's step on 2 cores, 2026-11-20: 3.1 ms with one thread, 4.1 with two, 55 to 400 with two
    beside a busy process). The native team gains a third, and beside a busy process loses a tenth
    at most (inside/README.md).
    """
    is_by_torch = known.decoder is None or ops.backend == "torch"
    is_small = known.weight_bytes < SINGLE_THREAD_BYTES
    threads = 1 if is_by_torch and is_small else _num_cores()
    torch.set_num_threads(threads if known.decoder is None else 1)
    ops.set_threads(threads)


@functools.cache
def _torch_threads() -> int:
    """torch's own count, before an engine set it: the next one in this process wants it too.

    The second got one thread, so it was a quarter slower (2 cores, 2026-11-22).
    """
    return torch.get_num_threads()


def _num_cores() -> int:
    """Cores this process may use: torch's own count, within affinity and the cgroup's quota."""
    count = _torch_threads()
    if hasattr(os, "sched_getaffinity"):
        count = min(count, len(os.sched_getaffinity(0)))
    return max(1, min(count, memory.cpu_quota() or count))

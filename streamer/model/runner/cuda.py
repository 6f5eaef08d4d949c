"""CudaRunner: CpuRunner's work on a GPU, one plan ahead of the results that the host has read.

Owns both KV pools, the rows and what a launched plan still needs. Nothing in `launch` waits for
the device: a drawn token stays there for the next step, and reaches the host in one copy that
`collect` waits for. Called only from the engine's GPU thread, made by load.py.

The host counts every row's progress, which does not depend on the drawn tokens but where a row
verifies provisional ones: that row waits until the host has read them. A steady decode uploads only
new blocks; a plan's uploads go in one copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from streamer.config import Config
from streamer.constraints.filler import Agree
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Facts, Plan, RowJoin, StepResult
from streamer.core.sizes import MAX_SCORED, batched_tokens
from streamer.errors import InvariantViolated
from streamer.kernels import ops
from streamer.model import memory
from streamer.model.loader import progress_bar
from streamer.model.runner.costs import Costs
from streamer.model.runner.device import Device, Event, memory_errors
from streamer.model.runner.inputs import Ints, Rows, StepInputs, step_result
from streamer.model.runner.interface import CausalModel, RunnerSizes
from streamer.model.runner.recorded import RecordedMixed, RecordedSteps, recorded_bytes
from streamer.model.runner.swaps import Swaps
from streamer.model.sampling.device import DeviceSampler, Draw, TokenCounts

logger = logging.getLogger(__name__)

ALIGNED = 2  # int64 in 16 bytes: a kernel is compiled again for pointers not aligned to that
WARMED_CONTEXT = 1024  # tokens of a row of the steps that compile kernels
# Kernels are compiled again where a stride is a multiple of 16, as strides of transformers' code
# are that its tokens multiply. Powers of two and a decode beside them are an odd number.
EVEN_TOKENS = 16


class StepBytes(NamedTuple):
    """Device memory beside weights and pools: what the largest step takes op by op, and what all
    recorded steps keep."""

    op_by_op: int
    recorded: int


class CudaInFlight:
    """A launched plan. `result`: copy of the drawn tokens on its way to the host, None if no row
    draws; `scores`: the same of Scored.compute, None if no row scores; `hidden`: those of
    StepInputs.hidden, None if there are none; `logits`: those drawn from op by op, until they are;
    `is_followed`: constrained rows are where its tokens led them."""

    __slots__ = (
        "_collect", "began", "done", "draw", "hidden", "inputs", "is_followed", "logits", "plan",
        "result", "scores",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, inputs: StepInputs, began: Event,
        collect: Callable[[CudaInFlight], StepResult],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.inputs = inputs
        self.draw: Draw | None = None
        self.began = began
        self.done = began
        self.is_followed = False
        self.logits: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        self._collect = collect

    def collect(self) -> StepResult:
        """Wait for what the plan drew; called once."""
        return self._collect(self)


class CudaRunner:
    """See core.plan.Plan for the order of effects; a wrong plan raises InvariantViolated."""

    depth = 1

    def __init__(
        self, device: Device, kernels: ops.Backend, model: CausalModel, sizes: RunnerSizes
    ) -> None:
        from streamer.kernels.gpu.fixed_step import RowState

        shape, width, where = sizes.pool_shape(model), sizes.table_width, device.where
        rows, block_size = sizes.max_num_seqs, sizes.block_size
        self._device = device
        self._kernels = kernels
        self._sizes = sizes
        self._model = model
        self._pool = kernels.new_pool(sizes.num_blocks, *shape, where)
        host_pool = kernels.new_pool(sizes.num_host_blocks, *shape)
        self._rows = Rows(rows, width, sizes.num_blocks, block_size, is_ahead=True)
        self._state = RowState(rows, width, block_size, where)
        model.prepare(sizes.limits)
        self._sampler = DeviceSampler(device, kernels, model.vocab_size, rows)
        self._steps = RecordedSteps(
            self._state, self._sampler, model, self._pool, sizes.max_num_batched_tokens
        )
        self._block_bytes = self._pool[:1].numel() * self._pool.element_size()
        self._costs = Costs(self._block_bytes, device.probe_copy)
        self._swaps = Swaps(device, kernels, self._pool, host_pool, self._costs)
        self._launched = 0
        self._fresh: dict[int, int] = {}  # row -> logical block from which its table is to be sent
        # Row that joined, verified or was late, whose progress is to be sent -> its last token.
        self._joined: dict[int, int] = {}
        self._chosen: tuple[int, ...] = ()  # the rows that the device decodes
        self._newest: CudaInFlight | None = None  # launched last

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return self._block_bytes

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile every kernel that a step may need, before the first plan, which would wait.

        Prompts of all sizes to a power of two, and of EVEN_TOKENS with the decode that is beside
        each, with the logits of as many tokens as may be drawn from or scored; the draws of logits
        as the model gives them and as fp32, which those with bias, mask or penalties are; a copied
        block.
        """
        pool, sizes = self._pool, self._sizes
        most = sizes.max_num_seqs + MAX_SCORED
        holds = min(sizes.max_model_len, pool.shape[0] * sizes.block_size, WARMED_CONTEXT)
        powers = (1 << n for n in range(sizes.max_num_batched_tokens.bit_length()))
        for count in (*powers, EVEN_TOKENS - 1):
            lens = [*[holds] * (count // holds), *[count % holds] * (count % holds > 0), 1]
            logits = _prompts(self._model, pool, sizes.block_size, lens, most)[:1]
        slots = self._state.chosen[:1]
        for has_filters in (False, True):
            for x in (logits, logits.float()):
                self._sampler.draw_plain(x, slots, slots.long(), has_filters=has_filters)
        self._steps.warm()
        if pool.shape[0] > 1:
            ends = torch.tensor([[0], [1]], device=pool.device)
            self._kernels.copy_blocks(pool, ends[0], ends[1])

    @torch.inference_mode()
    def record(self, step: StepBytes, show_progress: bool) -> None:
        """Record steps, before the first plan, with a progress bar, if the model can be.

        The graphs may take step.recorded and half of the free memory beyond both.
        """
        model, steps = self._model.recordable, self._steps
        if model is None:
            return
        beyond = max(0, self._device.free_bytes() - step.op_by_op)
        budget = (beyond + min(step.recorded, beyond)) // 2
        with progress_bar("Recording steps", steps.num_sizes, "sizes", show_progress) as advance:
            steps.record(self._device, model, budget, advance)
        if steps.num_recorded < steps.num_sizes:
            logger.warning(
                "%d of %d step sizes recorded: %.2f GiB are too little for all",
                steps.num_recorded,
                steps.num_sizes,
                budget / memory.GIB,
            )

    def constrain(self, grammars: Grammars) -> None:
        """See engine.core.Runner."""
        self._sampler.grammars = grammars

    def agree(self, agree: Agree) -> None:
        """See CpuRunner."""
        self._sampler.filler.agree = agree

    @torch.inference_mode()
    def launch(self, plan: Plan) -> CudaInFlight:
        """Queue the plan."""
        with memory_errors():
            return self._launch(plan)

    def _launch(self, plan: Plan) -> CudaInFlight:
        main = self._device.main
        self._update_rows(plan)
        self._swaps.start(plan)
        self._swaps.need(b for join in plan.joins for b in join.blocks)
        self._swaps.need(b for update in plan.tables for b in update.blocks)
        inputs = self._rows.inputs(plan)
        flight = CudaInFlight(plan, inputs, main.record(), self._collect)
        self._swaps.copy(plan)
        if inputs.rows:
            flight.draw = self._sampler.prepare(inputs.rows, inputs.draw_at, inputs.runs)
        if inputs.is_steady:
            self._decode(flight)
        else:
            self._mixed(flight)
        flight.done = main.record()
        self._launched = plan.number
        self._newest = flight
        return flight

    @torch.inference_mode()
    def reset(self, launched: int) -> None:
        """See engine.core.Runner. Recorded graphs hold the addresses of pool and rows, which stay.

        An error of the device that stays is raised here again.
        """
        self._device.synchronize()
        sizes = self._sizes
        rows, width = sizes.max_num_seqs, sizes.table_width
        self._rows = Rows(rows, width, sizes.num_blocks, sizes.block_size, is_ahead=True)
        self._sampler.reset()
        self._swaps.reset()
        self._fresh, self._joined, self._chosen, self._newest = {}, {}, (), None
        self._launched = launched
        self._device.main.run(self._clear)
        self._device.synchronize()
        self._device.free_bytes()  # gives back what torch keeps and does not use

    def _clear(self) -> None:
        """Blocks are written before they are read, but a step that failed may have left NaN."""
        self._pool.zero_()
        self._state.clear()

    def facts(self) -> Facts:
        """Costs by the device's own clock, and which copies are done."""
        late = self._sampler.filler.late_rows()
        return self._costs.facts(self._swaps.copies_done(self._launched), late)

    def await_copies(self, number: int) -> None:
        """Wait for the copies of all plans up to `number`: another rank's are done, and the blocks
        that they touch may be used again."""
        self._swaps.await_all(number)

    def close(self) -> None:
        """Free pools, graphs and weights, after all queued work."""
        self._device.synchronize()
        self._newest = None
        self._sampler.close()
        self._model.prepare(self._sizes.limits)  # it drops its graph, which refers to the model
        for name in ("_steps", "_swaps", "_pool", "_state", "_model", "_sampler"):
            self.__dict__.pop(name, None)

    @torch.inference_mode()
    def _collect(self, flight: CudaInFlight) -> StepResult:
        plan, inputs = flight.plan, flight.inputs
        if not (plan.num_tokens or plan.num_samples):
            self._swaps.wait()  # nothing else is under way: the core waits for a copy, or a mask
            self._sampler.filler.wait_for_late()
        flight.done.wait()
        if inputs.scored is None:  # scoring's time is no prefill cost
            took_s = flight.done.since(flight.began)
            verifies = any(chunk.num_draws > 1 for chunk in plan.chunks)
            self._costs.saw_step(
                took_s, inputs.num_tokens, inputs.num_chunk_tokens, is_verification=verifies
            )
            if inputs.num_tokens and not inputs.num_chunk_tokens:
                self._costs.saw_width(took_s, inputs.num_tokens, is_verification=verifies)
        scores = {}
        if inputs.scored is not None and flight.scores is not None:
            scores = inputs.scored.by_row(flight.scores)
        if len(scores) < (inputs.scored is not None) or (flight.draw and flight.result is None):
            raise InvariantViolated(f"plan {plan.number} is done, and its results did not come")
        if flight.draw is None or flight.result is None:
            return StepResult(plan.number, prompt_logprobs=scores)
        self._follow(flight)
        drawn = self._sampler.finish(flight.draw, inputs.rows, flight.result)
        self._joined |= self._rows.drew(inputs, drawn.tokens, drawn.late)
        return step_result(plan.number, inputs, drawn, scores, flight.hidden)

    # ------------------------------------------------------------ grammars

    def _masked(self, flight: CudaInFlight, draw: Draw) -> Draw:
        """The flight's draw, with the masks of its constrained rows: they need the tokens of the
        flight before, and are filled while the device computes this one's logits. A row that was
        late in the flight before computes what does not exist: it is late again."""
        if draw.layout.constrained:
            if self._newest is not None:
                self._follow(self._newest)
            inputs, computed = flight.inputs, self._device.main.record()
            draw = flight.draw = self._sampler.mask(
                draw, inputs.draw_at, computed.is_done, is_alone=inputs.is_all_drawing
            )
        return draw

    def _follow(self, flight: CudaInFlight) -> None:
        """Constrained rows follow the flight's tokens, once; waits for them."""
        draw = flight.draw
        if flight.is_followed or draw is None or not draw.layout.constrained:
            return
        flight.done.wait()
        if flight.result is not None:
            self._sampler.follow(draw, len(flight.inputs.rows), flight.result)
            flight.is_followed = True

    # ------------------------------------------------------------ changes sent to the device

    def _update_rows(self, plan: Plan) -> None:
        for row in plan.leaves:
            self._rows.leave(row)
            self._sampler.leave(row)
        for join in plan.joins:
            self._join(join)
        for update in plan.tables:
            self._rows.update_table(update)
            self._fresh[update.row] = min(update.start, self._fresh.get(update.row, update.start))

    def _join(self, join: RowJoin) -> None:
        self._rows.join(join)
        self._sampler.join(join)
        self._fresh[join.row] = 0
        self._joined[join.row] = join.tokens[-1]

    def _changes(self, inputs: StepInputs) -> tuple[Ints, Ints]:
        """Indices of RowState.flat that change, each once, and their new values."""
        state, size = self._state, len(self._state.latest)
        latest, computed, chosen, tables = (
            int(part.storage_offset())
            for part in (state.latest, state.computed, state.chosen, state.tables)
        )
        width = state.tables.shape[1]
        at: list[Ints] = []
        to: list[Ints] = []
        for row, start in self._fresh.items():
            blocks = self._rows.table(row, start)
            first = tables + row * width + start
            at.append(np.arange(first, first + len(blocks)))
            to.append(blocks)
        joined = np.array(list(self._joined), np.int64)
        at.append(latest + joined)
        to.append(np.array(list(self._joined.values()), np.int64))
        # A steady step advances `computed` on the device; for other steps the host sends it.
        moved = joined if inputs.is_steady else np.union1d(joined, inputs.computing)
        at.append(computed + moved)
        done = self._rows.computed(moved)
        to.append(done - np.isin(moved, inputs.computing) if inputs.is_steady else done)
        if inputs.is_steady and inputs.rows is not self._chosen:
            at.append(np.arange(chosen, chosen + size))
            to.append(np.append(inputs.at, np.full(size - len(inputs.at), -1)))
        return np.concatenate(at), np.concatenate(to)

    def _change(self, inputs: StepInputs, at: torch.Tensor, to: torch.Tensor) -> None:
        """Write the changes on the device; until here they stay to be sent by a later plan."""
        self._device.main.run(partial(self._write, at, to))
        self._fresh, self._joined = {}, {}
        if inputs.is_steady:
            self._chosen = inputs.rows

    def _write(self, at: torch.Tensor, to: torch.Tensor) -> None:
        self._state.flat.index_copy_(0, at, to.int())

    def _send(self, parts: Sequence[Ints]) -> list[torch.Tensor]:
        """The parts on the device, after one copy."""
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-len(part) // ALIGNED) * ALIGNED
        packed = np.zeros(end, np.int64)
        for start, part in zip(starts, parts, strict=True):
            packed[start : start + len(part)] = part
        there = self._device.upload(packed)
        return [there[s : s + len(part)] for s, part in zip(starts, parts, strict=True)]

    # ------------------------------------------------------------ steps

    def _decode(self, flight: CudaInFlight) -> None:
        """Every row decodes, from inputs on the device."""
        changes = self._changes(flight.inputs)
        if len(changes[0]):
            self._change(flight.inputs, *self._send(changes))
        if flight.draw is None:
            return
        self._device.main.run(partial(self._compute_decode, flight, flight.draw))
        draw = self._masked(flight, flight.draw)
        self._device.main.run(partial(self._draw_decode, flight, draw))

    def _compute_decode(self, flight: CudaInFlight, draw: Draw) -> None:
        flight.logits = self._steps.compute(len(flight.inputs.rows), draw)

    def _draw_decode(self, flight: CudaInFlight, draw: Draw) -> None:
        logits, flight.logits = flight.logits, None
        tokens = self._steps.draw(len(flight.inputs.rows), draw, logits)
        flight.result = self._device.download(self._sampler.result(draw, logits, tokens))

    def _mixed(self, flight: CudaInFlight) -> None:
        """Chunks, forks and decodes, from inputs that the host packed: layers in a recorded launch
        where one is large enough, the rest op by op."""
        inputs, none = flight.inputs, np.zeros(0, np.int64)
        recorded = self._steps.mixed(inputs.num_tokens)
        drawn_from = _drawn_from(inputs)
        where, to, last, at, draw_at, targets, *packed = self._send(
            [
                *self._changes(inputs),
                none if drawn_from is None else drawn_from,
                inputs.at,
                inputs.draw_at,
                none if inputs.scored is None else inputs.scored.targets,
                *_packed(inputs, recorded),
            ]
        )
        self._change(inputs, where, to)
        kept = None if drawn_from is None else last
        compute = partial(self._compute_mixed, flight, recorded, packed, kept, targets)
        self._device.main.run(compute)
        if flight.draw is not None:
            draw = self._masked(flight, flight.draw)
            self._device.main.run(partial(self._draw_mixed, flight, draw, at, draw_at))

    def _compute_mixed(
        self, flight: CudaInFlight, recorded: RecordedMixed | None, packed: list[torch.Tensor],
        last: torch.Tensor | None, targets: torch.Tensor,
    ) -> None:  # fmt: skip
        """The logits that the flight's rows draw from, its scores and hidden states."""
        inputs, host = flight.inputs, flight.inputs.batch
        logits: torch.Tensor | None = None
        hidden: torch.Tensor | None = None
        if host is not None and recorded is not None:
            logits, hidden = recorded.compute(packed[0], inputs.num_tokens, last)
        elif host is not None:
            logits, hidden = self._forward(inputs, host, packed, last)
        if inputs.hidden and hidden is not None:
            flight.hidden = self._device.download(inputs.hidden_of(hidden))
        if logits is not None and inputs.scored is not None:
            logits, before = inputs.scored.split(logits)
            found = inputs.scored.compute(before[:, : self._model.vocab_size], targets)
            flight.scores = self._device.download(found)
        flight.logits = logits

    def _forward(
        self, inputs: StepInputs, host: ops.AttentionBatch, packed: list[torch.Tensor],
        last: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Logits and, if the step asks for them, hidden states, op by op."""
        tokens, positions, slots, owner, computing = packed
        state = self._state
        width = host.block_tables.shape[1]
        batch = ops.AttentionBatch(
            query_lens=host.query_lens,
            context_lens=host.context_lens,
            block_tables=state.tables[:, :width].index_select(0, computing),
            slots=slots,
            block_size=host.block_size,
        )
        tokens = torch.where(tokens < 0, state.latest[owner], tokens)
        given = tokens, positions, batch, self._pool, last
        if inputs.hidden:
            return self._model.forward_hidden(*given)
        return self._model.forward(*given), None

    def _draw_mixed(
        self, flight: CudaInFlight, draw: Draw, at: torch.Tensor, draw_at: torch.Tensor
    ) -> None:
        logits, flight.logits = flight.logits, None
        if logits is None:
            return
        drawn = self._sampler.draw(draw, logits, at.int(), draw_at)
        self._state.latest.index_copy_(0, at, drawn.clamp(min=0).int())
        flight.result = self._device.download(self._sampler.result(draw, logits, drawn))


def _drawn_from(inputs: StepInputs) -> Ints | None:
    """Packed indices of the tokens that logits are computed of: the last ones of rows that draw,
    for each fork its parent's, which costs a row more and no copy of all logits, and those before
    scored ones. None: of all, in order."""
    last = None if inputs.last is None else inputs.last.numpy()
    if not inputs.parents:
        return last
    if last is None:
        last = np.arange(inputs.num_tokens)
    count = len(inputs.rows) - len(inputs.parents)
    return np.concatenate([last[:count], last[inputs.parents], last[count:]])


def _packed(inputs: StepInputs, recorded: RecordedMixed | None) -> list[Ints]:
    """What a step's layers need on the device; nothing, if nothing is computed."""
    if inputs.tokens is None or inputs.positions is None or inputs.batch is None:
        return []
    tokens, positions, batch = inputs.tokens.numpy(), inputs.positions.numpy(), inputs.batch
    if recorded is not None:
        return [recorded.pack(tokens, positions, batch, inputs.computing)]
    owner = np.repeat(inputs.computing, batch.query_lens)
    return [tokens, positions, batch.slots.numpy(), owner, inputs.computing]


def step_bytes(
    device: Device,
    kernels: ops.Backend,
    model: CausalModel,
    config: Config,
    model_limit: int,
    kv_dtype: torch.dtype,
) -> StepBytes:
    """Memory of steps, by running the largest ones. Of those op by op all rows draw, with
    provisional tokens, penalties and log probabilities; token counts are included."""
    from streamer.kernels.gpu.fixed_step import RowState

    count, rows = batched_tokens(config, "cuda"), config.max_num_seqs
    longest = min(count, model_limit)
    lens = [longest] * (count // longest) + [count % longest] * (count % longest > 0)

    @torch.inference_mode()
    def work() -> None:
        counts = TokenCounts(model.vocab_size, device, rows)
        num_last = min(count, rows + MAX_SCORED)
        logits = _prompts(model, pool, config.block_size, lens, num_last)
        num_drawn = rows if config.speculation_method == "none" else num_last
        x = logits[:num_drawn, : model.vocab_size].to(torch.float32, copy=True)
        at = torch.arange(len(x), device=device.where)
        counts.penalise(x, at, at % rows, torch.ones(len(x), 1, 3, device=device.where))
        x.log_softmax(-1)

    pool = kernels.new_pool(
        -(-longest // config.block_size),
        model.num_layers,
        config.block_size,
        model.num_kv_heads,
        model.head_dim,
        kv_dtype,
        device.where,
    )
    op_by_op = device.peak_bytes(work)
    if model.recordable is None:
        return StepBytes(op_by_op, 0)
    width = -(-model_limit // config.block_size)
    state = RowState(rows, width, config.block_size, device.where)
    return StepBytes(op_by_op, recorded_bytes(device, model.recordable, state, pool, count))


def _prompts(
    model: CausalModel, pool: torch.Tensor, block_size: int, lens: Sequence[int], num_last: int
) -> torch.Tensor:
    """Logits of the first num_last tokens of prompts of these lengths, each from its first token.

    All are stored in the pool's first blocks, where they overwrite each other: no value is used.
    """
    where = pool.device
    there = torch.cat([torch.arange(n, device=where) for n in lens])
    blocks = torch.arange(-(-max(lens) // block_size), dtype=torch.int32, device=where)
    batch = ops.AttentionBatch(
        query_lens=lens,
        context_lens=lens,
        block_tables=blocks.repeat(len(lens), 1),
        slots=there,
        block_size=block_size,
    )
    return model.forward(there % model.vocab_size, there, batch, pool, there[:num_last])

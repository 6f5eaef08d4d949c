"""CpuRunner: applies Plans to the rows, the KV pools and the model, and returns what was drawn.

Owns both KV pools and the resident rows; does not choose which rows run. Called only from the
engine's GPU thread, made by load.py. A launched plan is done when `launch` returns (depth 0). After
a row's decode its next one begins at once, on the threads that have nothing to do while this one
returns, the result is applied and a plan is made: most often that is what the plan asks for.
"""

from __future__ import annotations

import time

import msgspec
import torch

from streamer.constraints.filler import Agree
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Facts, Plan, StepResult, TokenLogprob, check_moves
from streamer.errors import InvariantViolated
from streamer.kernels import ops
from streamer.model.runner.costs import Costs, probe_copy
from streamer.model.runner.device import memory_errors
from streamer.model.runner.draft import Drafter, DraftModel
from streamer.model.runner.inputs import Rows, StepInputs, step_result
from streamer.model.runner.interface import CausalModel, RunnerSizes
from streamer.model.sampling.host import Sampler

# Rows of a decode that begins before its plan. Between two steps of `half` in int4 Python took 0.75
# of 15 ms, of which one other thread makes good a half; in turn, eight steps each, one row takes
# 0.976 of the time, two 0.994, eight 1.01, 32 1.03 with a wide spread: arithmetic bounds them, and
# Python has more to do meanwhile (2 cores of an EPYC Zen 3, 2026-11-28, medians of pairs).
BEGUN_ROWS = 1


class Done:
    """A plan that finished inside `launch`."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def collect(self) -> StepResult:
        """The plan's result; does not wait."""
        return self._result


class CpuRunner:
    """See core.plan.Plan for the order of effects; a wrong plan raises InvariantViolated."""

    depth = 0

    def __init__(
        self,
        kernels: ops.CpuBackend,
        model: CausalModel,
        sizes: RunnerSizes,
        draft: DraftModel | None = None,
    ) -> None:
        self._kernels = kernels
        shape = sizes.pool_shape(model)
        self.model = model
        self._sizes = sizes
        self._pool = kernels.new_pool(sizes.num_blocks, *shape)
        self._host_pool = kernels.new_pool(sizes.num_host_blocks, *shape)
        model.prepare(sizes.limits)
        self._rows, self._sampler = self._no_rows()
        self._block_bytes = self._pool[:1].numel() * self._pool.element_size()
        self._costs = Costs(self._block_bytes, probe_copy)
        self._draft = draft
        self._drafter = self._new_drafter()
        self._host_upto = 0  # host blocks below have been written, which allocates their memory
        self._copies_done = 0
        self._inference = torch.inference_mode()
        self._decoding: tuple[float, int, bool] | None = None  # see `_saw_width`
        self._begun_at: float | None = None  # when the decode began that no plan has asked for yet

    def _no_rows(self) -> tuple[Rows, Sampler]:
        sizes = self._sizes
        rows = Rows(sizes.max_num_seqs, sizes.table_width, sizes.num_blocks, sizes.block_size)
        return rows, Sampler(self._kernels, self.model.vocab_size, sizes.max_num_seqs)

    def _new_drafter(self) -> Drafter | None:
        if self._draft is None:
            return None
        parts = self._rows, self._sampler, self._costs
        return Drafter(self._kernels, self._draft, self._sizes, *parts)

    @torch.inference_mode()
    def reset(self, launched: int) -> None:
        """See engine.core.Runner. New pools take memory where they are written."""
        self._kernels.stop()
        before = self._sampler
        before.close()
        self._rows, self._sampler = self._no_rows()
        self._sampler.grammars = before.grammars
        self._sampler.filler.agree = before.filler.agree
        self._pool = self._host_pool = torch.empty(0)
        self._drafter = None
        shape = self._sizes.pool_shape(self.model)
        self._pool = self._kernels.new_pool(self._sizes.num_blocks, *shape)
        self._host_pool = self._kernels.new_pool(self._sizes.num_host_blocks, *shape)
        self.model.prepare(self._sizes.limits)
        self._drafter = self._new_drafter()
        self._host_upto = 0
        self._begun_at = None
        self._copies_done = launched

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the pools hold."""
        return self._pool.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return self._block_bytes

    def constrain(self, grammars: Grammars) -> None:
        """See engine.core.Runner."""
        self._sampler.grammars = grammars

    def agree(self, agree: Agree) -> None:
        """How ranks agree on the rows whose masks are there in time; see MaskFiller."""
        self._sampler.filler.agree = agree

    def launch(self, plan: Plan) -> Done:
        """Apply the plan."""
        try:
            with self._inference:  # as a decorator it is made anew each time
                return self._launch(plan)
        except RuntimeError:
            with memory_errors():  # not around each step, which would take 3 us longer
                raise

    def _launch(self, plan: Plan) -> Done:
        self._update_rows(plan)
        self._move_blocks(plan)
        if self._drafter is not None:
            self._drafter.update(plan)
        began = time.perf_counter()
        self._saw_width(plan, began)
        inputs = self._rows.inputs(plan)
        begun_at, self._begun_at = self._begun_at, None
        before_s = 0.0 if begun_at is None or not inputs.is_steady else began - begun_at
        result = self._draw(plan.number, inputs)
        if self._drafter is not None and inputs.batch is not None:
            self._drafter.follow(inputs.batch.slots)
        if inputs.scored is None:  # scoring's time is no prefill cost
            took_s = time.perf_counter() - began
            verifies = any(chunk.num_draws > 1 for chunk in plan.chunks)
            if before_s < took_s:  # else it may have been done long before
                self._costs.saw_step(
                    before_s + took_s,
                    inputs.num_tokens,
                    inputs.num_chunk_tokens,
                    is_verification=verifies,
                )
            if inputs.num_tokens and not inputs.num_chunk_tokens:
                self._decoding = began, inputs.num_tokens, verifies
        self._copies_done = plan.number
        if not (plan.num_tokens or plan.num_samples or plan.leaves or plan.swap_in):
            self._sampler.filler.wait_for_late()
        return Done(self._proposed(plan, result))

    def facts(self) -> Facts:
        """Measured costs; on the CPU the copies of every launched plan are done."""
        return self._costs.facts(self._copies_done, self._sampler.filler.late_rows())

    def await_copies(self, number: int) -> None:
        """See CudaRunner; those of every launched plan are done."""

    def close(self) -> None:
        """Free pools and weights."""
        self._kernels.stop()
        empty = torch.empty(0)
        self._pool = self._host_pool = empty
        self._drafter = self._draft = None
        self._sampler.close()
        self.__dict__.pop("model", None)

    def _saw_width(self, plan: Plan, began: float) -> None:
        """The step before ends here, with all that it took to apply it and to plan this one; unless
        a row joins, for which the engine may have waited."""
        if self._decoding is not None and not plan.joins:
            before, num_tokens, verifies = self._decoding
            self._costs.saw_width(began - before, num_tokens, is_verification=verifies)
        self._decoding = None

    def _proposed(self, plan: Plan, result: StepResult) -> StepResult:
        """The result with what the draft model proposes after it."""
        if self._drafter is None:
            if plan.drafts:
                raise InvariantViolated(f"plan {plan.number} drafts, but there is no draft model")
            return result
        self._drafter.extend(result)
        if not plan.drafts:
            return result
        drafts = [draft for draft in plan.drafts if draft[0] not in result.late]
        began = time.perf_counter()
        proposals = self._drafter.propose(drafts)
        took_s = time.perf_counter() - began
        self._costs.saw_drafting(took_s)
        if self._decoding is not None:  # with it, plain steps would seem to take what drafts do
            before, num_tokens, verifies = self._decoding
            self._decoding = before + took_s, num_tokens, verifies
        return msgspec.structs.replace(result, proposals=proposals)

    def _update_rows(self, plan: Plan) -> None:
        for row in plan.leaves:
            self._rows.leave(row)
            self._sampler.leave(row)
        for join in plan.joins:
            self._rows.join(join)
            self._sampler.join(join)
        for update in plan.tables:
            self._rows.update_table(update)

    def _move_blocks(self, plan: Plan) -> None:
        if not (plan.swap_out or plan.copies or plan.swap_in):
            return
        check_moves(plan, self._pool.shape[0], self._host_pool.shape[0])
        began = time.perf_counter()
        if plan.swap_out:
            self._kernels.swap_blocks(self._pool, self._host_pool, list(plan.swap_out))
            upto = 1 + max(block for _, block in plan.swap_out)
            took_s, is_first = time.perf_counter() - began, upto > self._host_upto
            self._costs.saw_swap(took_s, len(plan.swap_out), is_first=is_first)
            self._host_upto = max(upto, self._host_upto)
        if plan.copies:
            src, dst = torch.tensor(plan.copies).T
            self._kernels.copy_blocks(self._pool, src, dst)
        began = time.perf_counter()
        if plan.swap_in:
            self._kernels.swap_blocks(self._host_pool, self._pool, list(plan.swap_in))
            self._costs.saw_swap(time.perf_counter() - began, len(plan.swap_in))

    def _draw(self, number: int, inputs: StepInputs) -> StepResult:
        if inputs.rows:
            self._sampler.prepare(inputs.rows, inputs.draw_at, inputs.runs)
        began = time.perf_counter()
        logits, hidden = self._logits(inputs)
        computed_s = time.perf_counter() - began
        self._sampler.await_masks(computed_s, is_alone=inputs.is_all_drawing)
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        if logits is not None and inputs.scored is not None:
            scored, (logits, before) = inputs.scored, inputs.scored.split(logits)
            targets = torch.from_numpy(scored.targets)
            scores = scored.by_row(scored.compute(before[:, : self.model.vocab_size], targets))
        if logits is None or not inputs.rows:
            return StepResult(number, prompt_logprobs=scores)
        if inputs.parents:
            logits = torch.cat([logits, logits[inputs.parents]])
        drawn = self._sampler.sample(logits, inputs.rows, inputs.draw_at, inputs.runs)
        self._rows.drew(inputs, drawn.tokens, drawn.late)
        if len(inputs.rows) <= BEGUN_ROWS and inputs.is_steady and self._draft is None:
            self._begin_next(drawn.tokens)
        return step_result(number, inputs, drawn, scores, hidden)

    def _begin_next(self, drawn: list[int]) -> None:
        """Begin the decode that comes next unless a row joins, leaves or waits."""
        step = self._rows.next_steady() if min(drawn) >= 0 else None
        if step is None:
            return
        began = time.perf_counter()
        if self.model.begin(step.tokens, step.positions, step.batch, self._pool):
            self._begun_at = began

    def _logits(self, inputs: StepInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[S + P, V] for the rows that draw and the tokens that are scored; hidden states."""
        if inputs.tokens is None or inputs.positions is None or inputs.batch is None:
            return None, None
        given = inputs.tokens, inputs.positions, inputs.batch, self._pool, inputs.last
        if not inputs.hidden:
            return self.model.forward(*given), None
        logits, states = self.model.forward_hidden(*given)
        return logits, inputs.hidden_of(states)

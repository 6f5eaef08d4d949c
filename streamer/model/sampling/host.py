"""Sampler: logits and each row's parameters -> token ids, log probabilities, failed rows.

Owns the per-row state that sampling needs (parameters, token history for penalties); the runner
calls `join` and `leave` for its rows and `sample` once a step. Uses no Plan, block or clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamer.constraints.filler import LATE_S, Begun, Filled, MaskFiller
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Candidates, RowJoin, TokenLogprob
from streamer.kernels import ops, reference
from streamer.kernels.philox import USE_SAMPLE
from streamer.model.sampling.rows import Layout, RowState, RowTable
from streamer.model.sampling.runs import CUT, FAILED, Run, cut

Top = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # CpuBackend.top


class SampleOutput(msgspec.Struct, frozen=True):
    """What one step drew.

    tokens    parallel to the rows asked for; FAILED where the row failed: its logits have a NaN, a
              +inf or nothing finite (-inf is a ban); CUT beyond the end of its run, and where a
              row of a beam has candidates
    logprobs  index into tokens -> TokenLogprob, for rows that asked
    candidates  index into tokens -> as in StepResult
    errors    index into tokens -> why it failed, where that is not its logits
    forced    row -> the tokens that alone may come next
    late      row -> its last token, where masks were not there in time: it drew nothing
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprob]
    candidates: dict[int, Candidates] = {}
    errors: dict[int, str] = {}
    forced: dict[int, tuple[int, ...]] = {}
    late: dict[int, int] = {}


class Step(NamedTuple):
    """What draws depend on beside their logits and the rows' settings.

    before  index -> tokens that the row's history lacks
    masks   of the layout's constrained rows, in order
    """

    positions: Sequence[int] | NDArray[np.int64]
    before: Mapping[int, Sequence[int]]
    masks: Filled | None = None


class Laid:
    """The layout of a list of rows, and the settings of those of them that draw."""

    __slots__ = ("constrained", "draws", "layout", "rows")

    def __init__(self, table: RowTable, rows: tuple[int, ...]) -> None:
        self.rows = rows
        self.layout = Layout(table, rows)
        self.constrained = torch.tensor(self.layout.constrained, dtype=torch.int64)
        slots = self.layout.slots[self.layout.drawn]
        self.draws = ops.Draws(
            self.layout.drawn, table.top_k[slots], table.settings[slots], table.origin[slots]
        )

    def is_of(self, rows: tuple[int, ...]) -> bool:
        return rows is self.rows or rows == self.rows


class Sampler:
    """Samples for up to max_rows resident rows; one instance a runner, on its thread.

    Order of processing, as vLLM: logit_bias and the min_tokens mask; repetition, then frequency
    and presence penalties; the grammar's mask; temperature; min_p, top_k, top_p; Gumbel-max over
    what is left. Log probabilities are of the logits as the model gave them.

    grammars  needed before a row with one joins
    """

    grammars: Grammars | None = None

    def __init__(self, kernels: ops.CpuBackend, vocab_size: int, max_rows: int) -> None:
        self._kernels = kernels
        self.vocab_size = vocab_size
        self._table = RowTable(max_rows, USE_SAMPLE)
        self._version = 0  # of the table, when the layouts were made
        self._laid: Laid | None = None
        self._before: Laid | None = None
        self.filler = MaskFiller(vocab_size)
        self._begun: Begun | None = None  # masks for the next `sample`
        self._masks: Filled | None = None  # the same, once they are there

    def close(self) -> None:
        """End its thread."""
        self.filler.close()

    def sharing(self) -> Sampler:
        """Another sampler of the same rows, for `propose` with other lists of them."""
        other = Sampler(self._kernels, self.vocab_size, 0)
        other._table = self._table
        return other

    def join(self, join: RowJoin) -> None:
        """The row slot holds this sequence now."""
        self._table.put(join.row, RowState(join, self.vocab_size, self.grammars))

    def leave(self, row: int) -> None:
        self._table.remove(row)
        self.filler.drop(row)

    def prepare(
        self,
        rows: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64],
        runs: Sequence[Run] = (),
    ) -> None:
        """Begin to fill the masks of the next `sample`, which has the same arguments."""
        layout = self._laid_for(rows).layout
        self._masks = None
        if layout.constrained:
            self._begun = self.filler.begin(layout.wanted(positions, runs))

    def await_masks(self, wait_s: float, *, is_alone: bool) -> None:
        """Wait for the masks that `prepare` began; rows whose are not there in time draw nothing.

        wait_s    that it may take, beside rows that need none
        is_alone  nothing is computed but for the rows that draw
        """
        begun, self._begun = self._begun, None
        if begun is not None and self._laid is not None:
            layout = self._laid.layout
            begun.wait(max(wait_s, LATE_S))
            is_alone = is_alone and len(layout.constrained) == len(layout.states)
            self._masks = begun.take(is_alone=is_alone)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64],
        runs: Sequence[Run] = (),
    ) -> SampleOutput:
        """Draw one token for each of `rows` and append it to the row's history.

        logits     [S, V] fp32 or bf16, one row of it for each of `rows`; may be overwritten
        rows       distinct, but for the draws of a run
        positions  absolute position of the token to be drawn: the number of tokens before it
        """
        laid, logits = self._laid_for(rows), self._narrow(logits)
        layout = laid.layout
        raw = logits[layout.logprobs].float() if layout.logprobs else None
        before = {i: tokens for run in runs for i, tokens in run.before()}
        masks, self._masks = self._masks, None
        if layout.constrained and masks is None:
            masks = self.filler.fill(layout.wanted(positions, runs))
        tokens = self._tokens(logits, laid, Step(positions, before, masks))
        cut(tokens, runs)
        errors, late = {}, {}
        if masks is not None:
            late = layout.late(masks.late, tokens)
            layout.follow(tokens)
            errors = layout.at_rows(masks.errors)
        for i in layout.edited:
            history = layout.states[i].history
            if history is not None and tokens[i] >= 0:
                history.append(tokens[i])
        found = Scores({}, {})
        if raw is not None:
            drawn = torch.tensor([tokens[i] for i in layout.logprobs])
            top = top_logprobs(raw, drawn, layout.num_top, self._kernels.top)
            found = scores_by_index(layout, tokens, *(t.tolist() for t in top))
        forced = layout.forced(tokens) if masks is not None else {}
        return SampleOutput(tokens, *found, errors, forced, late)

    def propose(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64],
        before: Sequence[Sequence[int]],
    ) -> list[int]:
        """What `sample` would draw from these logits, another model's, if each row had drawn the
        tokens of `before` first; FAILED as there. Nothing is remembered."""
        laid = self._laid_for(rows)
        layout, masks = laid.layout, None
        if layout.constrained:
            masks = self.filler.fill_last(layout.wanted_after(positions, before))
        step = Step(positions, dict(enumerate(before)), masks)
        return self._tokens(self._narrow(logits), laid, step)

    def _narrow(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]

    def _tokens(self, logits: torch.Tensor, laid: Laid, step: Step) -> list[int]:
        """One token for each row of the layout, FAILED where there is none."""
        layout = laid.layout
        best, best_ids = self._kernels.best(logits)
        tops: list[float] = best.tolist()
        tokens: list[int] = best_ids.tolist()
        bad = [] if math.isfinite(sum(tops)) else np.flatnonzero(~np.isfinite(tops)).tolist()
        if not layout.is_plain_greedy:
            x = self._edited(logits, layout, step, bad, tokens)
            if step.masks is not None:
                self._ban(x, laid, step.masks, bad, tokens)
            self._draw(x, laid, step.positions, tokens)
        for i in bad:
            tokens[i] = FAILED
        return tokens

    def _laid_for(self, rows: Sequence[int]) -> Laid:
        requested = tuple(rows)  # no copy of a tuple: most often it is the last step's object
        if self._version != self._table.version:
            self._laid, self._before = None, None
            self._version = self._table.version
        if self._laid is None or not self._laid.is_of(requested):
            # after a step that verified, the rows of the one before it come again
            self._laid, self._before = self._before, self._laid
        if self._laid is None or not self._laid.is_of(requested):
            self._laid = Laid(self._table, requested)
        return self._laid

    def _edited(
        self,
        logits: torch.Tensor,
        layout: Layout,
        step: Step,
        bad: list[int],
        tokens: list[int],
    ) -> torch.Tensor:
        """The logits to draw from. `tokens` holds the argmax of each row of `logits`, and gets that
        of the greedy ones that are edited; those with all banned go to `bad`."""
        if not (layout.edited or layout.floors):
            return logits
        x = logits.float().contiguous()
        if bad:
            x[bad] = 0.0
        touched = self._edit(x, layout, step)
        if touched:
            for i, token in zip(touched, x[touched].argmax(-1).tolist(), strict=True):
                tokens[i] = token
        bad += self._masked_out(x, layout, step.positions)
        return x

    def _ban(
        self, x: torch.Tensor, laid: Laid, masks: Filled, bad: list[int], tokens: list[int]
    ) -> None:
        """Apply the grammars' masks in place in x; `bad` and `tokens` as in `_edited`."""
        words = torch.from_numpy(masks.words)
        best, best_ids = self._kernels.ban(x, laid.constrained, words)
        tops: list[float] = best.tolist()
        ids: list[int] = best_ids.tolist()
        for n, i in enumerate(laid.layout.constrained):
            tokens[i] = ids[n]
            if not math.isfinite(tops[n]):
                bad.append(i)

    def _draw(
        self,
        x: torch.Tensor,
        laid: Laid,
        positions: Sequence[int] | NDArray[np.int64],
        tokens: list[int],
    ) -> None:
        """Write what the rows draw that are not greedy into `tokens`."""
        at = laid.layout.drawn
        if at:
            laid.draws.origin.numpy()[:, 2] = np.asarray(positions)[at]
            drawn: list[int] = self._kernels.draw(x, laid.draws).tolist()
            for i, token in zip(at, drawn, strict=True):
                tokens[i] = token

    def _masked_out(
        self, x: torch.Tensor, layout: Layout, positions: Sequence[int] | NDArray[np.int64]
    ) -> list[int]:
        """Rows in which min_tokens bans every token the model would allow: nothing to draw."""
        below = layout.below_floor(positions)
        if not below:
            return []
        is_open = x[below].amax(-1).isfinite().tolist()
        closed = [i for i, has_token in zip(below, is_open, strict=True) if not has_token]
        if closed:
            x[closed] = 0.0
        return closed

    def _edit(self, x: torch.Tensor, layout: Layout, step: Step) -> list[int]:
        """Bias, min_tokens mask and penalties, in place in x [S, V]; the greedy rows it touched."""
        flat, vocab = x.view(-1), x.shape[1]
        below = layout.below_floor(step.positions)
        if biases := layout.biases(vocab):
            ids, values = map(torch.from_numpy, biases)
            flat.index_add_(0, ids, values)
        if below:
            flat.index_fill_(0, torch.from_numpy(layout.masked(below, vocab)), -torch.inf)
        _penalise(flat, vocab, layout, step.before)
        edited = {*below, *layout.edited}
        return [i for i in layout.greedy if i in edited]


def _penalise(
    flat: torch.Tensor, vocab: int, layout: Layout, before: Mapping[int, Sequence[int]]
) -> None:
    """Repetition, then frequency and presence, on the tokens of each row's history alone."""
    held = [(i, h) for i in layout.edited if (h := layout.states[i].history) is not None]
    if not held:
        return
    seen = [(i, *history.after(before.get(i, ()))) for i, history in held]
    sizes = [len(ids) for _, ids, _ in seen]
    settings = np.array([layout.states[i].penalties for i, _ in held], np.float32).repeat(sizes, 0)
    at = torch.from_numpy(np.concatenate([ids + i * vocab for i, ids, _ in seen]))
    counts = torch.from_numpy(np.concatenate([counts for *_, counts in seen]))
    values = penalised(flat.index_select(0, at), counts, torch.from_numpy(settings))
    flat.index_copy_(0, at, values)


def penalised(values: torch.Tensor, counts: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that a row has seen, after its penalties; shapes broadcast.

    counts    how often each was output, fp32; 0: it is in the prompt alone
    settings  [..., 3]: repetition, frequency and presence penalty
    """
    repetition, frequency, presence = settings.unbind(-1)
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - (frequency * counts + presence * (counts > 0))


def top_logprobs(
    raw: torch.Tensor, drawn: torch.Tensor, num_top: int, top: Top = reference.top
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of logits [L, V] fp32: of tokens `drawn` [L], and the num_top best of each row
    with their ids -> [L], [L, num_top], [L, num_top]. For a failed row's -1 they mean nothing.

    Of equal ones the lowest ids come first, so that the best k are the same for any larger num_top:
    bf16 logits are often equal, and neighbours ask for other numbers.

    top  the backend's, of the logits' device
    """
    logs = torch.log_softmax(raw, -1)
    own = logs.gather(1, drawn.clamp(min=0).unsqueeze(1))[:, 0]
    return own, *top(logs, num_top)


class Scores(NamedTuple):
    """What top_logprobs found, by index into the tokens: as in SampleOutput."""

    logprobs: dict[int, TokenLogprob]
    candidates: dict[int, Candidates]


def scores_by_index(
    layout: Layout, tokens: list[int],
    own: list[float], values: list[list[float]], ids: list[list[int]],
) -> Scores:  # fmt: skip
    """What top_logprobs found, as lists, for those of layout.logprobs that drew a token, or would:
    of a beam's row the alternatives alone."""
    found, beams = Scores({}, {}), set(layout.beams)
    for n, i in enumerate(layout.logprobs):
        if tokens[i] < 0:
            continue
        num_top = layout.states[i].num_top
        if i in beams:
            found.candidates[i] = Candidates(ids[n][:num_top], values[n][:num_top])
        else:
            top = zip(ids[n][:num_top], values[n], strict=False)
            found.logprobs[i] = TokenLogprob(tokens[i], own[n], tuple(top))
    for i in found.candidates:
        tokens[i] = CUT
    return found

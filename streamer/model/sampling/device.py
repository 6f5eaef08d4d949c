"""DeviceSampler: what sampling/host.py does, on the device, without the host reading a number.

Owns the rows' settings on the device and the token counts of those with penalties. The host
gives the rows that draw and their positions (`prepare`); all else is queued in the device's main
stream, and its result is read after the step's event (`finish`). Order of processing, tables and
formulas are sampling/host.py's. Called by runner/cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.constraints.filler import LATE_S, MaskFiller
from streamer.constraints.grammars import Grammars
from streamer.core.plan import RowJoin
from streamer.kernels import ops
from streamer.kernels.philox import USE_SAMPLE
from streamer.model.runner.device import Device
from streamer.model.sampling.host import (
    SampleOutput,
    Scores,
    penalised,
    scores_by_index,
    top_logprobs,
)
from streamer.model.sampling.rows import History, Layout, RowState, RowTable
from streamer.model.sampling.runs import Run, cut

Ints = NDArray[np.int64]


class TokenCounts:
    """[rows, V] fp32: how often each token was output by a row with penalties; -1: never seen.

    Dense, unlike rows.History: a row's 0.6 MB (150,000 tokens) are 0.2 us of the device's memory
    traffic, and the distinct tokens need no list. Made whole, so that no row that joins can find
    the memory taken: 156 MB of 256 rows, which `step_bytes` counts.
    """

    def __init__(self, vocab_size: int, device: Device, rows: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._counts = torch.empty(rows, vocab_size, device=device.where)

    def join(self, row: int, ids: Ints, counts: NDArray[np.float32]) -> None:
        """The row has these tokens, output `counts` times each."""
        there = self._device.upload(ids), self._device.upload(counts)
        self._device.main.run(partial(self._set, row, *there))

    def penalise(self, x: torch.Tensor, at: torch.Tensor, rows: torch.Tensor,
                 settings: torch.Tensor, more: torch.Tensor | None = None) -> None:  # fmt: skip
        """In place, the logits x [S, V] at `at`, of row slots `rows`; settings [n, 1, 3] as in
        `penalised`; more: indices into the flattened counts [n, V], of tokens output since."""
        counts, logits = self._counts[rows], x[at]
        if more is not None:
            _count(counts.view(-1), more)
        changed = penalised(logits, counts.clamp(min=0), settings)
        x[at] = torch.where(counts >= 0, changed, logits)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a drawn token of each of these (a failed row's -1 as token 0, never used)."""
        _count(self._counts.view(-1), rows * self._vocab_size + tokens.clamp(min=0))

    def _set(self, row: int, ids: torch.Tensor, counts: torch.Tensor) -> None:
        self._counts[row].fill_(-1.0).index_copy_(0, ids, counts)


def _count(flat: torch.Tensor, at: torch.Tensor) -> None:
    """Add 1 at each of these indices, of which some may be equal."""
    flat.index_copy_(0, at, flat[at].clamp(min=0))
    flat.index_add_(0, at, torch.ones(1, device=flat.device).expand(len(at)))


def _ban(x: torch.Tensor, at: torch.Tensor, words: torch.Tensor) -> None:
    """-inf in rows `at` of the logits x where their bit is 0."""
    ids = torch.arange(x.shape[1], device=x.device)
    is_allowed = (words[:, ids >> 5] >> (ids & 31)) & 1
    x[at] = torch.where(is_allowed > 0, x[at], -torch.inf)


class Draw(NamedTuple):
    """What one step's drawing rows need beside their settings; tensors are on the device.

    bias        indices into the flattened logits, and the values to add
    mask        indices into the flattened logits that become -inf
    masks       indices of rows with a grammar, and their words as in constraints.masks.Filled
    errors      index -> why it has no mask
    late        indices among layout.constrained of those whose masks were not there in time
    penalties   indices of rows, their row slots, their settings [n, 1, 3]
    logprobs    indices of rows that asked for them
    runs        those of the step
    more        as in TokenCounts.penalise: the provisional tokens before the draws of runs
    counted     indices of rows whose tokens are counted when drawn, and their row slots: those with
                penalties that are in no run
    """

    layout: Layout
    has_filters: bool
    bias: tuple[torch.Tensor, torch.Tensor] | None
    mask: torch.Tensor | None
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    logprobs: torch.Tensor | None
    runs: Sequence[Run] = ()
    more: torch.Tensor | None = None
    counted: tuple[torch.Tensor, torch.Tensor] | None = None
    masks: tuple[torch.Tensor, torch.Tensor] | None = None
    errors: Mapping[int, str] = {}
    late: Sequence[int] = ()

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the logits as the model gave them."""
        is_edited = self.mask is not None or self.penalties is not None
        return self.bias is None and not is_edited and not self.layout.constrained


class DeviceSampler:
    """Samples for up to max_rows resident rows; one instance a runner, on its thread.

    grammars  needed before a row with one joins
    """

    grammars: Grammars | None = None

    def __init__(
        self, device: Device, kernels: ops.Backend, vocab_size: int, max_rows: int
    ) -> None:
        from streamer.kernels.gpu.sampling.sample import SamplingRows, sample

        self._device = device
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._settings = SamplingRows(max_rows, device.where)
        self._sample = sample
        self._counts = TokenCounts(vocab_size, device, max_rows)
        self.filler = MaskFiller(vocab_size)
        self.reset()

    def reset(self) -> None:
        """No row has joined."""
        self.filler.reset()
        self._table = RowTable(self._max_rows, USE_SAMPLE)
        self._has_joined = False  # since the settings were sent
        self._uncounted: dict[int, History] = {}  # rows whose tokens the device has not counted
        self._run_tokens: dict[int, list[int]] = {}  # and what rows drew in runs since
        self._rows: tuple[int, ...] = ()
        self._draw: Draw | None = None  # of those rows, without a mask

    def close(self) -> None:
        """End its thread."""
        self.filler.close()

    def join(self, join: RowJoin) -> None:
        """The row slot holds this sequence now; `prepare` sends it to the device."""
        state = RowState(join, self._vocab_size, self.grammars)
        self._table.put(join.row, state)
        if state.history is not None:
            self._uncounted[join.row] = state.history
        self._has_joined = True

    def leave(self, row: int) -> None:
        self._table.remove(row)
        self._uncounted.pop(row, None)
        self._run_tokens.pop(row, None)
        self.filler.drop(row)
        self._draw = None

    def prepare(self, rows: tuple[int, ...], positions: Ints, runs: Sequence[Run] = ()) -> Draw:
        """What rows need to draw at these positions; uploads what the device lacks of rows that
        joined. Without memory for all of it, the next call uploads the rest."""
        self._send_counts()
        if self._has_joined:
            table = self._table
            packed = self._settings.pack(table.top_k, table.settings, table.origin)
            self._device.main.run(
                partial(self._settings.packed.copy_, self._device.upload(packed))  # type: ignore[arg-type]
            )
            self._has_joined = False
        draw = self._draw
        if draw is None or (rows is not self._rows and rows != self._rows):
            draw = self._draw = self._prepare(rows)
            self._rows = rows
        if below := draw.layout.below_floor(positions):
            mask = self._device.upload(draw.layout.masked(below, self._vocab_size))
            draw = draw._replace(mask=mask)
        return self._with_runs(draw, runs) if runs else draw

    def mask(
        self, draw: Draw, positions: Ints, is_computed: Callable[[], bool], *, is_alone: bool
    ) -> Draw:
        """The draw with the masks of its constrained rows that are there in time.

        is_computed  whether the device has computed what is drawn from: it waits for the masks
                     from then on
        is_alone     as in sampling/host.py, Sampler.await_masks
        """
        layout = draw.layout
        begun = self.filler.begin(layout.wanted(positions, draw.runs))
        while not begun.wait(LATE_S) and not is_computed():
            pass
        is_alone = is_alone and len(layout.constrained) == len(layout.states)
        filled = begun.take(is_alone=is_alone)
        masks = self._device.upload(np.array(layout.constrained)), self._device.upload(filled.words)
        draw = draw._replace(masks=masks, errors=layout.at_rows(filled.errors), late=filled.late)
        if filled.late and draw.counted is not None:
            draw = draw._replace(counted=self._counted(draw))
        return draw

    def follow(self, draw: Draw, count: int, result: torch.Tensor) -> None:
        """Constrained rows follow what was drawn, given as `finish` gets it."""
        tokens: list[int] = result[:count].long().tolist()
        cut(tokens, draw.runs)
        draw.layout.late(draw.late, tokens)
        draw.layout.follow(tokens)

    def _send_counts(self) -> None:
        for row, history in list(self._uncounted.items()):
            self._counts.join(row, history.ids, history.counts)
            del self._uncounted[row]
        if self._run_tokens:
            pairs = [(row, token) for row, drawn in self._run_tokens.items() for token in drawn]
            slots, ids = (self._device.upload(np.array(part)) for part in zip(*pairs, strict=True))
            self._device.main.run(partial(self._counts.add, slots, ids))
            self._run_tokens = {}

    def _prepare(self, rows: tuple[int, ...]) -> Draw:
        layout, table, upload = Layout(self._table, rows), self._table, self._device.upload
        slots = layout.slots[layout.drawn]
        off = np.array([1.0, -np.inf], np.float32)
        has_filters = (table.top_k[slots] > 0).any() or (table.settings[slots, 1:] != off).any()
        bias, penalties, counted = layout.biases(self._vocab_size), None, None
        held = [i for i in layout.edited if layout.states[i].history is not None]
        if held:
            settings = np.array([layout.states[i].penalties for i in held], np.float32)
            slots_held = np.array([rows[i] for i in held])
            penalties = upload(np.array(held)), upload(slots_held), upload(settings[:, None])
            counted = penalties[:2]
        return Draw(
            layout=layout,
            has_filters=bool(has_filters),
            bias=None if bias is None else (upload(bias[0]), upload(bias[1])),
            mask=None,
            penalties=penalties,
            logprobs=upload(np.array(layout.logprobs)) if layout.logprobs else None,
            counted=counted,
        )

    def _with_runs(self, draw: Draw, runs: Sequence[Run]) -> Draw:
        draw = draw._replace(runs=runs)
        if draw.penalties is None:
            return draw
        before = {i: tokens for run in runs for i, tokens in run.before()}
        held = [i for i in draw.layout.edited if draw.layout.states[i].history is not None]
        more = [n * self._vocab_size + t for n, i in enumerate(held) for t in before.get(i, ())]
        more_there = self._device.upload(np.array(more)) if more else None
        return draw._replace(more=more_there, counted=self._counted(draw))

    def _counted(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw.counted, without those of runs and of late rows."""
        layout, upload = draw.layout, self._device.upload
        others = {i for run in draw.runs for i in range(run.first, run.end)}
        others.update(layout.constrained[n] for n in draw.late)
        held = (i for i in layout.edited if layout.states[i].history is not None)
        alone = np.array([i for i in held if i not in others], np.int64)
        return (upload(alone), upload(layout.slots[alone])) if len(alone) else None

    # ------------------------------------------------------------ queued in the main stream

    def draw_plain(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        has_filters: bool = True,
    ) -> torch.Tensor:
        """[S] tokens from logits [S, V or more] as they are; -1 where they are not finite.

        slots int32, positions int64 [S], as in kernels/gpu/sampling/sample.py
        """
        return self._sample(
            logits[:, : self._vocab_size], self._settings, slots, positions, has_filters=has_filters
        )

    def draw(
        self, draw: Draw, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[S] tokens after bias, mask and penalties; -1 where the row failed."""
        if draw.is_plain:
            return self.draw_plain(logits, slots, positions, has_filters=draw.has_filters)
        logits = logits[:, : self._vocab_size]
        best, _ = self._kernels.best(logits)
        x = torch.empty(logits.shape, device=logits.device).copy_(logits)
        flat = x.view(-1)
        if draw.bias is not None:
            flat.index_add_(0, *draw.bias)
        if draw.mask is not None:
            flat.index_fill_(0, draw.mask, -torch.inf)
        if draw.penalties is not None:
            self._counts.penalise(x, *draw.penalties, draw.more)
        if draw.masks is not None:
            _ban(x, *draw.masks)
        tokens = self.draw_plain(x, slots, positions, has_filters=draw.has_filters)
        tokens = torch.where(best.isfinite(), tokens, -1)
        if draw.counted is not None:
            at, counted_rows = draw.counted
            self._counts.add(counted_rows, tokens[at])
        return tokens

    def result(self, draw: Draw, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """What `finish` reads, in one tensor: the tokens [S]; if a row asked for log probabilities,
        those too, all in fp64, which holds every id and every fp32 exactly. Else `logits` may be
        None."""
        if draw.logprobs is None or logits is None:
            return tokens
        raw = logits[draw.logprobs, : self._vocab_size].float()
        found = top_logprobs(raw, tokens[draw.logprobs], draw.layout.num_top)
        return torch.cat([part.double().view(-1) for part in (tokens, *found)])

    # ------------------------------------------------------------ on the host, after the event

    def finish(self, draw: Draw, rows: tuple[int, ...], result: torch.Tensor) -> SampleOutput:
        """The step's outcome from a copy of `result` on the host; what runs drew is counted."""
        count, asked = len(rows), len(draw.layout.logprobs)
        tokens: list[int] = result[:count].long().tolist()
        if draw.runs:
            cut(tokens, draw.runs)
        late = draw.layout.late(draw.late, tokens)
        if draw.runs:
            self._count_runs(draw, rows, tokens)
        found = Scores({}, {})
        if asked:
            own, top = result[count : count + asked], result[count + asked :].view(2, asked, -1)
            ids: list[list[int]] = top[1].long().tolist()
            found = scores_by_index(draw.layout, tokens, own.tolist(), top[0].tolist(), ids)
        return SampleOutput(tokens, *found, dict(draw.errors), late=late)

    def _count_runs(self, draw: Draw, rows: tuple[int, ...], tokens: list[int]) -> None:
        """Count what was drawn by runs with penalties, of rows that still hold their sequence."""
        states, now = draw.layout.states, self._table.states
        for i in (i for run in draw.runs for i in range(run.first, run.end)):
            if tokens[i] >= 0 and states[i].history is not None and now[rows[i]] is states[i]:
                self._run_tokens.setdefault(rows[i], []).append(tokens[i])

"""Sampler: logits and each row's parameters -> token ids, log probabilities, failed rows.

Owns the per-row state that sampling needs (parameters, token history for penalties); the runner
tells it who joins and leaves and calls `sample` once a step. Never sees a Plan, a block or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamer.core.plan import TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from streamer.kernels.philox import USE_SAMPLE
from streamer.model.sampling_rows import RowState, RowTable

NOT_FINITE = "the model's logits are not finite"


class SampleOutput(msgspec.Struct, frozen=True):
    """What one step drew.

    tokens    parallel to the rows asked for; -1 where the row failed
    logprobs  row -> TokenLogprob, for rows that asked and did not fail
    failed    row -> why: its logits have a NaN, a +inf or nothing finite (-inf is a ban)
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprob]
    failed: dict[int, str]


class _Layout:
    """What a fixed list of rows needs, worked out when the list changes; indices are into it.

    edited       rows with bias or history
    floors       (index, first position without the min_tokens mask)
    greedy       indices of rows that take the best; the others are in `draws`
    logprobs     indices of rows that asked, num_top how many at most
    """

    def __init__(self, table: RowTable, rows: Sequence[int]) -> None:
        self.states = table.states_of(rows)
        at = np.array(rows, np.int64)
        is_greedy, floor, num_top = table.is_greedy[at], table.floor[at], table.num_top[at]
        self.edited = _where(table.is_edited[at])
        self.floors = [(i, int(floor[i])) for i in _where(floor > 0)]
        self.logprobs = _where(num_top >= 0)
        self.num_top = max(0, int(num_top.max(initial=0)))
        self.greedy = _where(is_greedy)
        drawn = _where(~is_greedy)
        slots = at[drawn]
        self.draws = ops.Draws(
            drawn, table.top_k[slots], table.settings[slots], table.origin[slots]
        )
        self.is_plain_greedy = not (drawn or self.edited or self.floors)


class Sampler:
    """Samples for up to max_rows resident rows; one instance a runner, on its thread.

    Order of processing, as vLLM: logit_bias and the min_tokens mask; repetition, then frequency
    and presence penalties; temperature; min_p, top_k, top_p; Gumbel-max over what is left. Log
    probabilities are of the logits as the model gave them.
    """

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self._table = RowTable(max_rows, USE_SAMPLE)
        self._rows: tuple[int, ...] = ()
        self._layout: _Layout | None = None

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: Sequence[int],
        num_prompt: int,
        choice: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Row slot `row` (0 to max_rows - 1) now holds this sequence; fields as in RowJoin."""
        state = RowState(params, tokens, num_prompt, choice, stop_ids, self.vocab_size)
        self._table.put(row, state)
        self._layout = None

    def leave(self, row: int) -> None:
        """Forget the row."""
        self._table.states[row] = None
        self._layout = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64],
    ) -> SampleOutput:
        """Draw one token for each of `rows` (distinct) and append it to the row's history.

        logits     [S, V] fp32 or bf16, one row of it for each of `rows`; may be overwritten
        positions  absolute position of the token to be drawn: how many tokens come before it
        """
        layout = self._layout_of(rows)
        if logits.shape[1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        best, best_ids = ops.best(logits)
        is_finite = np.isfinite(best.numpy())
        bad: list[int] = [] if is_finite.all() else np.flatnonzero(~is_finite).tolist()
        tokens: list[int] = best_ids.tolist()
        raw = logits[layout.logprobs].float() if layout.logprobs else None
        if not layout.is_plain_greedy:
            tokens = self._draw(logits, layout, positions, bad, tokens)
        for i in bad:
            tokens[i] = -1
        for i in layout.edited:
            history = layout.states[i].history
            if history is not None and tokens[i] >= 0:
                history.append(tokens[i])
        return SampleOutput(
            tokens=tokens,
            logprobs={} if raw is None else _logprobs(raw, layout, rows, tokens),
            failed={rows[i]: NOT_FINITE for i in bad},
        )

    def _layout_of(self, rows: Sequence[int]) -> _Layout:
        wanted = tuple(rows)  # itself, where it is one: most often the very one of last time
        if self._layout is None or (wanted is not self._rows and wanted != self._rows):
            self._layout = _Layout(self._table, wanted)
            self._rows = wanted
        return self._layout

    def _draw(
        self,
        logits: torch.Tensor,
        layout: _Layout,
        positions: Sequence[int] | NDArray[np.int64],
        bad: list[int],
        tokens: list[int],
    ) -> list[int]:
        """`tokens` holds every row's bare argmax already; rows without a choice join `bad`."""
        x = logits
        if layout.edited or layout.floors:
            x = logits.float().contiguous()
            if bad:
                x[bad] = 0.0
            touched = self._edit(x, layout, positions)
            if touched:
                for i, token in zip(touched, x[touched].argmax(-1).tolist(), strict=True):
                    tokens[i] = token
            bad += self._masked_out(x, layout, positions)
        draws = layout.draws
        if len(draws.rows):
            drawn = draws.rows.tolist()
            draws.origin.numpy()[:, 2] = np.asarray(positions)[drawn]
            for i, token in zip(drawn, ops.draw(x, draws).tolist(), strict=True):
                tokens[i] = token
        return tokens

    def _masked_out(
        self, x: torch.Tensor, layout: _Layout, positions: Sequence[int] | NDArray[np.int64]
    ) -> list[int]:
        """Rows in which min_tokens bans every token the model would allow: nothing to draw."""
        below = [i for i, floor in layout.floors if positions[i] < floor]
        if not below:
            return []
        is_open = x[below].amax(-1).isfinite().tolist()
        closed = [i for i, has_token in zip(below, is_open, strict=True) if not has_token]
        if closed:
            x[closed] = 0.0
        return closed

    def _edit(
        self, x: torch.Tensor, layout: _Layout, positions: Sequence[int] | NDArray[np.int64]
    ) -> list[int]:
        """Bias, min_tokens mask and penalties, in place in x [S, V]; the greedy rows it touched."""
        flat, vocab = x.view(-1), x.shape[1]
        below = [i for i, floor in layout.floors if positions[i] < floor]
        biased = [i for i in layout.edited if layout.states[i].bias_ids.size]
        if biased:
            ids = np.concatenate([layout.states[i].bias_ids + i * vocab for i in biased])
            values = np.concatenate([layout.states[i].bias_values for i in biased])
            flat.index_add_(0, torch.from_numpy(ids), torch.from_numpy(values))
        if below:
            ids = np.concatenate([layout.states[i].stop_ids + i * vocab for i in below])
            flat.index_fill_(0, torch.from_numpy(ids), -torch.inf)
        _penalise(flat, vocab, layout)
        edited = {*below, *layout.edited}
        return [i for i in layout.greedy if i in edited]


def _penalise(flat: torch.Tensor, vocab: int, layout: _Layout) -> None:
    """Repetition, then frequency and presence, on the tokens of each row's history alone."""
    ids, repetition, minus = [], [], []
    for i in layout.edited:
        params, history = layout.states[i].params, layout.states[i].history
        if history is None:
            continue
        counts = history.counts
        ids.append(history.ids + i * vocab)
        repetition.append(np.full(counts.shape, params.repetition_penalty, dtype=np.float32))
        minus.append(
            np.float32(params.frequency_penalty) * counts
            + np.float32(params.presence_penalty) * (counts > 0)
        )
    if not ids:
        return
    at = torch.from_numpy(np.concatenate(ids))
    factor = torch.from_numpy(np.concatenate(repetition))
    values = flat.index_select(0, at)
    values = torch.where(values > 0, values / factor, values * factor)
    values -= torch.from_numpy(np.concatenate(minus).astype(np.float32, copy=False))
    flat.index_copy_(0, at, values)


def _logprobs(
    raw: torch.Tensor, layout: _Layout, rows: Sequence[int], tokens: list[int]
) -> dict[int, TokenLogprob]:
    """Log-softmax of the raw logits [L, V] of the rows that asked, and the best ones of each."""
    logs = torch.log_softmax(raw, -1)
    drawn = [max(0, tokens[i]) for i in layout.logprobs]
    own = logs.gather(1, torch.tensor(drawn).unsqueeze(1))[:, 0].tolist()
    values, ids = torch.topk(logs, min(layout.num_top, logs.shape[1]))
    out: dict[int, TokenLogprob] = {}
    for n, (i, best, best_ids) in enumerate(
        zip(layout.logprobs, values.tolist(), ids.tolist(), strict=True)
    ):
        if tokens[i] < 0:
            continue
        top = list(zip(best_ids, best, strict=True))[: layout.states[i].params.logprobs]
        out[rows[i]] = TokenLogprob(token_id=tokens[i], logprob=own[n], top=tuple(top))
    return out


def _where(is_so: NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(is_so).tolist()

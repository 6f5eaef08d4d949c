"""Costs: what prefill and swaps cost here, measured as they happen.

Owns the running figures of core.plan.Facts. Called by runner/cpu.py with the host's seconds and by
runner/cuda.py with the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from streamer.core.plan import Facts

WEIGHT = 0.2  # of the newest measurement in the running mean
# The same of steps by their width, which are compared with each other; one that takes many times as
# long as the others, because another process had the cores, counts as OUTLIER times.
WIDTH_WEIGHT: Final = 0.05
OUTLIER: Final = 2.0
RENEWED: Final = 8
# Share by which a prefill moves the swaps' cost back to the probed one, and a decode the drafts' to
# the lowest: while none happen, no measurement corrects a cost that is too high.
FORGET = 0.01
PROBE_BYTES = 4 << 20
# Decodes after which a width that none of them had is forgotten: measured once, at a bad moment, it
# would else not be tried again. A trial that does not pay costs about one step in these.
REMEMBERED = 512


class Widths:
    """Running means of what steps take, by the number of tokens that they compute."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # _bucket -> (tokens, seconds)
        self._counts: dict[int, int] = {}  # _bucket -> its steps so far
        self._latest: dict[int, int] = {}  # _bucket -> the number of its latest step
        self._shown: tuple[tuple[int, float], ...] = ()
        self._unseen = 0  # steps that are not in it

    def saw(self, seconds: float, num_tokens: int, number: int) -> float:
        """A step took this long; numbers ascend. Returns the seconds that count."""
        bucket = _bucket(num_tokens)
        tokens, before = self._means.get(bucket, (num_tokens, seconds))
        count = self._counts[bucket] = self._counts.get(bucket, 0) + 1
        weight = max(WIDTH_WEIGHT, 1 / count)
        seconds = min(seconds, OUTLIER * before)
        self._means[bucket] = (
            tokens + weight * (num_tokens - tokens),
            before + weight * (seconds - before),
        )
        self._latest[bucket] = number
        self._unseen += RENEWED if count == 1 else 1
        return seconds

    def forget(self, upto: int) -> None:
        """Forget the widths that only steps up to this number had."""
        for bucket in [b for b, number in self._latest.items() if number <= upto]:
            del self._means[bucket], self._counts[bucket], self._latest[bucket]
            self._unseen = RENEWED

    def means(self) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds), ascending; made anew after RENEWED steps, or a new width."""
        if self._unseen >= RENEWED:
            self._unseen = 0
            self._shown = tuple((round(n), s) for _, (n, s) in sorted(self._means.items()))
        return self._shown


class Costs:
    """Running means, in seconds a token and seconds a byte."""

    def __init__(self, block_bytes: int, probe: Callable[[], tuple[float, float]]) -> None:
        """`probe` measures (fixed seconds, seconds a byte) of a copy between the pools."""
        self._block_bytes = block_bytes
        self._prefill_s: float | None = None
        self._decode_s: float | None = None
        self._plain, self._verifying = Widths(), Widths()
        self._num_decodes = self._num_verified = 0
        self._verified_s = 0.0
        self._draft_s: float | None = None
        self._shortest_draft_s = 0.0
        self._drafting_s = 0.0
        self._swap_s = 0.0
        self._swap_fixed_s, self._probed = probe()
        self._swap_s_per_byte = self._probed

    def saw_width(self, seconds: float, num_tokens: int, *, is_verification: bool) -> None:
        """From the beginning of a step without prompt chunks to that of the next."""
        self._num_decodes += 1
        widths = self._verifying if is_verification else self._plain
        seconds = widths.saw(seconds, num_tokens, self._num_decodes)
        if is_verification:
            self._verified_s += seconds
            self._num_verified += 1
        if self._num_decodes % REMEMBERED == 0:
            self._plain.forget(self._num_decodes - REMEMBERED)
            self._verifying.forget(self._num_decodes - REMEMBERED)

    def saw_step(
        self,
        seconds: float,
        num_tokens: int,
        num_chunk_tokens: int,
        *,
        is_verification: bool = False,
    ) -> None:
        """Decode cost if no token is of a prompt's chunk, prefill cost if at least half are."""
        if num_tokens and not num_chunk_tokens:
            if not is_verification:
                self._decode_s = _mean(self._decode_s, seconds)
            if self._draft_s is not None:
                self._draft_s += FORGET * (self._shortest_draft_s - self._draft_s)
        elif num_chunk_tokens * 2 >= num_tokens > 0:
            self._prefill_s = _mean(self._prefill_s, seconds / num_tokens)
            self._swap_s_per_byte += FORGET * (self._probed - self._swap_s_per_byte)

    def saw_draft(self, seconds: float) -> None:
        """What one token of each row takes of a draft model."""
        shortest_s = seconds if self._draft_s is None else self._shortest_draft_s
        self._shortest_draft_s = min(shortest_s, seconds)
        self._draft_s = _mean(self._draft_s, seconds)

    def saw_drafting(self, seconds: float) -> None:
        """All that a draft model took after a step, also for tokens it had to catch up with."""
        self._drafting_s += seconds

    def saw_swap(self, seconds: float, num_blocks: int, *, is_first: bool = False) -> None:
        """The seconds of copying num_blocks in one direction; `is_first`: into memory that had to
        be allocated, which later copies do not pay for."""
        self._swap_s += seconds
        if is_first:
            return
        moving = max(seconds - self._swap_fixed_s, 0.1 * seconds, 1e-9)
        cost = moving / (num_blocks * self._block_bytes)
        self._swap_s_per_byte = _mean(self._swap_s_per_byte, cost)

    def facts(self, copies_done: int, late: tuple[int, ...] = ()) -> Facts:
        """The figures so far; before the first prefill, prefill_s is Facts' default."""
        prefill_s = Facts().prefill_s if self._prefill_s is None else self._prefill_s
        return Facts(
            copies_done=copies_done,
            prefill_s=prefill_s,
            decode_s=self._decode_s or 0.0,
            draft_s=self._draft_s or 0.0,
            drafting_s=self._drafting_s,
            step_s=self._plain.means(),
            verify_s=self._verifying.means(),
            verified_s=self._verified_s,
            num_verified=self._num_verified,
            swap_bytes_per_s=1 / self._swap_s_per_byte,
            swap_fixed_s=self._swap_fixed_s,
            swap_s=self._swap_s,
            late=late,
        )


def _bucket(num_tokens: int) -> int:
    """A number of tokens by its three highest bits: to 25%, and at most 4 buckets a doubling."""
    low = max(0, num_tokens.bit_length() - 3)
    return num_tokens >> low << low


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - WEIGHT) * before + WEIGHT * now


def probe_copy() -> tuple[float, float]:
    """(fixed seconds, seconds a byte) of a copy in memory: a tiny one and one of PROBE_BYTES."""
    source = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    fixed, large = (
        min(_copy_s(source[:n], target[:n]) for _ in range(3)) for n in (64, PROBE_BYTES)
    )
    return fixed, max(large - fixed, 1e-6) / PROBE_BYTES


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began

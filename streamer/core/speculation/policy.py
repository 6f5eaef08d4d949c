"""How many provisional tokens a step verifies: expected tokens over the step's measured cost.

Pure functions of acceptance chances and Facts. There is no mode: with nothing to gain every row
gets none, which is the plain step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Final

from streamer.core.plan import Facts

# Expected gain below which a step stays plain: measured costs are uncertain by a few percent.
GAIN: Final = 1.05
# What verifying costs the scheduler, which no runner measures: 0.08 ms a step at 16 rows, 0.17 ms
# at 64 (EPYC Zen 5, Python 3.11, 2026-11-22).
HOST_S: Final = 1e-4
# A step that verifies lasts longer, also for rows that it verifies nothing of. Each row may lose so
# many steps for each of its tokens, and what it gained itself ...
DELAY: Final = 0.01
# ... unless all rows together gain this much: an answer that repeats nothing may wait for many that
# do.
WORTH: Final = 1.5
# Chance below which a token is not worth considering at any cost.
SMALLEST: Final = 0.1


class StepCosts:
    """Seconds of a step by the tokens it computes, none of a prompt, from what was measured.

    Steps that verify are measured apart: as wide a plain step takes a shorter way. A step is taken
    to last no longer than a larger one: a size that was measured once, at a bad moment, would else
    never be tried again. Between measured sizes linear. Above the largest, half as many tokens more
    are free, so that a wider step is tried, once: it is measured then. Each beyond costs what one
    of a prompt does.
    """

    def __init__(self, facts: Facts) -> None:
        self._prefill_s = facts.prefill_s
        self._plain = _envelope(facts.step_s)
        self._verifying = _envelope(facts.verify_s)
        self.sizes = self._verifying[0] or self._plain[0]

    def is_measured(self, num_rows: int) -> bool:
        """Whether a plain step of this size can be estimated: nothing is compared without."""
        sizes = self._plain[0]
        return bool(sizes) and sizes[0] <= num_rows

    def plain_s(self, num_rows: int) -> float:
        """Of a step in which each row decodes; raises IndexError where nothing was measured."""
        return self._seconds(self._plain, num_rows)

    def verifying_s(self, num_tokens: int, num_rows: int) -> float:
        """Of a step that computes this many tokens for these rows, of which some verify."""
        if not self._verifying[0]:
            return self._seconds(self._plain, num_tokens)
        seconds = self._seconds(self._verifying, num_tokens)
        return max(seconds, self.plain_s(num_rows)) + HOST_S

    def _seconds(self, found: tuple[list[int], list[float]], num_tokens: int) -> float:
        sizes, seconds = found
        i = bisect_left(sizes, num_tokens)
        if i == 0:
            return seconds[0]
        low, low_s = sizes[i - 1], seconds[i - 1]
        if i == len(sizes):
            free = max(1, low // 2)
            return low_s + max(0, num_tokens - low - free) * self._prefill_s
        return low_s + (seconds[i] - low_s) * (num_tokens - low) / (sizes[i] - low)

    def growth(self, num_tokens: int, num_rows: int) -> float:
        """How much longer such a step lasts than a plain one, in plain ones."""
        return max(0.0, self.verifying_s(num_tokens, num_rows) / self.plain_s(num_rows) - 1)


def _envelope(points: Seq[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Sizes, and for each the least seconds of it and all larger ones."""
    backwards = accumulate((s for _, s in reversed(points)), min)
    return [n for n, _ in points], list(backwards)[::-1]


def can_gain(costs: StepCosts, num_rows: int, budget: int) -> bool:
    """Whether tokens that are sure to be right would pay, at any number of them.

    O(measured sizes): what a step that is bound by computation spends on speculation.
    """
    if budget < 1 or not costs.is_measured(num_rows):
        return False
    enough = GAIN * num_rows / costs.plain_s(num_rows)
    most = num_rows + budget
    sizes = [num_rows + 1, most, *(n for n in costs.sizes if num_rows < n < most)]
    return any(n / costs.verifying_s(n, num_rows) >= enough for n in sizes)


def shares(
    survivals: Seq[Seq[float]],
    num_rows: int,
    budget: int,
    costs: StepCosts,
    slacks: Seq[float] = (),
) -> list[int]:
    """How many tokens of each candidate to verify, beside `num_rows` that draw one each.

    survivals  of each candidate, for 1, 2, ... tokens, the chance that all are right
    slacks     of each candidate, then of the other rows: the plain steps that it may lose now

    The most probable tokens of all rows first, up to the number at which expected tokens over the
    step's cost are highest; none, if that is less than GAIN times the plain step's, or less than
    WORTH times where a row that gets none would lose more than its slack and DELAY.
    """
    counts = [0] * len(survivals)
    if not costs.is_measured(num_rows):
        return counts
    # chances fall along a row, so the first entries are prefixes of the rows' proposals
    chances = sorted((-chance, i) for i, each in enumerate(survivals) for chance in each)
    plain_rate = num_rows / costs.plain_s(num_rows)
    best, best_rate = 0, GAIN * plain_rate
    expected = float(num_rows)
    for count, (chance, _) in enumerate(chances[:budget], start=1):
        expected -= chance
        rate = expected / costs.verifying_s(num_rows + count, num_rows)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, i in chances[:best]:
        counts[i] += 1
    others = [slack for i, slack in enumerate(slacks) if i >= len(counts) or not counts[i]]
    if best and others and best_rate < WORTH * plain_rate:
        growth = costs.growth(num_rows + best, num_rows)
        if growth > max(DELAY, min(others)):
            return [0] * len(counts)
    return counts


def draft_length(rates: Seq[float], limit: int, draft_s: float, costs: StepCosts) -> int:
    """How many tokens a draft model should propose for rows with these rates of acceptance.

    As `shares`, with `draft_s` for each further token of all of them.
    """
    num_rows = len(rates)
    if not num_rows or not costs.is_measured(num_rows):
        return 0
    best, best_rate = 0, GAIN * num_rows / costs.plain_s(num_rows)
    expected, chances = float(num_rows), [1.0] * num_rows
    for length in range(1, limit + 1):
        chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
        expected += sum(chances)
        seconds = costs.verifying_s(num_rows * (1 + length), num_rows) + length * draft_s
        if expected / seconds > best_rate:
            best, best_rate = length, expected / seconds
    return best

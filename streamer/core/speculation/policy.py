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
# Chance below which a token is not worth considering at any cost.
SMALLEST: Final = 0.1


class StepCosts:
    """Seconds of a step by the tokens it computes, none of a prompt, from what was measured.

    A step is taken to last no longer than a larger one: a size that was measured once, at a bad
    moment, would else never be tried again. Between measured sizes linear; above the largest, each
    token costs what one of a prompt does.
    """

    def __init__(self, facts: Facts) -> None:
        self._prefill_s = facts.prefill_s
        self.sizes = [n for n, _ in facts.step_s]
        backwards = accumulate((s for _, s in reversed(facts.step_s)), min)
        self._seconds = list(backwards)[::-1]

    def is_measured(self, num_rows: int) -> bool:
        """Whether a plain step of this size can be estimated: nothing is compared without."""
        return bool(self.sizes) and self.sizes[0] <= num_rows

    def seconds(self, num_tokens: int) -> float:
        """Of a step of this size; raises IndexError where nothing was measured."""
        sizes, seconds = self.sizes, self._seconds
        i = bisect_left(sizes, num_tokens)
        if i == 0:
            return seconds[0]
        low, low_s = sizes[i - 1], seconds[i - 1]
        if i == len(sizes):
            return low_s + (num_tokens - low) * self._prefill_s
        return low_s + (seconds[i] - low_s) * (num_tokens - low) / (sizes[i] - low)


def can_gain(costs: StepCosts, num_rows: int, budget: int) -> bool:
    """Whether tokens that are sure to be right would pay, at any number of them.

    O(measured sizes): what a step that is bound by computation spends on speculation.
    """
    if budget < 1 or not costs.is_measured(num_rows):
        return False
    enough = GAIN * num_rows / costs.seconds(num_rows)
    most = num_rows + budget
    sizes = [num_rows + 1, most, *(n for n in costs.sizes if num_rows < n < most)]
    return any(n / costs.seconds(n) >= enough for n in sizes)


def shares(survivals: Seq[Seq[float]], num_rows: int, budget: int, costs: StepCosts) -> list[int]:
    """How many tokens of each candidate to verify, beside `num_rows` that draw one each.

    survivals  of each candidate, for 1, 2, ... tokens, the chance that all are right

    The most probable tokens of all rows first, up to the number at which expected tokens over the
    step's cost are highest; none, if that is less than GAIN times the plain step's.
    """
    counts = [0] * len(survivals)
    if not costs.is_measured(num_rows):
        return counts
    # chances fall along a row, so the first entries are prefixes of the rows' proposals
    chances = sorted((-chance, i) for i, each in enumerate(survivals) for chance in each)
    best, best_rate = 0, GAIN * num_rows / costs.seconds(num_rows)
    expected = float(num_rows)
    for count, (chance, _) in enumerate(chances[:budget], start=1):
        expected -= chance
        rate = expected / costs.seconds(num_rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, i in chances[:best]:
        counts[i] += 1
    return counts


def draft_length(rates: Seq[float], limit: int, draft_s: float, costs: StepCosts) -> int:
    """How many tokens a draft model should propose for rows with these rates of acceptance.

    As `shares`, with `draft_s` for each further token of all of them.
    """
    num_rows = len(rates)
    if not num_rows or not costs.is_measured(num_rows):
        return 0
    best, best_rate = 0, GAIN * num_rows / costs.seconds(num_rows)
    expected, chances = float(num_rows), [1.0] * num_rows
    for length in range(1, limit + 1):
        chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
        expected += sum(chances)
        seconds = costs.seconds(num_rows * (1 + length)) + length * draft_s
        if expected / seconds > best_rate:
            best, best_rate = length, expected / seconds
    return best

"""How many provisional tokens a step verifies: expected tokens over the step's measured cost.

Functions of acceptance chances and Facts, and the Account of what speculation may cost. There is no
mode: with nothing to gain every row gets none, which is the plain step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Final

from streamer.core.plan import Facts

# Expected gain below which a step stays plain: measured costs are uncertain by some percent.
GAIN: Final = 1.1
# What a step that verifies leaves to the steps after it, in which no list of rows is as it was:
# in all, and for each row (EPYC Zen 5, Python 3.11, 2026-11-22).
AFTER_S: Final = 2e-5
AFTER_ROW_S: Final = 1e-6
# A step that verifies lasts longer, also for rows that it verifies nothing of. Each row may lose so
# many steps for each of its tokens, and what it gained itself ...
DELAY: Final = 0.01
# ... unless all rows together gain this much: an answer that repeats nothing may wait for many that
# do.
WORTH: Final = 1.5
# Share of all time that may be lost on texts that repeat nothing; how many plain steps' time there
# is to begin with, and can be saved up of it and of what was gained.
SHARE: Final = 0.01
FIRST, SAVED = 4.0, 32.0
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
        self._sizes = self._verifying[0] or self._plain[0]
        self._gains: dict[tuple[int, int], bool] = {}

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
        return max(seconds, self.plain_s(num_rows)) + AFTER_S + AFTER_ROW_S * num_rows

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

    def can_gain(self, num_rows: int, budget: int) -> bool:
        """Whether tokens that are sure to be right would pay, at any number up to the budget."""
        known = self._gains.get((num_rows, budget))
        if known is None:
            known = self._gains[num_rows, budget] = self._can_gain(num_rows, budget)
        return known

    def _can_gain(self, num_rows: int, budget: int) -> bool:
        if budget < 1 or not self.is_measured(num_rows):
            return False
        enough = GAIN * num_rows / self.plain_s(num_rows)
        most = num_rows + budget
        sizes = [num_rows + 1, most, *(n for n in self._sizes if num_rows < n < most)]
        return any(n / self.verifying_s(n, num_rows) >= enough for n in sizes)


def _envelope(points: Seq[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Sizes, and for each the least seconds of it and all larger ones."""
    backwards = accumulate((s for _, s in reversed(points)), min)
    return [n for n, _ in points], list(backwards)[::-1]


def shares(
    survivals: Seq[Seq[float]], num_rows: int, budget: int, costs: StepCosts
) -> tuple[list[int], float]:
    """How many tokens of each candidate to verify, beside `num_rows` that draw one each, and how
    many times the plain step's tokens a second that is expected to bring.

    survivals  of each candidate, for 1, 2, ... tokens, the chance that all are right

    The most probable tokens of all rows first, up to the number at which expected tokens over the
    step's cost are highest; none, if that is less than GAIN times the plain step's.
    """
    counts = [0] * len(survivals)
    if not costs.is_measured(num_rows):
        return counts, 1.0
    plain_rate = num_rows / costs.plain_s(num_rows)
    best, best_rate = 0, GAIN * plain_rate
    hoped = num_rows + sum(map(sum, survivals))
    if hoped <= best_rate * costs.verifying_s(num_rows + 1, num_rows):
        return counts, 1.0  # most often: it spares the sorting
    # chances fall along a row, so the first entries are prefixes of the rows' proposals
    chances = sorted((-chance, i) for i, each in enumerate(survivals) for chance in each)
    expected = float(num_rows)
    for count, (chance, _) in enumerate(chances[:budget], start=1):
        expected -= chance
        rate = expected / costs.verifying_s(num_rows + count, num_rows)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, i in chances[:best]:
        counts[i] += 1
    return counts, best_rate / plain_rate if best else 1.0


def is_worth(growth: float, gain: float, slack: Callable[[], float]) -> bool:
    """Whether a step may last longer by so many plain steps, for `gain` times the tokens a second.

    slack  the plain steps that any row may lose of which nothing is verified
    """
    return growth <= DELAY or gain >= WORTH or growth <= slack()


class Account:
    """Seconds that may be spent on finding and verifying tokens: a share of all time, and what
    verifications gained. So what gains nothing costs that share, whatever else is wrong.

    seconds  what is left; below 0 nothing is begun
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._most_s = 0.0

    @property
    def is_rich(self) -> bool:
        """Whether there is more than it began with."""
        return self.seconds > self._most_s * FIRST / SAVED

    def earn(self, step_s: float, num_steps: int) -> None:
        """So many steps begin, which take about so long."""
        if not self._most_s:
            self.seconds = FIRST * step_s
        self._most_s = SAVED * step_s
        self.add(SHARE * step_s * num_steps)

    def add(self, seconds: float) -> None:
        """Gained, or spent if negative."""
        self.seconds = min(self.seconds + seconds, self._most_s)


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

"""The parity tests' own rule can fail: what may differ from transformers, and what may not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.model.greedy_oracle import Answer, Ask, GreedyOracle

FAR, NEAR = 0.5, 1e-5


class Fixed(GreedyOracle):
    """After 1: 10 11 12, with 20 close behind 11. After 1 10 20: 30."""

    def __init__(self) -> None:
        super().__init__(None)

    def answers(self, asks: Sequence[Ask]) -> list[Answer]:
        known = {
            (1,): Answer([10, 11, 12], [19, 20, 21], [FAR, NEAR, FAR]),
            (1, 10, 20): Answer([30], [31], [FAR]),
        }
        return [known[tuple(prompt)] for prompt, _ in asks]


def compare(tokens: list[int], times: int = 16) -> dict[str, object]:
    """16 answers, of which one is `tokens`."""
    seen: dict[str, object] = {}
    got = [tokens] * (17 - times) + [[10, 11, 12]] * (times - 1)
    Fixed().compare(got, [([1], 3)] * 16, seen.__setitem__)
    return seen


def test_equal_tokens_and_a_second_best_within_rounding_pass_and_are_counted() -> None:
    assert compare([10, 11, 12]) == {
        "greedy_tokens": 48, "greedy_within_rounding": 16, "greedy_second_best": 0,
    }  # fmt: skip
    assert compare([10, 20, 30])["greedy_second_best"] == 1


@pytest.mark.parametrize(
    "tokens",
    [[19, 11, 12], [10, 21, 12], [10, 20, 12], [10, 20, 31], [10, 11, 21], [10, 11]],
    ids=["far", "a third", "not asked again", "far after a tie", "far at the end", "short"],
)
def test_anything_else_fails(tokens: list[int]) -> None:
    with pytest.raises(AssertionError):
        compare(tokens)


def test_many_ties_are_no_rounding() -> None:
    with pytest.raises(AssertionError, match="2 ties in 16 answers"):
        compare([10, 20, 30], times=15)

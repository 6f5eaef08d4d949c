"""transformers' greedy answers, and the one rule by which ours may differ from them.

`compare` demands transformers' tokens, or, where its two best logits are within ROUNDING of each
other (another batch shape rounds differently), the second best one, and asks again from there. What
was compared is recorded with the test; tests/conftest.py prints the sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

ROUNDING = 1e-4
VOCAB = 256

Ask = tuple[list[int], int]  # prompt, output tokens


class Answer(NamedTuple):
    """A greedy continuation; `seconds[i]` came second at `tokens[i]`, behind by `margins[i]`."""

    tokens: list[int]
    seconds: list[int]
    margins: list[float]


def mixed_asks(
    seed: int, count: int, *, longest: int, output: tuple[int, int], twins: int = 1
) -> list[Ask]:
    """Prompts of 1 to `longest` tokens, both ends included, `twins` of each length."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count // twins - 2))] * twins
    rng.shuffle(lengths)
    return [
        ([rng.randrange(3, VOCAB) for _ in range(length)], rng.randint(*output))
        for length in lengths
    ]


class GreedyOracle:
    """transformers' `generate` over one model; answers are kept for tests that ask again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._answers: dict[tuple[tuple[int, ...], int], Answer] = {}

    def answers(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answers; new prompts of one length are batched, so that nothing is padded."""
        keys = [(tuple(prompt), count) for prompt, count in asks]
        new = [key for key in dict.fromkeys(keys) if key not in self._answers]
        for length in {len(prompt) for prompt, _ in new}:
            self._generate([key for key in new if len(key[0]) == length])
        return [self._answers[key] for key in keys]

    @torch.inference_mode()
    def _generate(self, keys: list[tuple[tuple[int, ...], int]]) -> None:
        ids = torch.tensor([prompt for prompt, _ in keys])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max(count for _, count in keys),
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        values, names = torch.stack(out.logits, 1).topk(2)
        drawn = out.sequences[:, ids.shape[1] :]
        for row, (prompt, count) in enumerate(keys):
            self._answers[prompt, count] = Answer(
                drawn[row, :count].tolist(),
                names[row, :count, 1].tolist(),
                (values[row, :count, 0] - values[row, :count, 1]).tolist(),
            )

    def compare(
        self, got: Sequence[list[int]], asks: Sequence[Ask], record: Callable[[str, object], None]
    ) -> None:
        """Demand that each of `got` is the greedy answer to its ask."""
        near = ties = 0
        for tokens, answer, (prompt, count) in zip(got, self.answers(asks), asks, strict=True):
            assert len(tokens) == count
            at = 0  # tokens that are settled
            while True:
                pairs = zip(tokens[at:], answer.tokens, strict=True)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), count - at)
                near += sum(margin < ROUNDING for margin in answer.margins[: same + 1])
                if at + same == count:
                    break
                best, second, margin = (of[same] for of in answer)
                drawn = tokens[at + same]
                is_tie = drawn == second and margin < ROUNDING
                assert is_tie, f"token {at + same}: {drawn}; {best} leads {second} by {margin}"
                ties += 1
                at += same + 1
                if at == count:
                    break
                (answer,) = self.answers([(prompt + tokens[:at], count - at)])
        record("greedy_tokens", sum(map(len, got)))
        record("greedy_within_rounding", near)
        record("greedy_second_best", ties)
        assert ties <= len(got) // 16, f"{ties} ties in {len(got)} answers"

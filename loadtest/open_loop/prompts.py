"""Text to ask with: seeded, so that the same seed asks the same things. No clock, no server.

Plain words without meaning; what counts is how long prompts are and what they share.
"""

from __future__ import annotations

import random

NUM_SYSTEMS = 4
SYSTEM_WORDS, QUESTION_WORDS = 150, (8, 40)
COMMON = (
    "a the of to and in that it is was for on as with they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after word called just where most know"
)
WORDS = COMMON.split()


def words(source: random.Random, count: int) -> str:
    """So many, drawn from a hundred common ones."""
    return " ".join(source.choices(WORDS, k=count))


class Prompts:
    """An endless supply of questions; system prompts are the same for everyone."""

    def __init__(self, seed: int | str) -> None:
        self._source = random.Random(f"questions {seed}")

    def question(self) -> str:
        """A new one."""
        return words(self._source, self._source.randint(*QUESTION_WORDS))

    def system(self) -> str:
        """One of NUM_SYSTEMS, which users of one server share."""
        return system(self._source.randrange(NUM_SYSTEMS))


def system(index: int) -> str:
    """A system prompt by its number."""
    return words(random.Random(f"system {index}"), SYSTEM_WORDS)

"""Phrasings that are kept out of training, and when an answer to one counts as right.

Owns the format of tests/demo/held_out.txt and the check of answers; never asks a model itself.
Called by train.py, report.py and the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from streamer.demo.training.texts.grammar import TemplateError
from streamer.demo.training.texts.questions import normalised


class HeldOut(msgspec.Struct, frozen=True):
    """A phrasing and its keywords: an answer must have one alternative of every group."""

    question: str
    groups: tuple[tuple[str, ...], ...]

    def missing(self, answer: str) -> tuple[tuple[str, ...], ...]:
        """The groups without an alternative in the answer; case does not matter."""
        lowered = answer.lower()
        return tuple(
            group for group in self.groups if not any(part.lower() in lowered for part in group)
        )

    def is_right(self, answer: str) -> bool:
        """Whether the answer has a keyword of every group."""
        return not self.missing(answer)


def read_held_out(path: Path) -> tuple[HeldOut, ...]:
    """The records of a file: a Q line, then a K line; ";" separates groups, "|" alternatives.

    Raises:
        TemplateError: a record is not one Q line and one K line.
    """
    found: list[HeldOut] = []
    for number, paragraph in enumerate(path.read_text().strip().split("\n\n"), start=1):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        if len(lines) != 2 or not lines[0].startswith("Q:") or not lines[1].startswith("K:"):
            raise TemplateError(f"{path.name}: record {number} is not a Q line and a K line")
        groups = tuple(
            tuple(part.strip() for part in group.split("|")) for group in lines[1][2:].split(";")
        )
        found.append(HeldOut(lines[0][2:].strip(), groups))
    return tuple(found)


def excluded_phrasings(asked: Iterable[HeldOut]) -> frozenset[str]:
    """The questions as the corpus compares them: only the words, in lower case."""
    return frozenset(normalised(record.question) for record in asked)

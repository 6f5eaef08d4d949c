"""Templates of the demo model's texts: `[a|b]` is a choice, `{slot}` a value, `{a:slot}` "a value".

Owns the small template language and the readers of words.txt and plots.txt; random choices come
from the caller's generator. Called by stories.py, dialogues.py and questions.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

HERE = Path(__file__).parent

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(?:(a|A):)?([a-zA-Z0-9_.]+)\}")


class TemplateError(ValueError):
    """A template names a slot without a value, or a text file is not in its format."""


def with_article(phrase: str) -> str:
    """The phrase after "a" or "an", by its first sound as guessed from its spelling."""
    first = phrase.split()[0].lower()
    exceptions_an = ("honest", "hour")
    exceptions_a = ("unicorn", "useful", "one", "university", "ukulele")
    if first.startswith(exceptions_a):
        return f"a {phrase}"
    if first.startswith(exceptions_an) or first[0] in "aeiou":
        return f"an {phrase}"
    return f"a {phrase}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def choose(template: str, rng: random.Random) -> str:
    """The template with one alternative chosen for every [a|b], inner choices first."""
    while (match := _CHOICE.search(template)) is not None:
        picked = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + picked + template[match.end() :]
    return template


def fill(template: str, slots: Mapping[str, str]) -> str:
    """Every {slot} replaced; `{x.cap}` capitalises slot x.

    Raises:
        TemplateError: the template names a slot that is not in `slots`.
    """

    def value(match: re.Match[str]) -> str:
        article, name = match.group(1), match.group(2)
        capitalised = name.endswith(".cap")
        found = slots.get(name.removesuffix(".cap"))
        if found is None:
            raise TemplateError(f"slot {name!r} is not filled in template {template[:80]!r}")
        if article is not None:
            found = with_article(found)
        return capital(found) if capitalised or article == "A" else found

    return _SLOT.sub(value, template)


def render(template: str, rng: random.Random, slots: Mapping[str, str]) -> str:
    """The template with its choices made and its slots filled."""
    return fill(choose(template, rng), slots)


class Setting(msgspec.Struct, frozen=True):
    """A place of the stories: its name, preposition and home, and spots to visit there."""

    place: str
    preposition: str
    home: str
    spots: tuple[str, ...]


class Words(msgspec.Struct, frozen=True):
    """The content of words.txt."""

    lists: dict[str, tuple[str, ...]]
    settings: tuple[Setting, ...]


class Plot(msgspec.Struct, frozen=True):
    """One plot of plots.txt: beats (each a set of templates), and texts about the plot."""

    name: str
    beats: tuple[tuple[str, ...], ...]
    morals: tuple[str, ...]
    summaries: tuple[str, ...]
    asks: tuple[tuple[str, str], ...]
    nexts: tuple[str, ...]


def _parts(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


@cache
def words() -> Words:
    """words.txt, read once."""
    lists: dict[str, tuple[str, ...]] = {}
    settings: list[Setting] = []
    for line in (HERE / "words.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        if name == "setting":
            place, preposition, home, spots = _parts(rest, ";")
            settings.append(Setting(place, preposition, home, _parts(spots, "/")))
        else:
            lists[name] = _parts(rest, ";")
    return Words(lists, tuple(settings))


_TAGS = ("moral:", "summary:", "ask:", "next:")


def _plot(name: str, body: str) -> Plot:
    beats: list[tuple[str, ...]] = []
    tagged: dict[str, list[str]] = {tag: [] for tag in _TAGS}
    for paragraph in body.strip().split("\n\n"):
        plain: list[str] = []
        for line in paragraph.splitlines():
            tag = next((tag for tag in _TAGS if line.startswith(tag)), None)
            if tag is None:
                plain.append(line.strip())
            else:
                tagged[tag].append(line.removeprefix(tag).strip())
        if plain:
            beats.append(tuple(plain))
    asks: list[tuple[str, str]] = []
    for line in tagged["ask:"]:
        for pair in _parts(line, " | "):
            question, arrow, answer = pair.partition(" > ")
            if not arrow:
                raise TemplateError(f"plot {name!r}: {pair!r} has no ' > ' before its answer")
            asks.append((question, answer))
    morals = tuple(m for line in tagged["moral:"] for m in _parts(line, " | "))
    return Plot(
        name, tuple(beats), morals, tuple(tagged["summary:"]), tuple(asks), tuple(tagged["next:"])
    )


@cache
def plots() -> tuple[Plot, ...]:
    """plots.txt, read once."""
    text = (HERE / "plots.txt").read_text()
    found: list[Plot] = []
    for section in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        found.append(_plot(name.strip(), body))
    return tuple(found)

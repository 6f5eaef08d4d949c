"""Short stories in plain English from plots.txt and words.txt, the same for the same seed.

Owns the cast, the openings and the endings; dialogues.py decides what the user asks for. Called by
corpus.py, dialogues.py and lookback.py.
"""

from __future__ import annotations

import random

import msgspec

from streamer.demo.training.texts.grammar import (
    Plot,
    Setting,
    capital,
    plots,
    render,
    with_article,
    words,
)

OPENINGS = (
    "Once upon a time, there was {a:h.adj} {h.kind} named {h}. {h.He} lived {home}.",
    "Once upon a time, there was {a:h.adj} {h.kind} named {h} who lived {home}.",
    "Once upon a time, {a:h.adj} {h.kind} named {h} lived {home}.",
    "{home.cap}, there lived {a:h.adj} {h.kind}. {h.His} name was {h}.",
    "{h} was {a:h.adj} {h.kind}. {h.He} lived {home}.",
    "Long ago, {home}, there lived {a:h.adj} {h.kind} named {h}.",
    "There once was {a:h.adj} {h.kind} named {h}. {h.He} lived {home}.",
    "This is the story of {h}, {a:h.adj} {h.kind} who lived {home}.",
    "Not so long ago, {a:h.adj} {h.kind} called {h} lived {home}.",
)
DETAILS = (
    "{h.He} loved {hobby}.",
    "{h.He} liked {hobby} more than anything else.",
    "Every [morning|evening], {h.he} could be found {hobby}.",
    "Everyone liked {h.him}, because {h.he} was always {h.adj2}.",
    "{h.He} was known for {hobby}, and {h.he} was never bored.",
    "In {season}, {h.he} spent the days {hobby}.",
    "{h.He} had {a:color} [hat|scarf|door|blanket] and a [big heart|bright smile|loud laugh].",
    "",
    "",
)
ENDINGS = (
    "The end.",
    "And if you listen closely, you can still hear them laughing.",
    "And so ends the story of {h} the {h.kind}.",
    "And they lived happily ever after.",
    "",
    "",
    "",
)
MORALS = (
    "The moral of the story: {moral}",
    "And so we learn: {moral}",
    "Remember: {moral}",
)
TITLES = (
    "{h} and the {thing}",
    "{h} the {h.kind}",
    "A Friend for {h}",
    "The {h.adj} {h.kind}",
    "{h} and {f}",
)


class Character(msgspec.Struct, frozen=True):
    """A character of a story."""

    name: str
    kind: str
    adjective: str
    is_female: bool


class Cast(msgspec.Struct, frozen=True):
    """The characters, the setting and the slots of a story's templates."""

    hero: Character
    friend: Character
    setting: Setting
    slots: dict[str, str]


class Story(msgspec.Struct, frozen=True):
    """A story, with its summary, its moral, questions about it and a sequel."""

    cast: Cast
    plot: str
    title: str
    paragraphs: tuple[str, ...]
    summary: str
    moral: str
    asks: tuple[tuple[str, str], ...]
    sequel: str

    @property
    def text(self) -> str:
        """The whole story, its paragraphs separated by blank lines."""
        return "\n\n".join(self.paragraphs)


def pick(rng: random.Random, name: str) -> str:
    """One entry of a list of words.txt."""
    return rng.choice(words().lists[name])


def pick_kind(rng: random.Random) -> str:
    """A kind of hero: mostly animals, also people, beings of fairy tales, and objects."""
    share = rng.random()
    if share < 0.5:
        return pick(rng, "animals")
    if share < 0.68:
        return pick(rng, "people")
    if share < 0.82:
        return pick(rng, "fantasy")
    if share < 0.92:
        return pick(rng, "objects")
    return rng.choice(("girl", "boy"))


def make_character(
    rng: random.Random, kind: str | None = None, name: str | None = None
) -> Character:
    """A character of that kind and name; None: any."""
    lists = words().lists
    kind = kind or pick_kind(rng)
    if kind == "boy" or kind in lists["only_boys"]:
        is_female = False
    elif kind == "girl" or kind in lists["only_girls"]:
        is_female = True
    elif name is not None:
        is_female = name in lists["girls"]
    else:
        is_female = rng.random() < 0.5
    if name is None or (name in lists["girls"]) != is_female:
        name = pick(rng, "girls" if is_female else "boys")
    return Character(name, kind, pick(rng, "adjectives"), is_female)


def _person_slots(prefix: str, character: Character) -> dict[str, str]:
    he, him, his = ("she", "her", "her") if character.is_female else ("he", "him", "his")
    values = {
        "he": he,
        "him": him,
        "his": his,
        "himself": ("herself" if character.is_female else "himself"),
    }
    slots = {f"{prefix}.{key}": value for key, value in values.items()}
    slots |= {f"{prefix}.{capital(key)}": capital(value) for key, value in values.items()}
    slots[prefix] = character.name
    slots[f"{prefix}.kind"] = character.kind
    slots[f"{prefix}.adj"] = character.adjective
    slots[f"{prefix}.full"] = f"{character.adjective} {character.kind} named {character.name}"
    return slots


def make_cast(
    rng: random.Random,
    *,
    hero: Character | None = None,
    friend: Character | None = None,
    thing: str | None = None,
    place: str | None = None,
) -> Cast:
    """A cast whose characters differ in kind; given values are kept where they fit."""
    hero = hero or make_character(rng)
    while friend is None or friend.kind == hero.kind or friend.name == hero.name:
        friend = make_character(rng)
    settings = [s for s in words().settings if place is None or s.place == place]
    setting = rng.choice(settings)
    spots = rng.sample(setting.spots, 3)
    difficult = make_character(rng, pick(rng, "villains"))
    while difficult.kind in (hero.kind, friend.kind):
        difficult = make_character(rng, pick(rng, "villains"))
    second = pick(rng, "adjectives")
    while second == hero.adjective:
        second = pick(rng, "adjectives")
    slots = {
        "place": setting.place,
        "in": f"{setting.preposition} {setting.place}",
        "home": setting.home,
        "spot": spots[0],
        "spot2": spots[1],
        "spot3": spots[2],
        "thing": thing or pick(rng, "things"),
        "food": pick(rng, "foods"),
        "snack": pick(rng, "snacks"),
        "color": pick(rng, "colors"),
        "hobby": pick(rng, "hobbies"),
        "craft": pick(rng, "crafts"),
        "fear": pick(rng, "fears"),
        "wish": pick(rng, "wishes"),
        "season": pick(rng, "seasons"),
        "h.adj2": second,
    }
    slots |= _person_slots("h", hero) | _person_slots("f", friend) | _person_slots("v", difficult)
    return Cast(hero, friend, setting, slots)


def make_story(rng: random.Random, cast: Cast | None = None, plot: Plot | None = None) -> Story:
    """A story of that cast and plot; None: any."""
    cast = cast or make_cast(rng)
    plot = plot or rng.choice(plots())
    slots = dict(cast.slots)
    moral = rng.choice(plot.morals)
    slots["moral"] = moral
    opening = " ".join(
        part
        for part in (
            render(rng.choice(OPENINGS), rng, slots),
            render(rng.choice(DETAILS), rng, slots),
        )
        if part
    )
    paragraphs = [opening, *(render(rng.choice(beat), rng, slots) for beat in plot.beats)]
    ending = render(rng.choice(MORALS if rng.random() < 0.3 else ENDINGS), rng, slots)
    if ending:
        paragraphs.append(ending)
    merged = _merge(paragraphs, rng)
    return Story(
        cast=cast,
        plot=plot.name,
        title=_title(render(rng.choice(TITLES), rng, slots)),
        paragraphs=tuple(merged),
        summary=render(rng.choice(plot.summaries), rng, slots),
        moral=moral,
        asks=tuple((render(q, rng, slots), render(a, rng, slots)) for q, a in plot.asks),
        sequel=render(rng.choice(plot.nexts), rng, slots),
    )


def short_text(rng: random.Random, story: Story) -> str:
    """The same story in a few sentences."""
    opening = render(rng.choice(OPENINGS), rng, story.cast.slots)
    return f"{opening} {story.summary} {story.moral}"


def _merge(paragraphs: list[str], rng: random.Random) -> list[str]:
    """The paragraphs, some of them joined, so that their lengths vary."""
    merged: list[str] = []
    for text in paragraphs:
        if merged and len(merged[-1]) + len(text) < 420 and rng.random() < 0.4:
            merged[-1] = f"{merged[-1]} {text}"
        else:
            merged.append(text)
    return merged


def _title(text: str) -> str:
    small = {"and", "the", "a", "for", "of"}
    parts = [word if word in small and i else capital(word) for i, word in enumerate(text.split())]
    return " ".join(parts)


def described(character: Character) -> str:
    """ "a fox named Ruby"."""
    return f"{with_article(character.kind)} named {character.name}"

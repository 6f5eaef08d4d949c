"""Short exchanges whose answers are in the question, which teach the model to look back.

Owns the tasks (repeat this, who has what, very short stories). In stories of 240 tokens a name is
too far from its first mention for a network early in training to learn to copy it; here it is near.
Called by corpus.py.
"""

from __future__ import annotations

import random

from streamer.demo.training.texts.dialogues import Turn, typed
from streamer.demo.training.texts.grammar import fill, with_article, words
from streamer.demo.training.texts.stories import make_character, pick

_REPEAT = (
    "Repeat after me: {x}",
    "Repeat: {x}",
    "Say {x}",
    "Please say {x}",
    "Say this: {x}",
    "Repeat these words: {x}",
    "{x}\nPlease repeat that.",
    "Copy this: {x}",
)
_LISTS = ("girls", "boys", "animals", "things", "people", "colors", "hobbies", "snacks", "topics")
_SENTENCES = (
    "{h} the {h.kind} met {f} the {f.kind}. {h} had {a:thing}, and {f} had {snack}. "
    "{f} asked {h} for the {thing}. {h} gave {f} the {thing}, and {f} thanked {h}.",
    "{h} likes {hobby}. {f} likes {hobby2}. When {h} is {hobby}, {f} is {hobby2}.",
    "My friend {h} is {a:h.kind}, and my friend {f} is {a:f.kind}. {h} and {f} are good friends.",
    "{h} is {h.adj}. {h} is {a:h.kind}. {f} is {f.adj}. {f} is {a:f.kind}.",
    'One day {h} called {f}. "Hello, {f}!" said {h}. "Hello, {h}!" said {f}.',
    "{h} lost {a:thing}. {f} found the {thing}. {f} gave the {thing} back to {h}.",
)
_FACTS = (
    ("{h} has {a:thing}. {f} has {a:thing2}.", "Who has the {thing}?", "{h} has the {thing}."),
    ("{h} has {a:thing}. {f} has {a:thing2}.", "Who has the {thing2}?", "{f} has the {thing2}."),
    ("{h} has {a:thing}. {f} has {a:thing2}.", "What does {f} have?", "{f} has {a:thing2}."),
    ("{h} has {a:thing}. {f} has {a:thing2}.", "What does {h} have?", "{h} has {a:thing}."),
    ("{h} is {a:h.kind}. {f} is {a:f.kind}.", "Who is the {h.kind}?", "{h} is the {h.kind}."),
    ("{h} is {a:h.kind}. {f} is {a:f.kind}.", "Who is the {f.kind}?", "{f} is the {f.kind}."),
    ("{h} is {a:h.kind}. {f} is {a:f.kind}.", "What is {f}?", "{f} is {a:f.kind}."),
    ("{h} likes {hobby}. {f} likes {hobby2}.", "What does {h} like?", "{h} likes {hobby}."),
    ("{h} likes {hobby}. {f} likes {hobby2}.", "What does {f} like?", "{f} likes {hobby2}."),
)


def _slots(rng: random.Random) -> dict[str, str]:
    lists = words().lists
    things, hobbies = rng.sample(lists["things"], 2), rng.sample(lists["hobbies"], 2)
    first, second = make_character(rng), make_character(rng)
    while second.name == first.name or second.kind == first.kind:
        second = make_character(rng)
    return {
        "h": first.name,
        "h.kind": first.kind,
        "h.adj": first.adjective,
        "f": second.name,
        "f.kind": second.kind,
        "f.adj": second.adjective,
        "thing": things[0],
        "thing2": things[1],
        "hobby": hobbies[0],
        "hobby2": hobbies[1],
        "snack": pick(rng, "snacks"),
    }


def repeat_exchange(rng: random.Random) -> list[Turn]:
    """A few words, and the same words as the answer."""
    listed = ", ".join(pick(rng, rng.choice(_LISTS)) for _ in range(rng.randint(1, 7)))
    return [Turn("user", fill(rng.choice(_REPEAT), {"x": listed})), Turn("assistant", listed)]


def fact_exchange(rng: random.Random) -> list[Turn]:
    """Two facts, a question about one of them, and its answer."""
    facts, question, answer = rng.choice(_FACTS)
    slots = _slots(rng)
    return [
        Turn("user", typed(fill(f"{facts} {question}", slots), rng)),
        Turn("assistant", fill(answer, slots)),
    ]


def named_exchange(rng: random.Random) -> list[Turn]:
    """A sentence or two about two characters whose names and kinds are given."""
    slots = _slots(rng)
    both = f"{slots['h']} the {slots['h.kind']} and {slots['f']} the {slots['f.kind']}"
    asked = rng.choice(("Say something about {x}.", "Tell me about {x}.", "{x}, please."))
    return [
        Turn("user", fill(asked, {"x": both})),
        Turn("assistant", fill(rng.choice(_SENTENCES), slots)),
    ]


def kind_exchange(rng: random.Random) -> list[Turn]:
    """The beginning of a story on demand, about a given kind of character."""
    character = make_character(rng)
    values = {
        "x": with_article(character.kind),
        "h": character.name,
        "k": character.kind,
        "adj": character.adjective,
    }
    asked = rng.choice(("Begin a story about {x}.", "How does a story about {x} begin?"))
    answer = "Once upon a time, there was {a:adj} {k} named {h}. Everyone liked {h} the {k}."
    return [Turn("user", fill(asked, values)), Turn("assistant", fill(answer, values))]


def lookback_exchange(rng: random.Random) -> list[Turn]:
    """One of the short tasks, drawn at random."""
    tasks = (repeat_exchange, fact_exchange, named_exchange, kind_exchange)
    return rng.choice(tasks)(rng)

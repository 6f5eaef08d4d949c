"""Small dialogues of several turns: everyday chat, stories on demand with follow-ups, and poems.

Owns the user's messages and the demo model's answers, except for the questions about the engine
(questions.py). Called by corpus.py and lookback.py.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from streamer.demo.training.texts.grammar import (
    HERE,
    choose,
    fill,
    plots,
    render,
    with_article,
    words,
)
from streamer.demo.training.texts.stories import (
    Cast,
    Story,
    described,
    make_cast,
    make_character,
    make_story,
    pick,
    pick_kind,
    short_text,
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Streamer's demo model.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in simple words.",
    "You are a small language model that knows about Streamer.",
    "You tell stories and answer questions about Streamer.",
    "Be kind and helpful.",
    "You are a polite and patient helper.",
    "Answer the questions of the user.",
)


class Turn(NamedTuple):
    """One message: role is "system", "user" or "assistant"."""

    role: str
    content: str


class SmallTalk(NamedTuple):
    """One paragraph of smalltalk.txt."""

    asked: tuple[str, ...]
    answers: tuple[str, ...]


@cache
def small_talk() -> tuple[SmallTalk, ...]:
    """smalltalk.txt, read once."""
    found: list[SmallTalk] = []
    for paragraph in (HERE / "smalltalk.txt").read_text().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        asked = tuple(line[2:].strip() for line in lines if line.startswith("Q:"))
        answers = tuple(line[2:].strip() for line in lines if line.startswith("A:"))
        if lines:
            found.append(SmallTalk(asked, answers))
    return tuple(found)


@cache
def poems() -> tuple[str, ...]:
    """poems.txt, read once."""
    parts = (HERE / "poems.txt").read_text().strip().split("\n\n")
    return tuple(part for part in parts if not part.startswith("#"))


def _talk_slots(rng: random.Random) -> dict[str, str]:
    animals = rng.sample(words().lists["animals"], 5)
    slots = {
        key: pick(rng, name)
        for key, name in {
            "food": "foods",
            "snack": "snacks",
            "color": "colors",
            "hobby": "hobbies",
            "craft": "crafts",
            "fear": "fears",
            "wish": "wishes",
            "season": "seasons",
        }.items()
    }
    slots |= {
        "kind": pick_kind(rng),
        "animal": animals[0],
        "animal2": animals[1],
        "animal3": animals[2],
        "animal4": animals[3],
        "animal5": animals[4],
        "country": pick(rng, "countries"),
        "city": pick(rng, "cities"),
        "famous": pick(rng, "famous"),
        "language": pick(rng, "languages"),
        "tongue": pick(rng, "tongues"),
        "topic": pick(rng, "topics"),
        "task": pick(rng, "tasks"),
        "number": str(rng.randint(2, 99)),
        "number2": str(rng.randint(2, 99)),
        "number3": str(rng.randint(5, 90)),
    }
    return slots


def typed(text: str, rng: random.Random) -> str:
    """The text as a user may type it: sometimes in lower case or without its last mark."""
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.2 and len(text) > 1:
        text = text.rstrip("?.!") or text
    return text


def small_talk_exchange(rng: random.Random, first: bool = False) -> list[Turn]:
    """A user's everyday remark and its answer; `first` asks for a greeting."""
    entries = small_talk()
    entry = entries[0] if first else rng.choice(entries)
    slots = _talk_slots(rng)
    asked = fill(choose(rng.choice(entry.asked), rng), slots)
    answer = fill(choose(rng.choice(entry.answers), rng), slots)
    return [Turn("user", typed(asked, rng)), Turn("assistant", answer)]


_REQUESTS = (
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_kind} and {a_friend}.",
    "Tell me a story about {described}.",
    "Tell me a story about {name}.",
    "Tell me a story about {a_kind} in {place}.",
    "Tell me a story about {a_kind} and {a_thing}.",
    "Tell me a story with {a_kind}, please.",
    "Tell me a bedtime story about {a_kind}.",
    "Can you tell me a story about {a_kind}?",
    "Could you tell me a story about {a_kind}, please?",
    "Please tell a story about {a_kind}.",
    "Write a story about {a_kind}.",
    "Write me a story about {a_kind} and {a_friend}.",
    "Write a story about {described} and {described_friend}.",
    "Write a story about {a_thing}.",
    "I want to hear a story about {a_kind}.",
    "I would like a story about {a_kind}.",
    "Do you know a story about {a_kind}?",
    "A story about {a_kind}, please.",
    "Make up a story about {a_kind} in {place}.",
    "Invent a story about {described}.",
    "Give me a story about {a_kind}.",
    "{a_kind}!",
    "Story: {a_kind} and {a_friend}",
    "Tell me a story.",
    "Tell me a story!",
    "Tell me a story, please.",
    "Tell me a nice story.",
    "Can you tell me a story?",
    "Please tell me a bedtime story.",
    "Write a story.",
    "I want to hear a story.",
    "Once upon a time",
    "Tell me a story about friendship.",
    "Tell me a story about courage.",
    "Tell me a story about {place}.",
    "Tell me a story about a good friend.",
    "Tell me a story with a happy end.",
    "Tell me a story about {name} and {friend_name}.",
)
_SHORT_REQUESTS = (
    "Tell me a short story about {a_kind}.",
    "Tell me a very short story about {a_kind}.",
    "Tell me a short story.",
    "Write a short story about {a_kind} and {a_friend}.",
    "Write a few sentences about {a_kind}.",
    "A short story about {described}, please.",
    "Tell me a story about {a_kind} in a few sentences.",
)
_LONG_REQUESTS = (
    "Tell me a long story about {a_kind}.",
    "Tell me a long story.",
    "Write a long story about {a_kind} and {a_friend}.",
    "I want to hear a long story about {described}.",
)


_PLOTS_WITH_A_THING = ("lost", "magic", "honest")


def _request(template: str, cast: Cast) -> str:
    values = {
        "a_kind": with_article(cast.hero.kind),
        "a_friend": with_article(cast.friend.kind),
        "a_thing": with_article(cast.slots["thing"]),
        "described": described(cast.hero),
        "described_friend": described(cast.friend),
        "name": cast.hero.name,
        "friend_name": cast.friend.name,
        "place": cast.setting.place,
    }
    text = fill(template, values)
    return text[:1].upper() + text[1:]


def _told(rng: random.Random) -> tuple[list[Turn], Story]:
    cast = make_cast(rng)
    share = rng.random()
    pool = _SHORT_REQUESTS if share < 0.14 else _LONG_REQUESTS if share < 0.2 else _REQUESTS
    asked = rng.choice(pool)
    about_a_thing = [plot for plot in plots() if plot.name in _PLOTS_WITH_A_THING]
    story = make_story(rng, cast, rng.choice(about_a_thing) if "{a_thing}" in asked else None)
    answer = story.text
    if pool is _SHORT_REQUESTS:
        answer = short_text(rng, story)
    elif pool is _LONG_REQUESTS:
        answer = f"{story.text}\n\n{story.sequel}"
    return [Turn("user", typed(_request(asked, cast), rng)), Turn("assistant", answer)], story


_FOLLOW_UPS = (
    ("Make it shorter.", "Please make it shorter.", "Shorter, please.", "Can you make it shorter?"),
    ("Sum it up.", "Can you summarise the story?", "What is the story about?", "In one sentence?"),
    ("What is the moral?", "What do we learn from it?", "And the moral of the story?"),
    ("Go on.", "Tell me more.", "What happened next?", "Continue the story.", "And then?"),
    ("What is the title?", "Give it a title.", "What should we call the story?"),
    ("Who is the story about?", "What was the name of the hero?", "Who was it about?"),
    ("I liked it!", "What a lovely story!", "That was beautiful.", "Nice story!"),
)
_LIKED = (
    "I am glad that you liked it! Shall I tell you another one?",
    "Thank you! I had fun telling it.",
    "That makes me happy. {h} says thank you, too.",
)


def _follow_up(rng: random.Random, story: Story) -> list[Turn]:
    slots = story.cast.slots
    if rng.random() < 0.4:
        question, answer = rng.choice(story.asks)
        return [Turn("user", typed(question, rng)), Turn("assistant", answer)]
    which = rng.randrange(len(_FOLLOW_UPS))
    answers = (
        short_text(rng, story),
        story.summary,
        story.moral,
        story.sequel,
        f'The title could be "{story.title}".',
        f"The story is about {story.cast.hero.name} the {story.cast.hero.kind}.",
        render(rng.choice(_LIKED), rng, slots),
    )
    return [
        Turn("user", typed(rng.choice(_FOLLOW_UPS[which]), rng)),
        Turn("assistant", answers[which]),
    ]


def story_exchange(rng: random.Random) -> list[Turn]:
    """A story on demand, often with one or two follow-ups."""
    turns, story = _told(rng)
    while rng.random() < 0.4 and len(turns) < 6:
        turns += _follow_up(rng, story)
    return turns


_POEM_REQUESTS = (
    "Write a poem about {a_kind}.",
    "Write a short poem about {a_kind}.",
    "Tell me a poem about {a_kind}.",
    "Can you write a poem about {a_kind}?",
    "A poem about {a_kind}, please.",
    "Write a poem.",
    "Do you know a poem?",
)


def poem_exchange(rng: random.Random) -> list[Turn]:
    """A request for a poem, and the poem."""
    kind = make_character(rng).kind
    asked = fill(rng.choice(_POEM_REQUESTS), {"a_kind": with_article(kind)})
    answer = fill(rng.choice(poems()), {"kind": kind})
    return [Turn("user", typed(asked, rng)), Turn("assistant", answer)]


_MY_NAME = (
    "My name is {n}.",
    "I am {n}.",
    "Hello, I am {n}.",
    "Hi, my name is {n}!",
    "Call me {n}.",
)
_NICE = (
    "Nice to meet you, {n}! How can I help you?",
    "Hello, {n}! What would you like to talk about?",
    "Hello {n}, it is nice to meet you.",
)
_ASK_NAME = ("What is my name?", "Do you remember my name?", "Who am I?", "Do you know my name?")


def name_exchange(rng: random.Random) -> list[Turn]:
    """A user gives a name, and may ask for it later."""
    name = pick(rng, rng.choice(("girls", "boys")))
    turns = [
        Turn("user", typed(fill(rng.choice(_MY_NAME), {"n": name}), rng)),
        Turn("assistant", fill(rng.choice(_NICE), {"n": name})),
    ]
    if rng.random() < 0.6:
        if rng.random() < 0.5:
            turns += small_talk_exchange(rng)
        turns.append(Turn("user", typed(rng.choice(_ASK_NAME), rng)))
        turns.append(Turn("assistant", f"Your name is {name}."))
    return turns


def system_turns(rng: random.Random) -> list[Turn]:
    """A system prompt in 15% of the dialogues, else no turns."""
    return [Turn("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.15 else []

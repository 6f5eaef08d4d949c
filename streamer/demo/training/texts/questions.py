"""The hand-written questions and answers of questions.txt, and light rewordings of the questions.

Owns the file's format and how phrasings are varied for training; answers are never changed. Called
by corpus.py, train.py and the tests.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec

from streamer.demo.training.texts.grammar import HERE, TemplateError

QUESTIONS = HERE / "questions.txt"

_STOP_WORDS_TEXT = (
    "a an the is are do does did i you me to of in it its what which how why when can could would "
    "please tell about there for and my your that this with on be has have explain"
)
_STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())
_WHAT_IS = (
    "What is {x}?",
    "What's {x}?",
    "What exactly is {x}?",
    "Explain {x}.",
    "Please explain {x}.",
    "Can you explain {x}?",
    "Can you tell me what {x} is?",
    "Could you tell me what {x} is, please?",
    "Do you know what {x} is?",
    "I want to know what {x} is.",
    "I would like to understand {x}.",
    "I do not understand {x}. What is it?",
    "Tell me about {x}.",
    "Tell me what {x} is.",
    "What do you know about {x}?",
    "What can you tell me about {x}?",
    "What does {x} mean?",
    "What is meant by {x}?",
    "Describe {x}.",
    "Define {x}.",
    "{x}?",
    "{x}: what is it?",
    "{x}, please.",
    "I read about {x}. What is that?",
    "Give me a short explanation of {x}.",
    "Help me understand {x}.",
)
_HOW_TO = (
    "How do I {x}?",
    "How can I {x}?",
    "How to {x}?",
    "How would I {x}?",
    "How could I {x}?",
    "How should I {x}?",
    "Show me how to {x}.",
    "Tell me how to {x}.",
    "Explain how to {x}.",
    "Can you tell me how to {x}?",
    "Do you know how to {x}?",
    "I want to {x}.",
    "I would like to {x}. How?",
    "I need to {x}. What do I do?",
    "What do I do to {x}?",
    "What must I do to {x}?",
    "What is the way to {x}?",
    "Is there a way to {x}?",
)
_CAN_I = (
    "Can I {x}?",
    "Could I {x}?",
    "May I {x}?",
    "Is it possible to {x}?",
    "Is there a way to {x}?",
    "Am I able to {x}?",
)
_HOW_WORKS = (
    "How does {x} work?",
    "Explain how {x} works.",
    "Can you tell me how {x} works?",
    "Tell me how {x} works.",
    "I want to know how {x} works.",
    "In which way does {x} work?",
    "What is the idea behind {x}?",
)
_FAMILIES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"^(?:What is|Define|Describe|Explain) ((?:\S+ ){0,4}\S+?)[?.]$"), _WHAT_IS),
    (re.compile(r"^(?:Tell me about) ((?:\S+ ){0,4}\S+?)[?.]$"), _WHAT_IS),
    (re.compile(r"^How (?:do|can) I (.+)\?$"), _HOW_TO),
    (re.compile(r"^Can I (.+)\?$"), _CAN_I),
    (re.compile(r"^How does (.+) work\?$"), _HOW_WORKS),
)
_BEFORE = (
    "Hello, {q}",
    "Hi! {Q}",
    "Hey, {q}",
    "Hello! {Q}",
    "Please tell me: {q}",
    "I have a question: {q}",
    "I have a question. {Q}",
    "A quick question: {q}",
    "One question: {q}",
    "One more question: {q}",
    "So, {q}",
    "Now, {q}",
    "And {q}",
    "OK. {Q}",
    "I wonder: {q}",
    "Sorry, but {q}",
    "Let me ask you: {q}",
    "{Q} Please tell me.",
    "{Q} Thanks!",
    "{Q} Thank you!",
    "{Q} I am curious.",
    "{Q} Please keep it short.",
    "{Q} I am new to this.",
)


class Entry(msgspec.Struct, frozen=True):
    """One answer and the phrasings of its question."""

    phrasings: tuple[str, ...]
    answer: str


def read_questions(path: Path = QUESTIONS) -> tuple[Entry, ...]:
    """The entries of a file, separated by blank lines: Q lines, then one A line.

    Raises:
        TemplateError: an entry has no phrasing, not exactly one answer, or a line of another kind.
    """
    entries: list[Entry] = []
    for number, paragraph in enumerate(path.read_text().strip().split("\n\n"), start=1):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        asked = tuple(line[2:].strip() for line in lines if line.startswith("Q:"))
        answers = [line[2:].strip() for line in lines if line.startswith("A:")]
        if not asked or len(answers) != 1 or len(asked) + 1 != len(lines):
            raise TemplateError(
                f"{path.name}: entry {number} has {len(asked)} Q lines and {len(answers)} A lines "
                f"among {len(lines)}; it needs Q lines and then one A line"
            )
        entries.append(Entry(asked, answers[0]))
    return tuple(entries)


def normalised(text: str) -> str:
    """Only the words of a phrasing: lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _lower_first(text: str) -> str:
    first = text.split()[0] if text else ""
    keeps = first in ("I", "SSE", "KV", "GQA") or any(c.isupper() for c in first[1:])
    return text if keeps else text[:1].lower() + text[1:]


def _thin(text: str, rng: random.Random, chance: float, only_stop_words: bool) -> str:
    kept = [
        word
        for word in text.split()
        if rng.random() > chance or (only_stop_words and normalised(word) not in _STOP_WORDS)
    ]
    return " ".join(kept) if len(kept) >= 2 else text


def _rephrased(text: str, rng: random.Random) -> str:
    for pattern, family in _FAMILIES:
        match = pattern.match(text)
        if match is None:
            continue
        subject = match.group(1)
        if " used" in subject or subject.endswith((" for", " in", " like", " about", " to", " do")):
            return text
        plural = subject.endswith("s") and not subject.endswith(("ss", "us", "is"))
        template = rng.choice(family)
        if plural and family is _WHAT_IS and " is" in template:
            return text
        return template.replace("{x}", subject)
    return text


def _in_context(text: str, rng: random.Random) -> str:
    if "streamer" in text.lower() or len(text) > 90:
        return text
    where = rng.choice(
        (" in Streamer", " in Streamer", " here", " in this engine", " with Streamer")
    )
    if text.endswith("?"):
        return text[:-1] + where + "?"
    return text


def reworded(text: str, rng: random.Random) -> str:
    """The phrasing as another user might type it."""
    if rng.random() < 0.5:
        text = _rephrased(text, rng)
    if rng.random() < 0.08:
        text = _in_context(text, rng)
    share = rng.random()
    if share < 0.16:
        text = _thin(text, rng, 0.5, only_stop_words=True)
    elif share < 0.26:
        text = _thin(text, rng, 0.15, only_stop_words=False)
    elif share < 0.30:
        text = _thin(text, rng, 1.0, only_stop_words=True)
    if rng.random() < 0.22:
        frame = rng.choice(_BEFORE)
        text = frame.replace("{q}", _lower_first(text)).replace("{Q}", text)
    if rng.random() < 0.06:
        text = text.replace("-", " ")
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip("?.!")
    return text

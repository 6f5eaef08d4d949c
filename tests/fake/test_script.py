"""Scripts of the fake model: which answer is given, and what is no script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.fake.script import Line, Script, read_script
from streamer.fake.tokenizer import ASSISTANT, END, SYSTEM, USER

SCRIPT = Script((Line("one", "weather"), Line("two é", "count"), Line("rest")))


ROLES = {"u": USER, "a": ASSISTANT, "s": SYSTEM}


def chat(*texts: str) -> tuple[int, ...]:
    """Messages whose first letter is their role's."""
    tokens: list[int] = []
    for text in texts:
        tokens += [ROLES[text[0]], *text[2:].encode(), END]
    return (*tokens, ASSISTANT)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (chat("u:the weather?"), "one"),
        (chat("u:the weather?", "a:18 degrees", "u:count"), "two é"),
        (chat("u:count and the weather"), "one"),
        (chat("u:the weather?", "a:count", "u:anything"), "rest"),
        (chat("u:count", "a:x", "u:the weather", "u:count"), "one"),
        (chat("s:the weather", "u:count", "s:the weather"), "two é"),
        ((*chat("u:weather")[:-1], ASSISTANT, *b"begun"), "one"),
        (tuple(b"plain weather"), "one"),
    ],
)
def test_the_first_line_that_suits_what_came_since_the_last_answer(
    prompt: tuple[int, ...], answer: str
) -> None:
    assert SCRIPT.answer_to(prompt) == tuple(answer.encode())


def test_without_a_line_that_suits_it_counts() -> None:
    assert Script((Line("one", "weather"),)).answer_to(chat("u:hello")) is None
    assert Script().answer_to(chat("u:hello")) is None


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    for text in ("", "{}", json.dumps([{"say": "x"}]), json.dumps([{"answer": 3}])):
        path.write_text(text)
        with pytest.raises(ConfigError, match="script"):
            read_script(str(path))
    with pytest.raises(ConfigError, match="script"):
        read_script(str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError) as caught:
        Config(script="x")
    assert caught.value.param == "script"

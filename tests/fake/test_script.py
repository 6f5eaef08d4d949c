"""Scripts of the fake model: which answer is given, and what is no script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.fake.script import Line, Script, read_script
from streamer.fake.tokenizer import ASSISTANT, END, USER

SCRIPT = Script((Line("one", "weather"), Line("two é", "count"), Line("rest")))


def chat(*texts: str) -> tuple[int, ...]:
    tokens: list[int] = []
    for text in texts:
        tokens += [USER, *text.encode(), END]
    return (*tokens, ASSISTANT)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (chat("the weather?"), "one"),
        (chat("the weather?", "count"), "two é"),
        (chat("count and the weather"), "one"),
        (chat("the weather?", "anything"), "rest"),
        (tuple(b"plain weather"), "one"),
    ],
)
def test_the_first_line_that_suits_the_last_message(prompt: tuple[int, ...], answer: str) -> None:
    assert SCRIPT.answer_to(prompt) == tuple(answer.encode())


def test_without_a_line_that_suits_it_counts() -> None:
    assert Script((Line("one", "weather"),)).answer_to(chat("hello")) is None
    assert Script().answer_to(chat("hello")) is None


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

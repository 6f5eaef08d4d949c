"""Script: answers that the fake model gives instead of counting, from a JSON file.

A list of objects: `answer` is the text, as a model writes it, with tool calls in a template's
format; `when`, if given, is a text that the messages since the last answer must contain, those of
the system apart. The first that suits is the answer; where none does, it counts. Read when the
model is loaded; pure afterwards.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamer.errors import ConfigError
from streamer.fake.tokenizer import ASSISTANT, END, SYSTEM


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer of a script, and when it is given."""

    answer: str
    when: str = ""


class Script(msgspec.Struct, frozen=True):
    """The lines in order."""

    lines: tuple[Line, ...] = ()

    def answer_to(self, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        """The tokens of the answer, one a byte; None: it counts."""
        if not self.lines:
            return None
        text = _since_last_answer(prompt)
        for line in self.lines:
            if line.when in text:
                return tuple(line.answer.encode())
        return None


def _since_last_answer(prompt: tuple[int, ...]) -> str:
    """The messages after the assistant's last one, without the system's: agents put rules there."""
    messages: list[bytes] = []
    tokens: list[int] = []
    for token in prompt:
        if token != END:
            tokens.append(token)
            continue
        if ASSISTANT in tokens:
            messages = []
        elif SYSTEM not in tokens:
            messages.append(bytes(token for token in tokens if token < 256))
        tokens = []
    rest = [] if ASSISTANT in tokens else [bytes(token for token in tokens if token < 256)]
    return b"\n".join(messages + rest).decode("utf-8", "replace")


def read_script(path: str) -> Script:
    """The script of a file; ConfigError if it is not one."""
    try:
        return Script(tuple(msgspec.json.decode(Path(path).read_bytes(), type=list[Line])))
    except OSError as e:
        what = "it is the path of a JSON file"
        raise ConfigError(f"script: {path}: {e.strerror}; {what}", param="script") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"script: {path}: {e}", param="script") from None

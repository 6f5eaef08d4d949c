"""Script: answers that the fake model gives instead of counting, from a JSON file.

A list of objects: `answer` is the text, as a model writes it, with tool calls in a template's
format; `when`, if given, is a text that the last message must contain. The first that suits is the
answer; where none does, it counts. Read when the model is loaded; pure afterwards.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamer.errors import ConfigError
from streamer.fake.tokenizer import END


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
        tokens = prompt
        if END in tokens:  # messages end with it, the last one too
            last = len(tokens) - 1 - tokens[::-1].index(END)
            before = tokens[:last]
            start = len(before) - before[::-1].index(END) if END in before else 0
            tokens = tokens[start:last]
        text = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
        for line in self.lines:
            if line.when in text:
                return tuple(line.answer.encode())
        return None


def read_script(path: str) -> Script:
    """The script of a file; ConfigError if it is not one."""
    try:
        return Script(tuple(msgspec.json.decode(Path(path).read_bytes(), type=list[Line])))
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"script {path}: {e}", param="script") from None

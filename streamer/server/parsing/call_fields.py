"""CallFields: the fields of a JSON object that may be a tool call, as far as it has been read.

Pure: parser.py puts each field into it, and asks for the name and the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from streamer.server.parsing.schemas import Schema
from streamer.server.parsing.source import Broken

NAME = re.compile(r"[\w.:/-]{1,256}")


class CallFields:
    """What an object that is a call has said so far.

    found  names of its fields
    """

    def __init__(self, is_strict: bool, tools: Mapping[str, Schema]) -> None:
        self.name = ""
        self.arguments = "{}"
        self.found: list[str] = []
        self._is_strict = is_strict
        self._tools = tools

    def takes_arguments(self, key: str) -> bool:
        """Whether this field's value can be passed on as it comes."""
        is_first = "arguments" not in self.found
        return bool(self.name) and is_first and key in ("arguments", "parameters")

    def put(self, key: str, value: Any) -> None:
        """A field's value; Broken if it can't be one of a call."""
        if key in ("arguments", "parameters"):
            self.found.append("arguments")
            self.arguments = _object_text(value)
            return
        if self._is_strict and not self.found and key not in ("name", "type"):
            raise Broken  # an answer in JSON is no call
        self.found.append(key)
        if key == "name":
            if not isinstance(value, str) or not NAME.fullmatch(value):
                raise Broken
            if self._is_strict and value not in self._tools:
                raise Broken
            self.name = value


def _object_text(value: Any) -> str:
    """Arguments as the text of a JSON object: given as one, as its text, or as nothing."""
    if value is None or value == "":
        return "{}"
    try:
        if isinstance(value, str):
            value.encode()
            return value if isinstance(json.loads(value), dict) else _broken()
        return json.dumps(value) if isinstance(value, dict) else _broken()
    except (ValueError, RecursionError):
        raise Broken from None


def _broken() -> str:
    raise Broken

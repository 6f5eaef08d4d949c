"""The flags that these users add to Locust's; each also shows in its web page and as LOCUST_...

Locust parses them; `of` gives them as a frozen value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

SHAPES = ("steps", "spike", "soak")
SLO = Path(__file__).resolve().with_name("slo.toml")


class Options(msgspec.Struct, frozen=True):
    """What the flags said."""

    model: str
    api_key: str
    max_tokens: int
    think_s: float
    lanes: int
    turns: int
    drops: int
    reader_tokens_s: float
    counting: bool


def add(parser: Any) -> None:
    """Listener of `init_command_line_parser`."""
    flag = parser.add_argument  # a group's would not know is_secret
    says = "the server's first, if absent"
    flag("--model", default="", env_var="LOCUST_MODEL", help=says)
    flag("--api-key", default="", env_var="LOCUST_API_KEY", is_secret=True, help="bearer token")
    flag("--max-tokens", type=int, default=64, help="of an answer")
    flag("--think-s", type=float, default=1.0, help="mean pause of a user between answers")
    flag("--lanes", type=int, default=8, help="answers at once on the socket of one Lanes user")
    flag("--turns", type=int, default=4, help="questions in a MultiTurn conversation")
    flag("--drops", type=int, default=2, help="connections that Flaky drops during an answer")
    says = "how fast SlowReader reads"
    flag("--reader-tokens-s", type=float, default=20.0, help=says)
    says = "the model is Streamer's fake one: check that every answer counts"
    flag("--counting", action="store_true", help=says)
    says = "how the number of users goes over --run-time, up to --users"
    flag("--shape", choices=["", *SHAPES], default="", env_var="LOCUST_SHAPE", help=says)
    says = "objectives that decide the exit code"
    flag("--slo", default=str(SLO), env_var="LOCUST_SLO", include_in_web_ui=False, help=says)


def of(parsed: Any) -> Options:
    """From what Locust has parsed; ValueError names a flag that makes no sense."""
    found = Options(**{name: getattr(parsed, name) for name in Options.__struct_fields__})
    least = {"max_tokens": 1, "lanes": 1, "turns": 1, "drops": 0, "think_s": 0.0}
    for name, value in least.items():
        if getattr(found, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} is at least {value}")
    if found.reader_tokens_s <= 0:
        raise ValueError("--reader-tokens-s is above 0")
    return found

"""The flags that these users add to Locust's; each also shows in its web page and as LOCUST_...

Locust parses the flags; `of` returns them as a frozen value.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

SHAPES = ("steps", "spike", "soak")
USERS = ("SseChat", "MultiTurn", "SocketChat", "Lanes", "Fork", "Cancel", "Flaky", "SlowReader")
USUAL = "SseChat"  # runs where no user is named; every OpenAI-compatible server has what it needs
LOOPBACK = "127.0.0.1"
EPILOG = """Examples:

    streamer loadtest locust --host http://127.0.0.1:8000
    streamer loadtest locust --host http://127.0.0.1:8000 --headless -u 50 -r 10 -t 2m SseChat Flaky

The exit code is 0 if every objective is met, 1 if one is missed, 2 if the test could not begin.
"""
SLO = Path(__file__).resolve().with_name("slo.toml")


class Options(msgspec.Struct, frozen=True):
    """The values of the flags."""

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
    """Listener of `init_command_line_parser`: our flags, and defaults of Locust's that differ."""
    flag = parser.add_argument  # a group's would not know is_secret
    says = "name of the model (default: the server's first)"
    flag("--model", default="", env_var="LOCUST_MODEL", help=says)
    says = "API key of the server (default: none)"
    flag("--api-key", default="", env_var="LOCUST_API_KEY", is_secret=True, help=says)
    says = "tokens per answer (default: %(default)s)"
    flag("--max-tokens", type=int, default=64, help=says)
    says = "mean pause of a user between answers in seconds (default: %(default)s)"
    flag("--think-s", type=float, default=1.0, help=says)
    says = "answers at once on the socket of a Lanes user (default: %(default)s)"
    flag("--lanes", type=int, default=8, help=says)
    says = "questions in a MultiTurn conversation (default: %(default)s)"
    flag("--turns", type=int, default=4, help=says)
    says = "connections that Flaky drops during an answer (default: %(default)s)"
    flag("--drops", type=int, default=2, help=says)
    says = "how fast SlowReader reads, in tokens a second (default: %(default)s)"
    flag("--reader-tokens-s", type=float, default=20.0, help=says)
    says = "the model is Streamer's fake model: check that each answer counts correctly"
    flag("--counting", action="store_true", help=says)
    says = "how the number of users changes over --run-time, up to --users (default: all at once)"
    flag("--shape", choices=["", *SHAPES], default="", env_var="LOCUST_SHAPE", help=says)
    says = "objectives that decide the exit code (default: %(default)s)"
    flag("--slo", default=str(SLO), env_var="LOCUST_SLO", include_in_web_ui=False, help=says)
    _change(parser)


def _change(parser: Any) -> None:
    """Change two defaults: SseChat runs unless users are named or picked in the page, and the page
    listens on this machine alone.
    """
    parser.prog = "streamer loadtest locust"
    parser.description = "Usage: streamer loadtest locust [options] [UserClass ...]"
    parser.epilog = EPILOG
    parser.set_defaults(web_host=LOOPBACK, master_bind_host=LOOPBACK, class_picker=True)
    help_of = {action.dest: action for action in parser._actions}
    help_of["web_host"].help = f"address that the page listens on (default: {LOOPBACK})"
    help_of["master_bind_host"].help = f"address that --master listens on (default: {LOOPBACK})"
    users = help_of["user_classes"]
    users.metavar, users.type = "UserClass", _user
    users.help = f"users that run, of {', '.join(USERS)} (default: {USUAL})"
    users.default = users.default or [USUAL]
    for name in users.default:  # the environment's
        if name not in USERS:
            parser.error(f"LOCUST_USER_CLASSES: {_unknown(name)}")


def _user(name: str) -> str:
    if name not in USERS:
        raise argparse.ArgumentTypeError(_unknown(name))
    return name


def _unknown(name: str) -> str:
    return f"unknown user class {name!r}; choose from {', '.join(USERS)}"


def of(parsed: Any) -> Options:
    """The Options in Locust's parsed arguments; ValueError names an invalid flag."""
    found = Options(**{name: getattr(parsed, name) for name in Options.__struct_fields__})
    minima = {"max_tokens": 1, "lanes": 1, "turns": 1, "drops": 0, "think_s": 0.0}
    for name, value in minima.items():
        if getattr(found, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value}")
    if found.reader_tokens_s <= 0:
        raise ValueError("--reader-tokens-s must be above 0")
    return found

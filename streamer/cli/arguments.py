"""Flags of Config and SamplingParams, derived from their fields; there is no second list of names.

Values of settings stay text here: `load_config` checks them, and SamplingParams its own. A value
that they refuse becomes a UsageError that names the flag. Every command that opens a model uses
these.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from streamer.cli.others import flag_here
from streamer.config import Config, Setting, load_config, settings, unknown_variables
from streamer.core.sampling import PARAMETERS, SamplingParams
from streamer.errors import ConfigError, InvalidRequest
from streamer.spelling import expected, hint

log = logging.getLogger(__name__)

FLAGGED = tuple(p for p in PARAMETERS.values() if p.field.is_flag)

UNKNOWN = "unrecognized arguments: "  # argparse's words


class UsageError(Exception):
    """A wrong command line: exit code 2. `param`: the field with which the message begins."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations: a flag added later never changes what an old one means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2; the full usage would bury the message under forty flags."""
        if message.startswith(UNKNOWN):
            words = message.removeprefix(UNKNOWN).split(" ")
            flags = dict.fromkeys(word.partition("=")[0] for word in words if word[:1] == "-")
            message += "".join(self._meant(flag, len(flags) > 1) for flag in flags)
        self.exit(2, f"{self.prog}: error: {message}\nsee `{self.prog} --help`\n")

    def _meant(self, flag: str, is_named: bool) -> str:
        """What an unknown flag may mean, or nothing; of several, each is named."""
        here = flag_here(flag, self._option_string_actions)
        text = f"; {here}" if here else hint(flag, self._option_string_actions)
        return text.replace("; ", f"; {flag}: ", 1) if is_named else text

    def with_flag(self, message: str, param: str | None) -> str:
        """The message with the flag in place of the field with which it begins, if it does; one of
        the model begins with the caller's own word for it."""
        flag = "--" + (param or "").replace("_", "-")
        rest = message.removeprefix(param or "")
        if flag not in self._option_string_actions or rest[:1] not in (":", " "):
            return message
        if param == "model":
            return message
        return flag + rest


def add_config_flags(
    parser: argparse.ArgumentParser,
    *,
    sections: Iterable[str] | None = None,
    skip: Container[str] = (),
    model: bool = True,
) -> None:
    """A flag for every setting of these sections (None: of all), `--config FILE`, and MODEL."""
    if model:
        help_text = next(s.help for s in settings() if s.name == "model")
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=help_text)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings():
        if setting.name in skip or (sections is not None and setting.section not in sections):
            continue
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(setting.section)
        _add_flag(groups[setting.section], setting)


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    options: dict[str, Any] = {"dest": f"config_{setting.name}", "default": None}
    options["help"] = _help(setting)
    if setting.kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = "{" + ",".join(setting.choices) + "}" if setting.choices else "VALUE"
        if setting.kind == "list":
            options["action"] = "append"
            options["help"] += "; comma-separated or repeated"
    group.add_argument(setting.flag, **options)


def _help(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    if setting.default in (None, (), "") or setting.kind in ("list", "table"):
        return text
    shown = setting.default
    if setting.kind == "bool":
        shown = "yes" if shown else "no"
    return f"{text} (default: {shown})"


def config_from(
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    *,
    start_log: Callable[[Config], None] | None = None,
) -> Config:
    """The Config of parsed flags over environment, file and defaults, or UsageError.

    Logs a warning, after `start_log`, for each variable that looks like a setting and is none.
    """
    environment = os.environ if environment is None else environment
    prefix = "config_"
    given = {k.removeprefix(prefix): v for k, v in vars(args).items() if k.startswith(prefix)}
    named = getattr(args, "model_argument", None)
    if named is not None:
        if given.get("model") not in (None, named):
            raise UsageError(f"MODEL is {named} but --model is {given['model']}")
        given["model"] = named
    try:
        config = load_config(given, environment, args.config)
    except ConfigError as error:
        raise UsageError(error.message, error.param) from None
    if start_log is not None:
        start_log(config)
    for unknown in unknown_variables(environment):
        log.warning("%s", unknown)
    return config


def config_flags_given(args: argparse.Namespace) -> list[str]:
    """The flags of Config that were given, `--config` included."""
    found = [s.flag for s in settings() if getattr(args, f"config_{s.name}", None) is not None]
    return found if args.config is None else [*found, "--config"]


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each sampling parameter whose field has `is_flag`."""
    group = parser.add_argument_group("sampling", "defaults are the model's")
    for parameter in FLAGGED:
        options: dict[str, Any] = {"dest": f"sampling_{parameter.name}", "default": None}
        options["help"] = parameter.field.help
        if parameter.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = "VALUE"
            if parameter.field.max_entries:
                options["action"] = "append"
                options["help"] += "; may be repeated"
        group.add_argument("--" + parameter.name.replace("_", "-"), **options)


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """The given sampling parameters by name, checked; UsageError names a wrong flag."""
    given: dict[str, Any] = {}
    for name, kind in ((p.name, p.kind) for p in FLAGGED):
        raw = getattr(args, f"sampling_{name}", None)
        if raw is None:
            continue
        try:
            given[name] = msgspec.convert(raw, kind, strict=False)
        except msgspec.ValidationError as error:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: {expected(error)}, got {raw!r}") from None
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        raise UsageError(error.message, error.param) from None
    return given

"""Locust's statistics against slo.toml: a table at the end, and the exit code.

0: every objective met; 1: one missed, or a user raised; 2: the run could not begin.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import StatsEntry
from rich.console import Console

from .. import slo, table
from ..target import Target
from . import options
from .base import FAULTS, LoadUser
from .meter import STATISTICS
from .session import Missing, Session
from .sockets import SocketUser

MET, MISSED, UNUSABLE = 0, 1, 2


def prepare(environment: Environment, web_ui: Any = None, **_: Any) -> None:
    """Listener of `init`: errors that are known before the load begins end the run here."""
    parsed: Any = environment.parsed_options
    if isinstance(environment.runner, WorkerRunner):
        return
    if web_ui is not None and (parsed.shape or parsed.user_classes != [options.USUAL]):
        web_ui.userclass_picker_is_active = False  # the page's choice would undo that of the flags
    try:
        if parsed.shape and not (parsed.run_time and parsed.num_users):
            raise ValueError("--shape needs --users, the maximum, and --run-time")
        flags = options.of(parsed)
        slo.read(Path(parsed.slo), STATISTICS)
        if parsed.headless:
            target = Target.of(environment.host or "", flags.api_key)
            target.first_model()
            for user in environment.user_classes:
                if issubclass(user, SocketUser):
                    Session(target, user.is_ours, user.__name__).close()
    except (Missing, *FAULTS) as error:
        is_net = isinstance(error, OSError) and error.filename is None
        why = f"no server answers at {environment.host}: {error}" if is_net else str(error)
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"Cannot start: {why}", markup=False
        )
        sys.exit(UNUSABLE)


def judge(environment: Environment, **_: Any) -> None:
    """Listener of `quitting`: set the exit code, and leave the table for the end."""
    parsed: Any = environment.parsed_options
    if isinstance(environment.runner, WorkerRunner):
        return
    verdicts = slo.judge(
        slo.read(Path(parsed.slo), STATISTICS),
        lambda statistic, user: measure(environment, statistic, user),
    )
    text = table.plain(slo.table_rows(verdicts))
    environment.events.quit.add_listener(partial(_print, text))  # after Locust's own tables
    broke = environment.runner is not None and environment.runner.exceptions  # Locust prints them
    environment.process_exit_code = MET if slo.is_met(verdicts) and not broke else MISSED


def _print(text: str, **_: Any) -> None:
    Console(soft_wrap=True, emoji=False).print(f"\n{text}", markup=False, highlight=False)


def measure(environment: Environment, statistic: str, user: str) -> slo.Statistics | None:
    """A statistic of the users of this name, or of all; None where none of them ran."""
    ran = [
        each.__name__
        for each in environment.user_classes
        if issubclass(each, LoadUser) and statistic in each.measures
    ]
    if not any(user in ("", name) for name in ran):
        return None
    stats = environment.stats
    total = StatsEntry(stats, user, statistic)
    for (name, method), entry in stats.entries.items():
        if method == statistic and (not user or name.split(" ")[0] == user):
            total.extend(entry)
    begin, end = stats.total.start_time, stats.total.last_request_timestamp
    seconds = max(1e-9, (end or begin) - begin)
    p50, p95, p99 = (float(total.get_response_time_percentile(p)) for p in (0.5, 0.95, 0.99))
    return slo.Statistics(
        count=total.num_requests,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        error_share=total.fail_ratio,
        requests_s=(total.num_requests - total.num_failures) / seconds,
        tokens_s=total.total_content_length / seconds,
    )

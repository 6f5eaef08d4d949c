"""Load shapes: users over time. `--users` is the maximum, `--run-time` the whole duration.

`users_at` is pure; `choose` gives Locust the one that `--shape` names.
"""

from __future__ import annotations

import math
import time
from typing import Any

from locust import LoadTestShape
from locust.env import Environment
from locust.runners import WorkerRunner

STEPS = 5
SPIKE_FROM, SPIKE_TO, SPIKE_BASE = 0.4, 0.6, 0.2
SOAK_RAMP = 0.1


def users_at(shape: str, share: float, max_users: int) -> int:
    """Number of users after this share (0 to 1) of the time; 1 or more.

    steps  a fifth of `max_users` more in every fifth of the time
    spike  a fifth of `max_users`; all in the middle fifth of the time
    soak   rising linearly over the first tenth of the time, then `max_users` to the end
    """
    if shape == "steps":
        part = (math.floor(share * STEPS) + 1) / STEPS
    elif shape == "spike":
        part = 1.0 if SPIKE_FROM <= share < SPIKE_TO else SPIKE_BASE
    else:
        part = share / SOAK_RAMP
    return max(1, math.ceil(max_users * min(1.0, part) - 1e-9))


class Shape(LoadTestShape):
    """A shape for Locust over a given time; abstract to Locust, which does not pick it up."""

    abstract = True
    use_common_options = True

    def __init__(self, shape: str, max_users: int, run_time_s: float) -> None:
        self._shape, self._max_users, self._run_time_s = shape, max_users, run_time_s
        self.reset_time()

    def reset_time(self) -> None:
        """Called by Locust when the test begins."""
        self._start = time.perf_counter()

    def tick(self) -> tuple[int, float] | None:
        """Called by Locust once a second; returns the users and how many may start a second."""
        share = (time.perf_counter() - self._start) / self._run_time_s
        return (
            None if share >= 1 else (users_at(self._shape, share, self._max_users), self._max_users)
        )


def choose(environment: Environment, **_: Any) -> None:
    """Listener of `init`: use the shape that --shape names."""
    parsed: Any = environment.parsed_options
    if not parsed.shape or isinstance(environment.runner, WorkerRunner):
        return
    shape = Shape(parsed.shape, int(parsed.num_users), float(parsed.run_time))
    shape.runner = environment.runner
    environment.shape_class = shape
    parsed.run_time = None  # the shape ends the test

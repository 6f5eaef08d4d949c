"""How many users there are over time: steps, spike, soak. `--users` is the most, `--run-time` all.

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


def users_at(shape: str, share: float, most: int) -> int:
    """Users when this share (0 to 1) of the time has passed; 1 or more.

    steps  a fifth of them more in every fifth of the time
    spike  a fifth of them, in the middle fifth of the time all, then a fifth again
    soak   rising over the first tenth of the time, then all to the end
    """
    if shape == "steps":
        part = (math.floor(share * STEPS) + 1) / STEPS
    elif shape == "spike":
        part = 1.0 if SPIKE_FROM <= share < SPIKE_TO else SPIKE_BASE
    else:
        part = share / SOAK_RAMP
    return max(1, math.ceil(most * min(1.0, part) - 1e-9))


class Shape(LoadTestShape):
    """One of them over a time that is given. Not for Locust to find by itself."""

    abstract = True
    use_common_options = True

    def __init__(self, shape: str, most: int, run_time_s: float) -> None:
        self._shape, self._most, self._run_time_s = shape, most, run_time_s
        self.reset_time()

    def reset_time(self) -> None:
        """Locust does, when the test begins."""
        self._start = time.perf_counter()

    def tick(self) -> tuple[int, float] | None:
        """Locust asks once a second: users, and how many of them may start a second."""
        share = (time.perf_counter() - self._start) / self._run_time_s
        return None if share >= 1 else (users_at(self._shape, share, self._most), self._most)


def choose(environment: Environment, **_: Any) -> None:
    """Listener of `init`: use the shape that was asked for."""
    parsed: Any = environment.parsed_options
    if not parsed.shape or isinstance(environment.runner, WorkerRunner):
        return
    shape = Shape(parsed.shape, int(parsed.num_users), float(parsed.run_time))
    shape.runner = environment.runner
    environment.shape_class = shape
    parsed.run_time = None  # the shape ends the test

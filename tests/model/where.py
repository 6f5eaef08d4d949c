"""Where: the device that tests make their runners on, so that a suite can run on another one.

The CPU, unless a fixture sets another: late devices in runner/test_cuda.py, CUDA in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable

from streamer.model.runner.device import Device


class Where:
    """`make` returns a new device; None: the CPU."""

    make: Callable[[], Device | None] = staticmethod(lambda: None)

"""Where: the device that tests make their runners on, so that a suite can run on another one.

The CPU, unless a fixture says otherwise: test_cuda_runner.py's late devices, tests/gpu's CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

from streamer.model.runner.device import Device


class Where:
    """`make` gives a new device; None: the CPU."""

    make: Callable[[], Device | None] = staticmethod(lambda: None)

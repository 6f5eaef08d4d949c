"""The errors of an engine that takes no requests: not loaded yet, draining, or ended.

Each is copied for every caller, since an exception carries the traceback of each raise. Called by
AsyncEngine, and by the server before it asks.
"""

from __future__ import annotations

import copy
from typing import Final, TypeVar

from streamer.errors import EngineDead, Overloaded, StreamerError

CLOSE_S: Final = 5.0  # what is under way when an engine is closed ends in less, or hangs
LOADING_RETRY_S, DRAINING_RETRY_S = 2.0, 5.0
SHUTDOWN: Final = "server_shutdown"  # the code of what a shutdown cuts off
RESTART: Final = "server_restart"  # the code of what goes on when the server is there again
STEERED: Final = "steered"  # and of what its client cut off, to send other input
E = TypeVar("E", bound=StreamerError)


def fresh_copy(error: E) -> E:
    """The same error, to be raised once more: each raise adds its frames to the one it raises."""
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh


def loading() -> Overloaded:
    """Not loaded yet: requests are taken later."""
    return Overloaded(
        "the model is still loading", retry_after_s=LOADING_RETRY_S, code="model_loading"
    )


def draining() -> Overloaded:
    """Shutting down: no new requests are taken."""
    return Overloaded(
        "the server is shutting down", retry_after_s=DRAINING_RETRY_S, code="draining"
    )


def cut_off() -> Overloaded:
    """The server stopped before the answer was whole."""
    return Overloaded(
        "the server is shutting down and has cut this answer off",
        retry_after_s=DRAINING_RETRY_S,
        code=SHUTDOWN,
    )


def restarting() -> Overloaded:
    """The server stopped before the answer was whole, which its journal has."""
    return Overloaded(
        "the server is restarting: this answer goes on when it is there again",
        retry_after_s=DRAINING_RETRY_S,
        code=RESTART,
    )


def forked(pid: int) -> EngineDead:
    """The engine was started in process `pid`, and this process is a forked child of it."""
    return EngineDead(
        f"this engine's threads are in process {pid}, and not in the child that was forked from "
        f"it: make an engine there",
        code="engine_forked",
    )


def ended_error(death: EngineDead | None) -> EngineDead:
    """The engine has ended: by `death`, or closed in order (None)."""
    if death is None:
        return EngineDead("the engine is closed", code="engine_closed")
    return fresh_copy(death)

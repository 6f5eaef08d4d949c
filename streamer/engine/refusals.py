"""Why an engine takes no requests: not loaded yet, draining, or gone for good.

The errors that say so, made anew for everybody who is told: an exception carries the traceback of
whoever raised it. Called by AsyncEngine, and by the server before it asks.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from streamer.errors import EngineDead, Overloaded, StreamerError

LOADING_RETRY_S, DRAINING_RETRY_S = 2.0, 5.0
E = TypeVar("E", bound=StreamerError)


def anew(error: E) -> E:
    """The same error, to be raised once more: each raise adds its frames to the one it raises."""
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh


def loading() -> Overloaded:
    """It will take them."""
    return Overloaded(
        "the model is still loading", retry_after_s=LOADING_RETRY_S, code="model_loading"
    )


def draining() -> Overloaded:
    """It takes none any more."""
    return Overloaded(
        "the server is shutting down", retry_after_s=DRAINING_RETRY_S, code="draining"
    )


def gone(death: EngineDead | None) -> EngineDead:
    """It has ended: of what it died, or closed in order."""
    if death is None:
        return EngineDead("the engine is closed", code="engine_closed")
    return anew(death)

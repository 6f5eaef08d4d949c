"""Streamer: a streaming engine for language models. The public names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.core.plan import TokenLogprob
    from streamer.core.sampling import SamplingParams
    from streamer.engine.engine import AsyncEngine
    from streamer.engine.stream import Delta
    from streamer.errors import (
        ClientLeft,
        ConfigError,
        ContextLengthExceeded,
        DeadlineExceeded,
        EngineDead,
        Forbidden,
        InvalidRequest,
        InvariantViolated,
        JournalInUse,
        ModelNotSupported,
        NotAuthenticated,
        NotEnoughMemory,
        NotFound,
        Overloaded,
        PoolHung,
        RankFailed,
        RateLimited,
        ReaderTooSlow,
        RequestFailed,
        StepHung,
        StreamerError,
        TooLarge,
    )
    from streamer.llm import LLM, Completion, Output, Usage

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "ClientLeft",
    "Completion",
    "Config",
    "ConfigError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Delta",
    "EngineDead",
    "Forbidden",
    "InvalidRequest",
    "InvariantViolated",
    "JournalInUse",
    "ModelNotSupported",
    "NotAuthenticated",
    "NotEnoughMemory",
    "NotFound",
    "Output",
    "Overloaded",
    "PoolHung",
    "RankFailed",
    "RateLimited",
    "ReaderTooSlow",
    "RequestFailed",
    "SamplingParams",
    "StepHung",
    "StreamerError",
    "TokenLogprob",
    "TooLarge",
    "Usage",
    "__version__",
]

_HOMES = {
    "AsyncEngine": "streamer.engine.engine",
    "Completion": "streamer.llm",
    "Config": "streamer.config",
    "Delta": "streamer.engine.stream",
    "LLM": "streamer.llm",
    "Output": "streamer.llm",
    "SamplingParams": "streamer.core.sampling",
    "TokenLogprob": "streamer.core.plan",
    "Usage": "streamer.llm",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'streamer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "streamer.errors")), name)


def __dir__() -> list[str]:
    return __all__

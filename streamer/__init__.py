"""Streamer: a streaming engine for language models. The public names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.core.sampling import SamplingParams
    from streamer.engine.engine import AsyncEngine
    from streamer.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "Config", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncEngine": "streamer.engine.engine",
    "Config": "streamer.config",
    "LLM": "streamer.llm",
    "SamplingParams": "streamer.core.sampling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)

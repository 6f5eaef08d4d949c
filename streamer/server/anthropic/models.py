"""The list of models in Anthropic's form, for a client that sends its header.

Pure: app.py gives it the names and sends what it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from streamer.server.openai.common import encode
from streamer.server.openai.models import check_model

VERSION: Final = "anthropic-version"  # the header that all of Anthropic's clients send


class ModelInfo(msgspec.Struct, frozen=True, tag_field="type", tag="model"):
    """A model that is served."""

    id: str
    display_name: str
    created_at: datetime


class ModelPage(msgspec.Struct, frozen=True):
    """All models that are served, on one page."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


def is_anthropics(headers: Mapping[str, str]) -> bool:
    """Whether a client expects Anthropic's form of what OpenAI's API has at the same path."""
    return VERSION in headers


def models_page(served: tuple[str, ...], created: int) -> bytes:
    """The body of GET /v1/models; `created` is unix seconds."""
    return encode(ModelPage([_info(n, created) for n in served], served[0], served[-1]))


def model_info(name: str, served: tuple[str, ...], created: int) -> bytes:
    """The body of GET /v1/models/{id}; NotFound for a name that is not served."""
    return encode(_info(check_model(name, served), created))


def _info(name: str, created: int) -> ModelInfo:
    return ModelInfo(name, name, datetime.fromtimestamp(created, UTC))

"""The list of models: one model under its served names, and which of them a request means.

Pure: app.py gives it the names and sends what it builds.
"""

from __future__ import annotations

import msgspec

from streamer.core.sampling import model_defaults
from streamer.core.sizes import ModelInfo
from streamer.errors import NotFound
from streamer.server.errors import clip
from streamer.server.openai.common import encode


class Model(msgspec.Struct, frozen=True, tag_field="object", tag="model"):
    """A model that is served.

    max_model_len      the longest context, in tokens
    sampling_defaults  sampling settings of requests that do not name them
    """

    id: str
    created: int
    max_model_len: int
    sampling_defaults: dict[str, float]
    owned_by: str = "streamer"


def check_model(given: str | None, served: tuple[str, ...]) -> str:
    """The served name that a request means, the first if it gives none; NotFound if unknown."""
    if given is None:
        return served[0]
    if given in served:
        return given
    names = ", ".join(served)
    raise NotFound(
        f"model {clip(given)!r} is not served here; there is {names}",
        param="model",
        code="model_not_found",
    )


def models_body(served: tuple[str, ...], created: int, info: ModelInfo) -> bytes:
    """The body of GET /v1/models."""
    data = [_model(name, created, info) for name in served]
    return encode({"object": "list", "data": data})


def model_body(name: str, served: tuple[str, ...], created: int, info: ModelInfo) -> bytes:
    """The body of GET /v1/models/{id}."""
    return encode(_model(check_model(name, served), created, info))


def _model(name: str, created: int, info: ModelInfo) -> Model:
    return Model(name, created, info.max_model_len, model_defaults(info.generation_defaults))

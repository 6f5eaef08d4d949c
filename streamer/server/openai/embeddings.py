"""Embeddings: the body of POST /v1/embeddings, its table of known fields, and the answer.

An embedding is the model's last hidden state at the input's last token, normalized: what the next
token would be drawn from. So an input is a prompt of which one token is drawn and not sent. Pure.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.openai.common import encode
from streamer.server.openai.completions import CompletionAnswer, CompletionRequest
from streamer.server.openai.fields import LABELS, Reader, Table, refused

if TYPE_CHECKING:
    from streamer.engine.stream import Delta

FIELDS: Final[Table] = {
    **LABELS,
    # vLLM's
    "normalize": refused(True),
    "embed_dtype": refused("float32"),
    "endianness": refused("native", "little"),
    "truncate_prompt_tokens": refused(),
    "messages": refused(instead="input is text or token ids"),
}


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Inputs whose embeddings are requested.

    dimensions  the first ones alone, normalized again
    """

    input: str | list[str | int | tuple[int, ...]]
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def asked(self) -> Asked:
        """The prompts that the engine is asked to read."""
        if self.input == "":
            raise InvalidRequest("input is empty", param="input")
        return Asked(
            prompt=self.input,
            model=self.model,
            add_special_tokens=self.add_special_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class Asked(CompletionRequest, kw_only=True):
    """The same as a completion of one token."""

    max_prompts: ClassVar[int] = 1024

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """One token, with the hidden state that it is drawn from."""
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, hidden_states=True)

    @property
    def names(self) -> dict[str, str]:
        """Errors name the body's own field."""
        return {"prompt": "input"}


READER: Final = Reader({EmbeddingRequest: FIELDS})


class Embedding(msgspec.Struct, frozen=True, tag_field="object", tag="embedding"):
    """One input's: numbers, or their float32 bytes, little-endian, in base64."""

    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    """The answer, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class EmbeddingAnswer(CompletionAnswer):
    """The body over the inputs' streams."""

    def __init__(self, given: EmbeddingRequest, *more: Any) -> None:
        super().__init__(*more)
        self._given = given

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The embeddings; InvalidRequest for more dimensions than there are."""
        count = sum(stream.num_prompt_tokens for stream in self._streams)
        data = []
        for i, deltas in enumerate(results):
            (drawn,) = (found for d in deltas for found in d.logprobs or ())
            state = _normalized(array("f", drawn.hidden), self._given.dimensions)
            is_bytes = self._given.encoding_format == "base64"
            data.append(Embedding(i, b64encode(state).decode() if is_bytes else state.tolist()))
        return encode(Embeddings(data, self._model, EmbeddingUsage(count, count)))


def _normalized(state: array[float], dimensions: int | None) -> array[float]:
    if dimensions is not None:
        if dimensions > len(state):
            raise InvalidRequest(
                f"dimensions is {dimensions}, the model has {len(state)}", param="dimensions"
            )
        state = state[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in state)) or 1.0
    return array("f", (x / length for x in state))

"""Contexts of requests on disk: as bytes for the journal, and back after a restart.

Service hands one to the engine. A restored answer is built by the code that builds every other: it
has the same context, body and parsing that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from streamer.server.context import Context, context_of
from streamer.server.openai.chat import ChatRequest
from streamer.server.responses.body import ResponseCreate
from streamer.server.telemetry.records import Operation, RequestInfo

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream

BODIES: Final = {"response": ResponseCreate, "chat": ChatRequest}


class StoredContext(msgspec.Struct, frozen=True, array_like=True):
    """A Context and the bytes of its body."""

    context: Context
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredContext).decode


class Contexts:
    """The journal's Contexts (engine/journal/writer.py).

    on_restored  called for each stream that goes on
    """

    def __init__(self, on_restored: Callable[[RequestInfo, TokenStream], None]) -> None:
        self._on_restored = on_restored

    def encode(self, context: object) -> bytes:
        """Called on the journal's thread; a Context is frozen."""
        if not isinstance(context, Context):
            raise TypeError(f"{type(context).__name__} is no Context")
        body = context.body
        if isinstance(body, ChatRequest):
            body = replace(body, messages=[])  # which only its prompt was made of
        return _encode(StoredContext(replace(context, body=None), _encode(body)))

    def decode(self, data: bytes) -> Context:
        """The Context; a msgspec error for another version's."""
        stored = _decode(data)
        body: Any = msgspec.msgpack.decode(stored.body, type=BODIES[stored.context.kind])
        return replace(stored.context, body=body)

    def restored(self, stream: TokenStream) -> None:
        """A stream came back."""
        if not stream.is_finished:
            context = context_of(stream)
            operation: Operation = "responses" if context.kind == "response" else "chat"
            info = RequestInfo(operation, "http", context.model, context.tenant)
            self._on_restored(info, stream)

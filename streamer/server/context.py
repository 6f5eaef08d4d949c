"""Context: what the server keeps beside a request's tokens, so that its id alone finds it again.

The engine carries it, opaque, in the TokenStream and counts its bytes; retention is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from streamer.server.parsing.tools import Parsing

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream

ITEM_BYTES = 400  # of a Struct, its id and the objects around its text
BODY_BYTES = 2048
BYTES_PER_BYTE = 2  # about what CPython keeps per byte of JSON


class TurnItem(msgspec.Struct, frozen=True):
    """An item of a conversation.

    role  of a message; or call: the text is its arguments; tool: what it returned; or reasoning
    """

    id: str
    role: str
    text: str
    call_id: str = ""
    name: str = ""


class Context(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's body, its key, and the conversation before it.

    kind        the routes by which it can be found
    tenant      the digest of its key: other keys can't find it
    body        the decoded body
    model       the served name
    items       of a response: the conversation it answers, earlier turns' items among them
    prefix      text that the answer begins with, kept from the answer it was forked from
    session     the socket it was created on
    parsing     how its text is read; None: all of it is prose
    """

    kind: Literal["response", "chat"]
    tenant: str
    body: Any
    model: str
    items: tuple[TurnItem, ...] = ()
    prefix: str = ""
    session: str = ""
    parsing: Parsing | None = None

    @property
    def is_stored(self) -> bool:
        """Whether it can be found by its id after its end."""
        return self.kind == "chat" or self.body.store is not False

    @property
    def is_resumable(self) -> bool:
        """Whether its client can continue with it over another connection."""
        if self.kind == "response":
            return True
        options = self.body.stream_options
        return bool(self.body.detach_s or (options is not None and options.include_event_ids))

    @property
    def is_background(self) -> bool:
        """Whether it runs on without readers."""
        return self.kind == "response" and bool(self.body.background)

    def num_bytes(self, body_bytes: int) -> int:
        """About the bytes that it occupies, from the size of the body's JSON."""
        items = sum(ITEM_BYTES + BYTES_PER_BYTE * len(i.text.encode()) for i in self.items)
        return BODY_BYTES + BYTES_PER_BYTE * (body_bytes + len(self.prefix)) + items


def context_of(stream: TokenStream) -> Context:
    """The context of a stream that has one."""
    if not isinstance(stream.context, Context):
        raise TypeError(f"{stream.request_id} was not made by a resumable route")
    return stream.context

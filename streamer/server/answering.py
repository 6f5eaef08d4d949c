"""chat_answer: the builder of a chat's chunks and body, for its first reader and for later ones.

Takes everything from the stream and its context, so that a resume needs no more than the id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamer.server.context import context_of
from streamer.server.openai.chat import ChatAnswer
from streamer.server.openai.chat_tools import ParsedChatAnswer

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream
    from streamer.server.service import Service


def chat_answer(
    service: Service, stream: TokenStream, after: Sequence[int] | None = None
) -> ChatAnswer:
    """The answer from after the numbers `after` on; parsed where its context says so."""
    context = context_of(stream)
    given = (context.body, [stream], context.model, service.token_text, after, service.fingerprint)
    if context.parsing is None:
        return ChatAnswer(*given)
    return ParsedChatAnswer(context.parsing, *given)

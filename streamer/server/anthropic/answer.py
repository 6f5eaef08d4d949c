"""The builder of Anthropic's messages: Deltas in, the events of a stream or one whole body out.

Pure: routes.py makes one for each request, transport/sse.py follows the stream with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streamer.core.plan import Finish, FinishReason
from streamer.errors import StreamerError
from streamer.server.anthropic.body import MessagesRequest
from streamer.server.anthropic.types import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Stopped,
    TextContent,
    TextDelta,
)
from streamer.server.errors import anthropic_error
from streamer.server.openai.common import encode, failure, first_failure
from streamer.server.transport.frames import SSE, Framing, frame

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

PING: Final = frame("", encode({"type": "ping"}), "ping")
FRAMING: Final = Framing(SSE.media, PING)
_TEXT_HERE: Final = "(text)"


class MessagesAnswer:
    """Events and body of one message.

    message_start comes with the first tokens: only then is it known how many tokens of the prompt
    were found in the cache.
    """

    def __init__(self, body: MessagesRequest, stream: TokenStream, model: str) -> None:
        self._max_tokens = body.max_tokens
        self._stream = stream
        self._model = model
        self._is_begun = False
        self._num_blocks = 0  # begun ones
        self._open: Around | None = None

    @property
    def request_id(self) -> str:
        """The id on the wire."""
        return self._stream.request_id

    @property
    def framing(self) -> Framing:
        """A stream is kept alive by Anthropic's ping."""
        return FRAMING

    def opening(self) -> bytes:
        """Nothing yet."""
        return b""

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas of one step or several."""
        parts: list[bytes] = []
        if not self._is_begun:
            self._is_begun = True
            parts.append(_frame(MessageStart(self._message([], None, 0))))
        for d in deltas:
            if d.text:
                parts.append(self._text(d.text))
            if d.finish is not None and failure(d.finish) is None:
                parts.append(self._close_block())
                usage = self._usage(d.finish.num_tokens)
                parts.append(_frame(MessageDelta(self._stopped(d.finish), usage)))
        return b"".join(parts)

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """The error that ends the answer, if it was cancelled or has failed."""
        return first_failure(deltas)

    def closing(self) -> bytes:
        """The last event."""
        return _frame(MessageStop())

    def error(self, error: StreamerError) -> bytes:
        """The last event of a stream that failed after the 200."""
        return frame("", anthropic_error(error)[1], "error")

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The body of an answer that was not streamed."""
        finish = results[0][-1].finish
        text = "".join(d.text for d in results[0])
        num_tokens = 0 if finish is None else finish.num_tokens
        stopped = None if finish is None else self._stopped(finish)
        return encode(self._message([TextContent(text)] if text else [], stopped, num_tokens))

    def _text(self, text: str) -> bytes:
        begun = b""
        if self._open is None:
            index = self._num_blocks
            self._num_blocks += 1
            self._open = Around(index)
            begun = _frame(ContentBlockStart(index, TextContent("")))
        return begun + self._open.text(text)

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _frame(ContentBlockStop(self._num_blocks - 1))

    def _message(
        self, content: list[TextContent], stopped: Stopped | None, num_tokens: int
    ) -> Message:
        return Message(
            self.request_id,
            self._model,
            content,
            None if stopped is None else stopped.stop_reason,
            None if stopped is None else stopped.stop_sequence,
            self._usage(num_tokens),
        )

    def _usage(self, num_tokens: int) -> MessageUsage:
        cached = self._stream.cached_tokens
        return MessageUsage(self._stream.num_prompt_tokens - cached, num_tokens, cached)

    def _stopped(self, finish: Finish) -> Stopped:
        if isinstance(finish.stop, str):
            return Stopped("stop_sequence", finish.stop)
        if finish.reason is not FinishReason.LENGTH:
            return Stopped("end_turn", None)
        is_full = finish.num_tokens < self._max_tokens
        return Stopped("model_context_window_exceeded" if is_full else "max_tokens", None)


class Around:
    """The event of more text in a block, around the text, which alone changes."""

    def __init__(self, index: int) -> None:
        whole = _frame(ContentBlockDelta(index, TextDelta(_TEXT_HERE)))
        self._before, _, self._after = whole.partition(encode(_TEXT_HERE))

    def text(self, text: str) -> bytes:
        """The whole event."""
        return b"".join((self._before, encode(text), self._after))


def _frame(event: Event) -> bytes:
    return frame("", encode(event), str(event.__struct_config__.tag))

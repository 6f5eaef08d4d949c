"""The builder of Anthropic's messages: Deltas in, the events of a stream or one whole body out.

Pure: routes.py makes one for each request, transport/sse.py follows the stream with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streamer.core.plan import Finish, FinishReason
from streamer.errors import StreamerError
from streamer.server.anthropic.blocks import Blocks, sent, whole_blocks
from streamer.server.anthropic.types import (
    Content,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputDetails,
    Stopped,
    ToolUseContent,
)
from streamer.server.errors import anthropic_error
from streamer.server.openai.common import details_of, encode, failure, first_failure
from streamer.server.parsing.events import Event, Text
from streamer.server.transport.frames import SSE, Framing, frame

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream
    from streamer.server.parsing.tools import Parsing

PING: Final = frame("", encode({"type": "ping"}), "ping")
FRAMING: Final = Framing(SSE.media, PING)


class MessagesAnswer:
    """Events and body of one message.

    message_start comes with the first tokens: only then is it known how many tokens of the prompt
    were found in the cache.

    max_tokens  as the body has it
    parsing     how the text is read; None: all of it is prose
    """

    def __init__(
        self, max_tokens: int, parsing: Parsing | None, stream: TokenStream, model: str
    ) -> None:
        self._max_tokens = max_tokens
        self._parsing = parsing
        self._parser = None if parsing is None else parsing.parser()
        self._stream = stream
        self._model = model
        self._is_begun = False
        self._blocks = Blocks(self._call_id)

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
            parts.append(sent(MessageStart(self._message([], None, 0))))
        for d in deltas:
            if d.text:
                parts.append(self._blocks.put(self._read(d.text)))
            if d.finish is not None and failure(d.finish) is None:
                parser = self._parser
                if parser is not None:
                    parts.append(self._blocks.put(parser.end()))
                parts.append(self._blocks.close())
                has_calls = parser is not None and parser.num_calls > 0
                usage = self._usage(d.finish.num_tokens)
                parts.append(sent(MessageDelta(self._stopped(d.finish, has_calls), usage)))
        return b"".join(parts)

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """The error that ends the answer, if it was cancelled or has failed."""
        return first_failure(deltas)

    def closing(self) -> bytes:
        """The last event."""
        return sent(MessageStop())

    def error(self, error: StreamerError) -> bytes:
        """The last event of a stream that failed after the 200."""
        return frame("", anthropic_error(error)[1], "error")

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The body of an answer that was not streamed."""
        finish = results[0][-1].finish
        text = "".join(d.text for d in results[0])
        events = self._read(text) if text else []
        if self._parser is not None:
            events += self._parser.end()
        content = whole_blocks(events, self._call_id)
        has_calls = any(isinstance(block, ToolUseContent) for block in content)
        num_tokens = 0 if finish is None else finish.num_tokens
        stopped = None if finish is None else self._stopped(finish, has_calls)
        return encode(self._message(content, stopped, num_tokens))

    def _read(self, text: str) -> list[Event]:
        return [Text(text)] if self._parser is None else self._parser.feed(text)

    def _call_id(self, index: int) -> str:
        if self._parsing is None:
            raise RuntimeError("there are no calls in prose")
        return self._parsing.call_id(self.request_id, 0, index)

    def _message(self, content: list[Content], stopped: Stopped | None, num_tokens: int) -> Message:
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
        details = OutputDetails()
        if num_tokens:  # it has ended
            of = details_of([self._stream])
            details = OutputDetails(
                of.reasoning_tokens, of.accepted_prediction_tokens, of.rejected_prediction_tokens
            )
        computed = self._stream.num_prompt_tokens - cached
        return MessageUsage(computed, num_tokens, cached, output_tokens_details=details)

    def _stopped(self, finish: Finish, has_calls: bool) -> Stopped:
        if isinstance(finish.stop, str):
            return Stopped("stop_sequence", finish.stop)
        if finish.reason is not FinishReason.LENGTH:
            return Stopped("tool_use" if has_calls else "end_turn", None)
        is_full = finish.num_tokens < self._max_tokens
        return Stopped("model_context_window_exceeded" if is_full else "max_tokens", None)

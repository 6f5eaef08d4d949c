"""The builder of Ollama's answers: Deltas in, lines of JSON or one whole body out.

Pure: routes.py makes one for each request, transport/sse.py follows the stream with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from streamer.core.plan import Finish
from streamer.errors import StreamerError
from streamer.server.errors import ollama_error
from streamer.server.ollama.types import (
    Answer,
    CalledFunction,
    ChatAnswer,
    Ending,
    GenerateAnswer,
    Message,
    ToolCall,
)
from streamer.server.openai.common import (
    TokenText,
    chat_logprobs,
    encode,
    failure,
    finish_reason,
    first_failure,
    only_if,
)
from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.transport.frames import Framing

if TYPE_CHECKING:
    from streamer.core.plan import TokenLogprob
    from streamer.engine.stream import Delta, TokenStream
    from streamer.server.parsing.tools import Parsing

LINES: Final = b"application/x-ndjson"
NANO: Final = 1_000_000_000


class Said(msgspec.Struct, frozen=True):
    """What a piece of the model's text brings."""

    text: str = ""
    thought: str = ""
    calls: list[ToolCall] = []


class OllamaAnswer:
    """Lines and body of one answer.

    parsing  how the text is read; None: all of it is prose
    text     the bytes of a token, for log probabilities
    is_chat  it is a message, else a text
    """

    def __init__(
        self,
        stream: TokenStream,
        model: str,
        parsing: Parsing | None,
        text: TokenText,
        *,
        is_chat: bool,
    ) -> None:
        self._stream = stream
        self._parser = None if parsing is None else parsing.parser()
        self._text = text
        self._is_chat = is_chat
        self._call: tuple[str, list[str]] | None = None  # one that has begun: name, arguments
        self._begun: dict[str, Any] = {"model": model, "created_at": written(stream.created)}

    @property
    def request_id(self) -> str:
        """The id in the head of the answer."""
        return self._stream.request_id

    @property
    def framing(self) -> Framing:
        """A stream is kept alive by a line without text: an empty line is no JSON."""
        return Framing(LINES, _line(self._answer(Said())))

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """A line for the text of each delta, and the last one."""
        parts: list[bytes] = []
        for d in deltas:
            said = self._read(d.text)
            if said != Said() or d.logprobs:
                parts.append(_line(self._answer(said, d.logprobs)))
            if d.finish is not None and failure(d.finish) is None:
                parts.append(_line(self._answer(self._rest(), finish=d.finish)))
        return b"".join(parts)

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """The error that ends the answer, if it was cancelled or has failed."""
        return first_failure(deltas)

    def closing(self) -> bytes:
        """Nothing: the line that says `done` is the last."""
        return b""

    def error(self, error: StreamerError) -> bytes:
        """The last line of a stream that failed after the 200."""
        return ollama_error(error) + b"\n"

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The body of an answer that was not streamed."""
        deltas = results[0]
        logprobs = [lp for d in deltas for lp in d.logprobs or ()]
        said, rest = self._read("".join(d.text for d in deltas)), self._rest()
        said = Said(said.text + rest.text, said.thought + rest.thought, [*said.calls, *rest.calls])
        return encode(self._answer(said, logprobs, deltas[-1].finish))

    def _read(self, text: str) -> Said:
        """What more of the text brings."""
        return Said(text) if self._parser is None else self._said(self._parser.feed(text))

    def _rest(self) -> Said:
        """What the end of the text brings; a call that is not whole is text."""
        said = Said() if self._parser is None else self._said(self._parser.end())
        if self._call is None:
            return said
        return msgspec.structs.replace(said, text=said.text + "".join(self._call[1]))

    def _said(self, events: Sequence[Event]) -> Said:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for event in events:
            match event:
                case Text(text):
                    texts.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case ToolCallBegin():
                    self._call = event.name, []
                case ToolArguments(_, text) if self._call is not None:
                    self._call[1].append(text)
                case ToolCallEnd() if self._call is not None:
                    (name, parts), self._call = self._call, None
                    try:
                        given = msgspec.json.decode("".join(parts) or "{}", type=dict[str, Any])
                        calls.append(ToolCall(CalledFunction(name, given)))
                    except (msgspec.DecodeError, RecursionError):
                        texts += parts
        return Said("".join(texts), "".join(thoughts), calls)

    def _answer(
        self,
        said: Said,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: Finish | None = None,
    ) -> Answer:
        ending = {} if finish is None else msgspec.structs.asdict(self._ending(finish))
        values = only_if(bool(logprobs), chat_logprobs(logprobs or (), self._text))
        fields = {**self._begun, "done": finish is not None, "logprobs": values, **ending}
        thinking = said.thought or UNSET
        if self._is_chat:
            message = Message(said.text, thinking=thinking, tool_calls=said.calls or UNSET)
            return ChatAnswer(message=message, **fields)
        return GenerateAnswer(response=said.text, thinking=thinking, **fields)

    def _ending(self, finish: Finish) -> Ending:
        timing = self._stream.timing
        total_s, first_s = timing.total_s or 0.0, timing.first_token_s or 0.0
        return Ending(
            done_reason=finish_reason(finish.reason),
            total_duration=int(total_s * NANO),
            prompt_eval_count=self._stream.num_prompt_tokens,
            prompt_eval_duration=int((timing.prefill_s or 0.0) * NANO),
            eval_count=finish.num_tokens,
            eval_duration=int(max(0.0, total_s - first_s) * NANO),
        )


def written(time_s: float) -> str:
    """A time as Ollama writes it, from unix seconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, time_s: float, *, is_chat: bool) -> bytes:
    """The answer to a request that asks only that the model is loaded."""
    fields: dict[str, Any] = {"model": model, "created_at": written(time_s), "done": True}
    fields["done_reason"] = "load"
    answer: Answer = (
        ChatAnswer(message=Message(""), **fields)
        if is_chat
        else GenerateAnswer(response="", **fields)
    )
    return encode(answer)


def _line(answer: Answer) -> bytes:
    return encode(answer) + b"\n"

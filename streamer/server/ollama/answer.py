"""The builder of Ollama's answers: Deltas in, lines of JSON or one whole body out.

Pure: routes.py makes one for each request, transport/sse.py follows the stream with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from streamer.core.plan import Finish
from streamer.errors import StreamerError
from streamer.server.errors import ollama_error
from streamer.server.ollama.types import Answer, ChatAnswer, Ending, GenerateAnswer, Message
from streamer.server.openai.common import (
    TokenText,
    chat_logprobs,
    encode,
    failure,
    finish_reason,
    first_failure,
    only_if,
)
from streamer.server.transport.frames import Framing

if TYPE_CHECKING:
    from streamer.core.plan import TokenLogprob
    from streamer.engine.stream import Delta, TokenStream

LINES: Final = b"application/x-ndjson"
NANO: Final = 1_000_000_000


class OllamaAnswer:
    """Lines and body of one answer.

    is_chat  it is a message, else a text
    text     the bytes of a token, for log probabilities
    """

    def __init__(
        self, stream: TokenStream, model: str, text: TokenText, *, is_chat: bool, has_logprobs: bool
    ) -> None:
        self._stream = stream
        self._text = text
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._begun: dict[str, Any] = {"model": model, "created_at": written(stream.created)}

    @property
    def request_id(self) -> str:
        """The id in the head of the answer."""
        return self._stream.request_id

    @property
    def framing(self) -> Framing:
        """A stream is kept alive by a line without text: an empty line is no JSON."""
        return Framing(LINES, _line(self._answer("")))

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """A line for the text of each delta, and the last one."""
        parts: list[bytes] = []
        for d in deltas:
            if d.text or (self._has_logprobs and d.token_ids):
                parts.append(_line(self._answer(d.text, d.logprobs)))
            if d.finish is not None and failure(d.finish) is None:
                parts.append(_line(self._answer("", finish=d.finish)))
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
        text = "".join(d.text for d in deltas)
        return encode(self._answer(text, logprobs, deltas[-1].finish))

    def _answer(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: Finish | None = None,
    ) -> Answer:
        ending = {} if finish is None else msgspec.structs.asdict(self._ending(finish))
        values = only_if(bool(logprobs), chat_logprobs(logprobs or (), self._text))
        fields = {**self._begun, "done": finish is not None, "logprobs": values, **ending}
        if self._is_chat:
            return ChatAnswer(message=Message(text), **fields)
        return GenerateAnswer(response=text, **fields)

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

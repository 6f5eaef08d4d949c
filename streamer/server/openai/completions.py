"""Completions: the body, its table of known fields, and the builder of its answers.

Pure: a body may hold a batch of prompts, each with n choices; choice p * n + c is choice c of
prompt p. app.py and transport/sse.py drive the builder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final, cast

import msgspec
from msgspec import UNSET, UnsetType

from streamer.core.plan import FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest, StreamerError
from streamer.server.errors import error_body
from streamer.server.openai.common import (
    PromptFields,
    PromptLogprobs,
    StreamOptions,
    TokenText,
    Usage,
    by_choice,
    encode,
    failure,
    finish_reason,
    first_failure,
    named,
    only_if,
    sampling_params,
    scored_prompt,
    scores_of,
    stop_reason,
    token_id_text,
    usage_of,
    usage_so_far,
)
from streamer.server.openai.completion_logprobs import (
    CompletionLogprobs,
    Echo,
    OffsetCounter,
    prompt_logprobs,
)
from streamer.server.openai.fields import LABELS, SAMPLING, Reader, Table, refused
from streamer.server.transport.frames import DONE, SSE, Framing, frame

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 256
MAX_CHOICES = 256  # prompts times n

FIELDS: Final[Table] = {
    **SAMPLING,
    **LABELS,
    "suffix": refused("", instead="a prompt with the model's own fill-in tokens does the same"),
    # vLLM's
    "prompt_embeds": refused(),
}


class CompletionRequest(PromptFields, kw_only=True):
    """Texts to continue, and how: the fields that have an effect."""

    max_prompts: ClassVar[int] = MAX_PROMPTS

    prompt: str | list[str | int | tuple[int, ...]]  # a million lists take 0.3 s, tuples 0.03
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each text or token ids."""
        prompts = self._prompts()
        n, name = self.num_drawn, "n" if self.best_of is None else "best_of"
        if len(prompts) * n > max(MAX_CHOICES, self.max_prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts with {name}={n} are {len(prompts) * n} choices, "
                f"the limit is {MAX_CHOICES}",
                param=name,
            )
        return prompts

    @property
    def num_choices(self) -> int:
        """Choices of each prompt in the answer."""
        return 1 if self.n is None else self.n

    @property
    def num_drawn(self) -> int:
        """Choices of each prompt that are drawn, of which the best are in the answer."""
        return self.num_choices if self.best_of is None else self.best_of

    def _prompts(self) -> list[str | tuple[int, ...]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is empty", param="prompt")
        if set(map(type, prompt)) == {int}:  # in C: there may be millions
            return [cast("tuple[int, ...]", tuple(prompt))]
        if len(prompt) > self.max_prompts:
            raise InvalidRequest(
                f"prompt has {len(prompt)} entries, the limit is {self.max_prompts}",
                param="prompt",
            )
        out: list[str | tuple[int, ...]] = []
        for i, p in enumerate(prompt):
            if isinstance(p, int):
                raise InvalidRequest(
                    "prompt is a text, token ids, or a list of either", param=f"prompt[{i}]"
                )
            if not p:
                raise InvalidRequest("a prompt in the list is empty", param=f"prompt[{i}]")
            out.append(p)
        return out

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options requires stream: true", param="stream_options")
            self.stream_options.check()
            if self.stream_options.include_event_ids:
                raise InvalidRequest(
                    "stream_options.include_event_ids is for streams that can be resumed: chats",
                    param="stream_options.include_event_ids",
                    code="unsupported_parameter",
                )
        self.check_prompt_logprobs()
        scores = self.logprobs if self.echo else None
        if None not in (scores, self.prompt_logprobs) and scores != self.prompt_logprobs:
            raise InvalidRequest(
                "prompt_logprobs beside echo and logprobs is the same number, or left out",
                param="prompt_logprobs",
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 requires echo: true", param="max_tokens")
        self._check_best_of()
        is_chosen = self.num_drawn > self.num_choices
        names = {} if self.best_of is None else {"n": "best_of"}
        with named({**self.names, **names}):
            params = sampling_params(
                self,
                defaults,
                max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens or 1,
                logprobs=0 if self.logprobs is None and is_chosen else self.logprobs,
                prompt_logprobs=self.prompt_logprobs if scores is None else scores,
                n=self.num_drawn,
            )
        return msgspec.structs.replace(params, logprobs=None) if self.is_only_echo else params

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.num_choices:
            raise InvalidRequest(
                f"best_of ({self.best_of}) must be at least n ({self.num_choices})", param="best_of"
            )
        if self.best_of > self.num_choices and self.stream:
            raise InvalidRequest(
                "best_of above n is not possible with stream: true", param="best_of"
            )
        if self.best_of > self.num_choices and self.use_beam_search:  # type: ignore[attr-defined]
            raise InvalidRequest(
                "best_of is not possible with use_beam_search: beam_width does the same",
                param="best_of",
            )

    @property
    def is_only_echo(self) -> bool:
        """Whether only the prompt is asked for: one token is drawn then, and not sent."""
        return bool(self.echo) and self.max_tokens == 0


READER: Final = Reader({CompletionRequest: FIELDS})


# ---------------------------------------------------------------- answers


class Choice(msgspec.Struct, frozen=True):
    """One of the answers, or in a stream what a chunk adds to it.

    seed             where there are several prompts
    stop_reason      the stop string or token that ended it
    prompt_logprobs  in a whole answer
    cumulative_logprob, score  of a beam search, with its end
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A completion, whole or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET


class CompletionAnswer:
    """Frames and bodies of one completion over its prompts' streams.

    echoes  for `echo`: each prompt's, which goes before every choice's own text
    """

    def __init__(
        self,
        body: CompletionRequest,
        streams: Sequence[TokenStream],
        model: str,
        text: TokenText,
        echoes: Sequence[Echo] = (),
        fingerprint: str = "",
    ) -> None:
        self._body = body
        self._streams = streams
        self._model = model
        self._text = text
        self._names = token_id_text if body.return_tokens_as_token_ids else text
        self._fingerprint = fingerprint
        self._echoes = echoes or [Echo()] * len(streams)
        self._scores: dict[int, CompletionLogprobs] = {}  # of each prompt
        self._n = body.num_choices
        self._offsets = [OffsetCounter(echo.text) for echo in self._echoes for _ in range(self._n)]
        self._begun: set[int] = set()
        self._seed_sent = False
        self._created = int(streams[0].created)
        options = body.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._counts_along = bool(options is not None and options.continuous_usage_stats)

    @property
    def request_id(self) -> str:
        """The id on the wire: the first prompt's."""
        return self._streams[0].request_id

    @property
    def framing(self) -> Framing:
        """Without ids: nothing resumes a completion."""
        return SSE

    def opening(self) -> bytes:
        """Nothing: a completion's first chunk has text."""
        return b""

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """The chunks of the deltas of one step or several, for one prompt."""
        parts = []
        for d in map(self._shown, deltas):
            is_sent = d.token_ids and (d.logprobs or self._body.return_token_ids)
            is_end = d.finish is not None and failure(d.finish) is None
            if not (d.text or is_sent or is_end):
                continue
            index = source * self._n + d.choice
            choice = self._choice(source, index, [d], index not in self._begun)
            parts.append(self._frame([choice], self._so_far(source, d)))
            self._begun.add(index)
        return b"".join(parts)

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """The error that ends the answer, if a choice was cancelled or has failed."""
        return first_failure(deltas)

    def closing(self) -> bytes:
        """The usage chunk, if the body asks for it, and the end."""
        if not self._include_usage:
            return DONE
        return self._frame([], usage=self._usage()) + DONE

    def error(self, error: StreamerError) -> bytes:
        """The last frame of a stream that failed after the 200."""
        return frame("", error_body(error))

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The body of an answer that was not streamed."""
        choices = []
        for source, deltas in enumerate(results):
            drawn = by_choice([self._shown(d) for d in deltas], self._body.num_drawn)
            if len(drawn) > self._n:
                drawn.sort(key=mean_logprob, reverse=True)
            for n, each in enumerate(drawn[: self._n]):
                choices.append(self._choice(source, source * self._n + n, each, is_first=True))
        return encode(
            Completion(
                self.request_id,
                self._created,
                self._model,
                choices,
                self._fingerprint,
                usage=self._usage(),
                seed=only_if(len(self._streams) == 1, self._streams[0].seed),
            )
        )

    def _choice(self, source: int, index: int, deltas: Sequence[Delta], is_first: bool) -> Choice:
        finish = deltas[-1].finish
        has_logprobs = self._body.logprobs is not None
        values = [lp for d in deltas for lp in d.logprobs or ()] if has_logprobs else []
        stream = self._streams[source]
        wants_ids = bool(self._body.return_token_ids)
        echo = self._echoes[source].text if is_first else ""
        return Choice(
            index,
            echo + "".join(d.text for d in deltas),
            self._logprobs(source, index, values, is_first),
            finish_reason(finish.reason)
            if finish is not None and failure(finish) is None
            else None,
            only_if(wants_ids, tuple(t for d in deltas for t in d.token_ids)),
            only_if(wants_ids and is_first, stream.prompt),
            only_if(is_first and len(self._streams) > 1, stream.seed),
            stop_reason(finish, stream.params) if finish is not None else UNSET,
            scored_prompt(stream.prompt_logprobs, self._text)
            if self._body.prompt_logprobs is not None
            else UNSET,
            *scores_of(finish),
        )

    def _so_far(self, source: int, d: Delta) -> Usage | None:
        """For `continuous_usage_stats`: the tokens of the chunk's own choice, as vLLM counts."""
        if not self._counts_along:
            return None
        return usage_so_far(self._streams[source], d.start + len(d.token_ids))

    def _shown(self, delta: Delta) -> Delta:
        """The delta; without its token where the body asks for the echo alone."""
        finish = delta.finish
        if not self._body.is_only_echo:
            return delta
        if finish is not None and failure(finish) is None:
            finish = msgspec.structs.replace(finish, reason=FinishReason.LENGTH, num_tokens=0)
        return msgspec.structs.replace(delta, token_ids=(), text="", finish=finish)

    def _logprobs(
        self, source: int, index: int, values: Sequence[TokenLogprob], is_first: bool
    ) -> CompletionLogprobs | None:
        """Those of the output's next tokens, with the first also those of the echoed prompt."""
        out = self._offsets[index].build(values, self._text, self._names) if values else None
        stream = self._streams[source]
        if not is_first or not self._body.echo or self._body.logprobs is None:
            return out
        if source not in self._scores:
            self._scores[source] = prompt_logprobs(
                stream.prompt, stream.prompt_logprobs, self._echoes[source], self._text, self._names
            )
        return self._scores[source] if out is None else self._scores[source] + out

    def _usage(self) -> Usage:
        finishes = [f for s in self._streams for f in s.finishes if f is not None]
        num_output = 0 if self._body.is_only_echo else sum(f.num_tokens for f in finishes)
        return usage_of(self._streams, num_output)

    def _frame(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        is_first = not self._seed_sent and len(self._streams) == 1
        self._seed_sent = True
        chunk = Completion(
            self.request_id,
            self._created,
            self._model,
            choices,
            self._fingerprint,
            usage=only_if(self._include_usage or self._counts_along, usage),
            seed=only_if(is_first, self._streams[0].seed),
        )
        return frame("", encode(chunk))


def mean_logprob(deltas: Sequence[Delta]) -> float:
    """The log probability per token of a whole choice, by which OpenAI's best_of ranks."""
    values = [lp.logprob for d in deltas for lp in d.logprobs or ()]
    return sum(values) / max(1, len(values))

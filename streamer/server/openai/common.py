"""What the bodies share: sampling fields to SamplingParams, usage, log probabilities.

Pure builders over values of the core; chat.py, completions.py and responses/body.py call them.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streamer.core.plan import GAVE_UP, Finish, FinishReason, TokenLogprob
from streamer.core.sampling import PARAMETERS, Grammar, Parameter, SamplingParams, params_over
from streamer.engine.refusals import SHUTDOWN, cut_off
from streamer.engine.requests import MAX_PRIORITY
from streamer.errors import InvalidRequest, RequestFailed, StreamerError

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

_FIELD = re.compile(r"([^.\[]*)(.*)", re.DOTALL)  # a path: its first name, and the rest
MAX_DETACH_S = 86_400.0
MAX_SALT = 256
MAX_METADATA = 16
MAX_SCHEMA_NAME = 512
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters

encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    """A fresh unguessable id: `prefix` and 24 hex digits."""
    return prefix + secrets.token_hex(12)


# ---------------------------------------------------------------- request side

# How much the model should think, by OpenAI's names and Anthropic's.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_variables(
    effort: Effort | None, variables: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """A chat template's variables with the effort, under the names that templates have for it.

    variables  others, which go first;  a template without a name for it has no such choice
    """
    if effort is None:
        return variables
    is_off = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **is_off, **(variables or {})}


def _field_of(parameter: Parameter) -> tuple[str, Any, None]:
    """A parameter as bodies have it: null means absent, and one stop string needs no list."""
    about: dict[str, Any] = {"description": parameter.field.help}
    if parameter.kind in (int, float):
        about["exclusiveMinimum" if parameter.field.is_above else "minimum"], about["maximum"] = (
            parameter.field.bounds
        )
    kinds = {tuple[str, ...]: str | list[str], tuple[int, ...]: list[int], Grammar: dict[str, Any]}
    kind = kinds.get(parameter.kind, parameter.kind)
    # The bounds are for the schema alone: SamplingParams checks them, for every caller.
    return parameter.name, Annotated[kind | None, Meta(extra_json_schema=about)], None


IN_BODIES = tuple(p for p in PARAMETERS.values() if p.field.is_in_bodies)

if TYPE_CHECKING:  # its fields are read by name, from IN_BODIES alone
    Sampled = msgspec.Struct
else:
    Sampled = msgspec.defstruct("Sampled", map(_field_of, IN_BODIES), kw_only=True)


class SamplingFields(Sampled, kw_only=True):
    """The sampling fields at top level of every body. None: the model's default."""

    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    detach_s: float | None = None

    @property
    def names(self) -> dict[str, str]:
        """Names of the engine's fields -> this body's names of them, where they differ."""
        return {}

    @property
    def format(self) -> TextFormat | None:
        """The form of the answer's text that the body asks for in OpenAI's way, and its name."""
        return None


class Body(SamplingFields, kw_only=True):
    """What is common to all bodies that ask for an answer."""

    model: str | None = None
    stream: bool | None = None

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings over the model's `defaults`, and all else checked."""
        raise NotImplementedError


class TextFormat(NamedTuple):
    """What a body's own field says of the answer's text.

    grammar  as structured_outputs has it, None: any text;  field  the grammar's path in the body
    """

    grammar: dict[str, Any] | None
    field: str


class JsonSchema(msgspec.Struct):
    """OpenAI's `json_schema`: the schema is followed, `strict` or not."""

    name: Annotated[str, Meta(max_length=MAX_SCHEMA_NAME)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's `response_format`; `schema` beside json_object is what others write, and so is
    structural_tag with what vLLM's has. TGI's is `json` or json_object with the schema as `value`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @property
    def text_format(self) -> TextFormat:
        """The grammar it stands for."""
        if self.type == "text":
            return TextFormat(None, "response_format")
        if self.type == "structural_tag":
            form = self.structures, self.triggers, self.format
            names = ("structures", "triggers", "format")
            tag = {k: v for k, v in zip(names, form, strict=True) if v is not None}
            return TextFormat({"structural_tag": tag}, "response_format")
        if self.type in ("json", "json_object"):
            strict = None if self.json_schema is None else self.json_schema.schema
            given = {"schema": self.schema, "value": self.value, "json_schema.schema": strict}
            for name, schema in given.items():
                if schema is not None:
                    return TextFormat({"json": schema}, f"response_format.{name}")
            return TextFormat({"json_object": True}, "response_format")
        if self.json_schema is None or self.json_schema.schema is None:
            path = "response_format.json_schema" + (".schema" if self.json_schema else "")
            raise InvalidRequest(f"{path} is required", param=path, code="missing_field")
        return TextFormat({"json": self.json_schema.schema}, "response_format.json_schema.schema")


class TextPart(msgspec.Struct):
    """A part of a message's content: text alone is read."""

    # no tag: msgspec takes an object without the tag where no other is expected
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """OpenAI's: a text that the answer is expected to repeat for the most part."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class PromptFields(Body, kw_only=True):
    """Fields of chats and completions about the prompt and its tokens: vLLM's, and `prediction`."""

    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def format(self) -> TextFormat | None:
        """See SamplingFields."""
        return None if self.response_format is None else self.response_format.text_format

    @property
    def names(self) -> dict[str, str]:
        """See SamplingFields."""
        return grammar_name(self.format)

    def check_prompt_logprobs(self) -> None:
        """Refuse them with `stream`: they are part of a whole answer, as in vLLM."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs is not possible with stream: true", param="prompt_logprobs"
            )

    def kept(self, context: int, max_tokens: int | None) -> int | None:
        """How many of the prompt's last tokens to take; None: all.

        -1 in the body: as many as leave room for the answer.

        context  tokens of the model's context;  max_tokens  of the answer; None: room for one
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return None
        if keep != -1 and not 0 < keep <= context:
            raise InvalidRequest(
                f"truncate_prompt_tokens is -1 or from 1 to {context}, got {keep}",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            return max(1, context - (max_tokens or 1))
        return keep


class StreamOptions(msgspec.Struct):
    """What a stream has besides its text.

    include_usage           a last chunk with the usage
    continuous_usage_stats  the usage so far on every chunk
    include_obfuscation     not supported
    include_event_ids       an `id:` line on every event, by which the stream can be resumed
    """

    # Not without a request for it: many readers know `data: ` lines alone (vllm bench, llmperf).

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    include_event_ids: bool | None = None

    def check(self) -> None:
        """Refuse options that are known and not supported."""
        if self.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation is not supported by this server",
                param="stream_options.include_obfuscation",
                code="unsupported_parameter",
            )


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors raised inside name a field as the body has it: `names` maps ours to the wire's."""
    try:
        yield
    except InvalidRequest as e:
        field, rest = _FIELD.fullmatch(e.param or "").groups()  # type: ignore[union-attr]
        if e.param is not None and e.param in names:
            if e.message.startswith(f"{e.param} "):
                e.message = names[e.param] + e.message.removeprefix(e.param)
            e.param = names[e.param]
        elif field in names:
            e.param = names[field] + rest
        raise


def grammar_name(form: TextFormat | None) -> dict[str, str]:
    """The name of the grammar in a body that has it in a field of its own."""
    if form is None or form.grammar is None:
        return {}
    return dict.fromkeys((f"structured_outputs.{kind}" for kind in form.grammar), form.field)


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, float],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    n: int = 1,
) -> SamplingParams:
    """The request's SamplingParams, checked; to be called under `named`."""
    given = ((p.name, getattr(body, p.name)) for p in IN_BODIES)
    values = {name: value for name, value in given if value is not None}
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    form = body.format
    if form is not None and form.grammar is not None:
        if "structured_outputs" in values:
            raise InvalidRequest(
                f"{form.field} and structured_outputs are two grammars for one text",
                param="structured_outputs",
            )
        values["structured_outputs"] = form.grammar
    _check_extras(body)
    return params_over(defaults, {**values, "n": n})


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse more labels, or longer ones, than OpenAI's API takes."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata has {len(metadata)} entries, the limit is {MAX_METADATA}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata has keys of up to {MAX_METADATA_KEY} and values of up to "
                f"{MAX_METADATA_VALUE} characters, got {len(key)} and {len(value)}",
                param=f"metadata.{key[:MAX_METADATA_KEY]}",
            )


def _check_extras(body: SamplingFields) -> None:
    if body.detach_s is not None and not 0 <= body.detach_s <= MAX_DETACH_S:
        raise InvalidRequest(
            f"detach_s must be from 0 to {MAX_DETACH_S}, got {body.detach_s}", param="detach_s"
        )
    if body.priority is not None and not -MAX_PRIORITY <= body.priority < MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY - 1}, got {body.priority}",
            param="priority",
        )
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_SALT:
        raise InvalidRequest(
            f"cache_salt has 1 to {MAX_SALT} characters, got {len(body.cache_salt)}",
            param="cache_salt",
        )


# ---------------------------------------------------------------- answer side


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Tokens that speculation proposed, those the model drew as well and the others, and those of
    its reasoning.

    The rejected ones are in no other count, the others part of the answer.
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a chat completion or completion; a prompt counts once for its n choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails()


def usage_so_far(stream: TokenStream, num_output: int, num_reasoning: int = 0) -> Usage:
    """Usage of an answer that goes on, after this many tokens of one choice."""
    num_prompt = stream.num_prompt_tokens
    cached = PromptDetails(stream.cached_tokens)
    details = CompletionDetails(reasoning_tokens=num_reasoning)
    return Usage(num_prompt, num_output, num_prompt + num_output, cached, details)


def usage_of(streams: Sequence[TokenStream], num_output: int) -> Usage:
    """Usage of an answer that has ended."""
    num_prompt = sum(s.num_prompt_tokens for s in streams)
    return Usage(
        num_prompt,
        num_output,
        num_prompt + num_output,
        PromptDetails(sum(s.cached_tokens for s in streams)),
        details_of(streams),
    )


def details_of(streams: Sequence[TokenStream]) -> CompletionDetails:
    """Of answers that have ended."""
    accepted = sum(s.accepted_tokens for s in streams)
    rejected = sum(s.proposed_tokens for s in streams) - accepted
    return CompletionDetails(accepted, rejected, sum(s.reasoning_tokens for s in streams))


def failure(finish: Finish) -> StreamerError | None:
    """The error that a cancelled or failed choice is on the wire; None for an ordinary end."""
    if finish.detail == SHUTDOWN:
        return cut_off()
    if finish.reason is FinishReason.CANCELLED:
        return RequestFailed("the request was cancelled", code="cancelled")
    if finish.reason is FinishReason.FAILED:
        detail = finish.detail or "the request failed in a step"
        if detail.startswith(GAVE_UP):
            return InvalidRequest(detail, code="unsupported_grammar")
        return RequestFailed(detail)
    return None


def first_failure(deltas: Sequence[Delta]) -> StreamerError | None:
    """The error of the first cancelled or failed choice among these."""
    for d in deltas:
        error = failure(d.finish) if d.finish is not None else None
        if error is not None:
            return error
    return None


def finish_reason(reason: FinishReason) -> str:
    """The wire's reason for an ordinary end (a cancel or failure is an error, not a reason)."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def stop_reason(finish: Finish, params: SamplingParams) -> int | str | None:
    """vLLM's: the stop string, or the one of stop_token_ids, that ended a choice."""
    stop = finish.stop
    return stop if isinstance(stop, str) or stop in params.stop_token_ids else None


def scores_of(finish: Finish | None) -> tuple[float | UnsetType, float | UnsetType]:
    """Ours: cumulative_logprob and score of a beam search's choice, at its end."""
    if finish is None or finish.score is None or finish.cumulative_logprob is None:
        return UNSET, UNSET
    return finish.cumulative_logprob, finish.score


def by_choice(deltas: Sequence[Delta], n: int) -> list[list[Delta]]:
    """The deltas of each of the `n` choices, in one pass."""
    grouped: list[list[Delta]] = [[] for _ in range(n)]
    for delta in deltas:
        grouped[delta.choice].append(delta)
    return grouped


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most probable tokens at a position."""

    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token of the answer and the most probable ones at its position."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class TokenText(Protocol):
    """Bytes of one token, special ones by their written name."""

    def __call__(self, token_id: int) -> bytes: ...


# JSON has no infinity; OpenAI writes this for a probability of zero.
LOGPROB_FLOOR = -9999.0


def chat_logprobs(
    logprobs: Sequence[TokenLogprob], text: TokenText, names: TokenText | None = None
) -> list[ChatLogprob]:
    """Log probabilities of consecutive tokens in chat's form.

    names  what stands for a token's text; its bytes are its own
    """
    known: dict[int, tuple[str, list[int]]] = {}  # an answer of 8,000 tokens may have 160,000

    def parts(token_id: int) -> tuple[str, list[int]]:
        found = known.get(token_id)
        if found is None:
            raw = text(token_id)
            name = raw if names is None else names(token_id)
            found = known[token_id] = show(name), list(raw)
        return found

    return [
        ChatLogprob(
            *parts(lp.token_id),
            max(lp.logprob, LOGPROB_FLOOR),
            [TopLogprob(*parts(other), max(value, LOGPROB_FLOOR)) for other, value in lp.top],
        )
        for lp in logprobs
    ]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt; `rank` where it is among the requested most probable ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def scored_prompt(logprobs: Sequence[TokenLogprob], text: TokenText) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: None for the first token, then each token and the best ones."""
    out: PromptLogprobs = [None]
    for lp in logprobs:
        ranks = {token: rank for rank, (token, _) in enumerate(lp.top, 1)}
        values = {lp.token_id: lp.logprob, **dict(lp.top)}
        out.append(
            {
                token: PromptLogprob(max(value, LOGPROB_FLOOR), ranks.get(token), show(text(token)))
                for token, value in values.items()
            }
        )
    return out


def token_id_text(token_id: int) -> bytes:
    """What stands for a token's text under `return_tokens_as_token_ids`."""
    return b"token_id:%d" % token_id


def show(raw: bytes) -> str:
    """A token's bytes as text; bytes that are no text alone are written in hex."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def only_if(condition: bool, value: Any) -> Any:
    """`value` if the condition holds, else UNSET: a field that is not on the wire at all."""
    return value if condition else UNSET

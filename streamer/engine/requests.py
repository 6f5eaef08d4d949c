"""A request before it is queued: its fields, every check, and the command made from it.

One that comes from an engine before this one has its Progress: its stream goes on from there.

Pure functions over values, called by AsyncEngine.submit on the loop; a request that can't be served
is refused here, so that the scheduler never gets it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from streamer.config import Config
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.core.plan import Add, Drawn, Reasoning, TokenLogprob
from streamer.core.sampling import SamplingParams, entries, flag, integer, number, text, token_ids
from streamer.core.sizes import ModelInfo, SchedulerConfig, check_fits, check_outputs
from streamer.engine.core import Tokenizer
from streamer.engine.flow import Limits
from streamer.errors import InvalidRequest

MAX_PRIORITY = 1 << 31
MAX_S = 1e9  # of a request's times; timers take no more than a float


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one request's phases; None: not reached yet.

    queue_s        from submission until it first ran;  prefill_s from then to the first token
    first_token_s  from submission to the first token
    per_token_s    mean gap between tokens of the whole request after the first
    total_s        from submission to the last finish
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    per_token_s: float | None = None
    total_s: float | None = None

    @classmethod
    def of(
        cls,
        submitted: float,
        started: float | None,
        first: float | None,
        last: float | None,
        ended: float | None,
        num_tokens: int,
    ) -> Timing:
        """From five marks of one clock and the output tokens of all choices."""
        per_token_s = None
        if first is not None and last is not None and num_tokens > 1:
            per_token_s = (last - first) / (num_tokens - 1)
        return cls(
            queue_s=None if started is None else started - submitted,
            prefill_s=None if first is None or started is None else first - started,
            first_token_s=None if first is None else first - submitted,
            per_token_s=per_token_s,
            total_s=None if ended is None else ended - submitted,
        )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's stream held.

    outputs          what each choice drew, one for each; empty ones where nothing was drawn yet
    prompt_logprobs  those of its prompt that had come, if it requested them
    created          unix seconds of its submission
    timing           as far as it is known
    cached_tokens, shared_tokens  as in TokenStream
    """

    outputs: tuple[Drawn, ...]
    created: float
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    timing: Timing = Timing()
    cached_tokens: int = 0
    shared_tokens: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether any choice had a token or an end."""
        return any(drawn.tokens or drawn.finish for drawn in self.outputs)


class QueueNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs of the queue.

    priority    lower runs first
    tenant      its owner
    n           rows that it takes: choices, or hypotheses of a beam search
    max_wait_s  it is refused if it would wait for longer; None: it waits
    sends_position  its position in the queue is sent to its readers
    """

    priority: int = 0
    tenant: str = ""
    n: int = 1
    max_wait_s: float | None = None
    sends_position: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and how to continue it.

    prompt      token ids, at least one
    request_id  drawn if empty; refused if it is live or still retained
    priority    lower runs first
    tenant      its owner: requests of one priority share fairly between tenants
    cache_salt  blocks are shared only between requests of the same salt
    share_with  id of a request to fork from: its blocks serve as far as the tokens agree
    prediction  token ids that the output is expected to repeat: it may take fewer steps then
    shown       special tokens, by id, that are part of the text although others are left out
    reasoning   what may stand before the answer's own text, where a grammar begins; None: nothing
    detach_s    seconds it runs on after its last reader left; None: for ever
    window      output tokens its furthest reader may lag before it is paused; 0: never paused
    sends_position  its readers receive its position in the queue while it waits
    max_wait_s  it is refused if it is expected to wait for longer; None: never for that
    deadline_s  seconds from its submission after which it is useless: it is refused if it is not
                expected to begin by then, and otherwise ended then with DeadlineExceeded
    context     kept beside the tokens as long as they are, counted with `context_bytes`
    is_durable  a journal has it, if there is one: it goes on after a restart
    is_stored   and keeps it after its end, as long as finished ones are kept
    progress    how far it had come in an engine before this one, which it goes on from: it has its
                id, seed and max_tokens, and was accepted, so that no queue is too long for it
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    share_with: str | None = None
    prediction: tuple[int, ...] = ()
    shown: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    detach_s: float | None = 0.0
    window: int = 0
    sends_position: bool = False
    max_wait_s: float | None = None
    deadline_s: float | None = None
    context: object = None
    context_bytes: int = 0
    is_durable: bool = False
    is_stored: bool = True
    progress: Progress | None = None

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        for name in ("prompt", "prediction"):
            entries(name, getattr(self, name))
        for name in ("request_id", "share_with", "tenant", "cache_salt"):
            value = getattr(self, name)
            if value is not None or name in ("tenant", "cache_salt"):
                text(name, value)
        force(self, "priority", integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY - 1))
        for name in ("window", "context_bytes"):
            force(self, name, integer(name, getattr(self, name), 0, 1 << 62))
        for name in ("detach_s", "max_wait_s", "deadline_s"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 0.0, MAX_S)
        for name in ("sends_position", "is_durable", "is_stored"):
            flag(name, getattr(self, name))

    @property
    def queue_needs(self) -> QueueNeeds:
        """The part that concerns the queue."""
        limits = [s for s in (self.max_wait_s, self.deadline_s) if s is not None]
        return QueueNeeds(
            priority=self.priority,
            tenant=self.tenant,
            n=self.params.num_sequences,
            max_wait_s=min(limits, default=None),
            sends_position=self.sends_position,
        )


def accept(
    request: GenerateRequest, info: ModelInfo, sizes: SchedulerConfig, seed: int
) -> GenerateRequest:
    """The request with its id, seed and max_tokens filled in, `seed` where it names none.

    Raises InvalidRequest, or ContextLengthExceeded with the numbers.
    """
    prompt, params = request.prompt, request.params
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if params.stop_token_ids:
        check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    if params.logit_bias:
        check_ids("logit_bias", tuple(params.logit_bias), info.vocab_size)
    n, name = params.num_sequences, params.is_wide_by
    if n > sizes.max_num_seqs:
        raise InvalidRequest(
            f"{name}={n} exceeds the {sizes.max_num_seqs} sequences that run at once", param=name
        )
    max_tokens = check_fits(len(prompt), n, params.max_tokens, sizes)
    ids = check_ids("prompt", prompt, info.vocab_size)  # a pass: it is short enough
    if len(request.prediction) > sizes.max_model_len:
        raise InvalidRequest(
            f"prediction has {len(request.prediction)} tokens, the context {sizes.max_model_len}",
            param="prediction",
        )
    prediction = check_ids("prediction", request.prediction, info.vocab_size)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) exceeds the {max_tokens} tokens that fit",
            param="min_tokens",
        )
    reasoning = request.reasoning
    if reasoning is not None:
        check_ids("reasoning.closing", reasoning.closing, info.vocab_size)
    elif params.thinking_token_budget is not None:
        raise InvalidRequest(
            "thinking_token_budget needs a model whose reasoning has a known form",
            param="thinking_token_budget",
        )
    params = msgspec.structs.replace(
        params, max_tokens=max_tokens, seed=seed if params.seed is None else params.seed
    )
    if request.progress is not None:
        check_outputs(request.progress.outputs, params.n, max_tokens)
        for drawn in request.progress.outputs:
            check_ids("outputs", drawn.tokens, info.vocab_size)
    request_id = request.request_id or secrets.token_hex(12)
    return msgspec.structs.replace(
        request, prompt=ids, prediction=prediction, params=params, request_id=request_id
    )


def limits_of(request: GenerateRequest, config: Config) -> Limits:
    """How far the request's readers may lag, and how long it runs without them."""
    return Limits(request.window, request.detach_s, config.pause_timeout, config.detach_timeout)


def with_end(info: ModelInfo, token: int | None) -> ModelInfo:
    """The model with one more end token: a chat checkpoint may name it in the tokenizer alone."""
    if token is None or token in info.eos_token_ids:
        return info
    return msgspec.structs.replace(info, eos_token_ids=(*info.eos_token_ids, token))


def grammars_of(tokenizer: Tokenizer, info: ModelInfo) -> Grammars:
    """What compiles grammars for the model's tokens, the same on every rank."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    tokens, special = tokenizer.token_bytes(), tokenizer.special_bytes
    return Grammars(Vocabulary(tokens, special, info.eos_token_ids, encode))


def build_add(
    request: GenerateRequest,
    info: ModelInfo,
    block_hashes: tuple[bytes, ...],
    queue_position: int | None,
) -> Add:
    """The scheduler's command for an accepted request."""
    params, progress = request.params, request.progress
    ends = () if params.ignore_eos else info.eos_token_ids
    return Add(
        request_id=request.request_id,
        prompt=request.prompt,
        params=params,
        stop_ids=frozenset((*ends, *params.stop_token_ids)),
        stop=tuple(s.encode() for s in params.stop),
        block_hashes=block_hashes,
        salt=request.cache_salt.encode(),
        priority=request.priority,
        tenant=request.tenant,
        share_with=request.share_with,
        queue_position=queue_position,
        prediction=request.prediction,
        outputs=() if progress is None else progress.outputs,
        num_scored=0 if progress is None else len(progress.prompt_logprobs),
        reasoning=request.reasoning,
    )


def check_ids(name: str, given: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as Python's own integers; refuses those beyond the vocabulary, naming the field."""
    ids = token_ids(name, given)
    # min and max run in C: 100,000 ids take 2 ms less than a loop would
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return ids
    wrong = next(i for i in ids if not 0 <= i < vocab_size)
    raise InvalidRequest(f"{name}: {wrong} is not a token id below {vocab_size}", param=name)

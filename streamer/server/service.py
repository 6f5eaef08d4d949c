"""Service: what every handler needs of the engine, in one place.

Owns the served names, the epoch, the count of requests being answered, the callbacks of a
drain, and the path from a decoded body to a TokenStream. Made once, by serve or build_app; never
touches a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from streamer import __version__
from streamer.config import Config
from streamer.constraints.lark import Marks
from streamer.core.plan import Reasoning
from streamer.engine.prompts import LONG
from streamer.engine.refusals import draining
from streamer.engine.requests import GenerateRequest, QueueNeeds, check_ids
from streamer.errors import ContextLengthExceeded, EngineDead, InvalidRequest
from streamer.server.admission import Admission, deadline_of, tenant_of
from streamer.server.openai.common import Prediction, named
from streamer.server.openai.models import check_model
from streamer.server.parsing.forcing import Rules, compiled_calls
from streamer.server.parsing.formats import Channels, ModelFormat, find_format, has_calls
from streamer.server.parsing.tools import Parsing, ToolUse
from streamer.server.prepared import B, Form, Prepared, Reading
from streamer.server.restored import Contexts
from streamer.server.security import Bodies
from streamer.server.telemetry.metrics import Metrics
from streamer.server.telemetry.records import Operation, Record, RequestInfo
from streamer.server.tickets import Tickets
from streamer.server.transport.pace import LARGE, Pace

if TYPE_CHECKING:
    from streamer.core.sampling import SamplingParams
    from streamer.engine.base import Engine
    from streamer.engine.stream import TokenStream
    from streamer.server.context import Context
    from streamer.server.telemetry.records import Tracer
    from streamer.tokenizer.response_template import ResponseTemplate

T = TypeVar("T")

NO_FORMAT = ModelFormat()
TAIL = 32  # tokens at a prompt's end that may open the reasoning
MAX_BEGINNING = 8192  # tokens at its end in which the answer may have been begun
MAX_LOGGED_PROMPT = 4096  # tokens, with --log-prompts: decoding them holds the loop up


class Service:
    """The engine as the handlers see it."""

    def __init__(self, engine: Engine, config: Config, tracer: Tracer | None = None) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.admission = Admission(config)
        self.tickets = Tickets()
        self.bodies = Bodies()
        self.pace = Pace()
        self._epoch = secrets.token_hex(8)
        self.started = int(time.time())
        self._tracer = tracer
        self._drain_callbacks: dict[int, Callable[[float], None]] = {}
        self._num_working = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._bytes: tuple[bytes, ...] = ()
        self._special: dict[int, bytes] = {}
        self._format: tuple[ModelFormat, frozenset[int]] | None = None
        engine.contexts = Contexts(self._restored)
        find_format("", config.tool_call_parser, config.reasoning_parser)  # refuses unknown names

    # ------------------------------------------------------------ state

    def require_ready(self) -> None:
        """Raise the error of a request while the model loads, while draining, and after death."""
        engine = self.engine
        if engine.is_dead:
            raise EngineDead(engine.death.message if engine.death is not None else "engine died")
        if engine.is_draining:
            raise draining()
        if not engine.is_ready:
            raise engine.unavailable()

    def admit(self, scope: Scope) -> str:
        """Admit one more request of this caller, or raise why not; returns its tenant.

        Room in the queue is no condition: gate.py has seen to that for what needs it at once.
        """
        self.require_ready()
        tenant = tenant_of(scope)
        self.admission.enter(tenant)
        return tenant

    def require_room(self, scope: Scope) -> None:
        """Raise Overloaded if the queue has no room for a request of this caller."""
        tenant = tenant_of(scope)
        priority = self.admission.priority(tenant)
        max_wait_s = self.config.max_wait_s or None
        self.engine.require_room(
            QueueNeeds(priority=priority, tenant=tenant, max_wait_s=max_wait_s)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model answers to (a comma separates aliases)."""
        given = self.config.served_model_name
        names = tuple(n.strip() for n in given.split(",") if n.strip()) if given else ()
        return names or (self.engine.info.name,)

    @property
    def epoch(self) -> str:
        """The name of what is remembered: as old as the journal or, without one, as the process."""
        return self.engine.epoch or self._epoch

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count a request that is being answered, for the drain."""
        self._num_working += 1
        self._is_quiet.clear()
        try:
            yield
        finally:
            self._num_working -= 1
            if not self._num_working:
                self._is_quiet.set()

    async def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no request is being answered; False if the deadline came first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._is_quiet.wait()
        return self._is_quiet.is_set()

    def on_drain(self, callback: Callable[[float], None]) -> Callable[[], object]:
        """Call back when a drain begins, with the seconds it may take; the result undoes this."""
        key = id(callback)
        self._drain_callbacks[key] = callback
        return partial(self._drain_callbacks.pop, key, None)

    def begin_drain(self, deadline_s: float) -> None:
        """Call every callback that `on_drain` registered; refuse the bodies on their way in."""
        self.bodies.refuse(draining())
        for callback in list(self._drain_callbacks.values()):
            callback(deadline_s)

    # ------------------------------------------------------------ requests

    async def read(self, request: Request, form: Form[B]) -> Prepared[B]:
        """Admit an HTTP request, then read, decode and check its body."""
        self.admit(request.scope)
        data = await self.bodies.read(request)
        body = form.reader.decode(data)
        is_whole = not body.stream
        # A whole answer is never paused, except a response's: it has other readers by its id.
        window = 0 if is_whole and form.operation != "responses" else None
        reading = Reading("http" if is_whole else "sse", window=window)
        return self.prepare(request.scope, form.operation, body, len(data), reading)

    def prepare(
        self, scope: Scope, operation: Operation, body: B, num_bytes: int, reading: Reading
    ) -> Prepared[B]:
        """Check that a decoded body's model is served and its settings are valid."""
        model = check_model(body.model, self.names)
        params = body.params(self.engine.info.generation_defaults)
        return Prepared(operation, scope, body, num_bytes, model, params, reading)

    async def compile(self, prepared: Prepared[B]) -> None:
        """Compile the grammar of the answer's text, if it has one."""
        with named(prepared.body.names):
            await self.engine.compile(prepared.params, prepared.salt)

    async def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        salt: str,
        add_generation_prompt: bool = True,
        prefill: str = "",
        variables: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, by way of the chat template.

        prefill  text with which the answer begins;  variables  for the template
        keep     maximum number of tokens: the last ones of a longer conversation
        """
        ids = await self.engine.encode_chat(
            [dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            cache_salt=salt,
            variables=variables,
            keep=keep,
        )
        prompt = (*ids, *await self.plain_tokens(prefill, salt))
        return prompt if keep is None else prompt[-keep:]

    def parsing(self, prompt: Sequence[int], use: ToolUse) -> Parsing | None:
        """How an answer to this prompt is read; None: all of it is prose.

        Raises InvalidRequest for tools where the format of the model's calls is not known.
        """
        form, shown_ids = self.format
        if not use.tools:
            form = msgspec.structs.replace(form, calls=None)
        elif not form.has_calls:
            raise InvalidRequest(
                "the chat template of this model has no known format of tool calls; start the "
                "server with --tool-call-parser NAME if it has one",
                param="tools",
                code="unsupported_parameter",
            )
        if form == NO_FORMAT:
            return None
        schemas = {tool.name: tool.parameters for tool in use.tools}
        tail = self.engine.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
        stage = form.stage(tail)
        is_open = stage == "inside" and form.think is not None
        reasoning = self._reasoning(form, stage)
        beginning = "" if form.template is None else self._beginning(form.template, prompt)
        return Parsing(form, schemas, is_open, use.max_calls, shown_ids, reasoning, beginning)

    @cached_property
    def _marks(self) -> Marks:
        engine = self.engine
        return Marks(engine.tokenizer.special_bytes, engine.info.eos_token_ids)

    async def shaped(
        self, prepared: Prepared[B], parsing: Parsing | None, use: ToolUse
    ) -> Prepared[B]:
        """The same with how its answer is read, and with the grammar that it follows, compiled.

        Raises InvalidRequest for what can't be followed.
        """
        await self.compile(prepared)
        form = NO_FORMAT if parsing is None else parsing.format
        answer = prepared.params.structured_outputs
        is_json = answer is None or answer.kind in ("json", "json_object")
        is_free = use.is_free and (answer is None or not is_json or not form.calls)
        if parsing is None or not use.callable or is_free:
            return msgspec.structs.replace(prepared, parsing=parsing)
        if not is_json:
            raise InvalidRequest(
                "structured_outputs and forced calls are two grammars for one text",
                param="structured_outputs",
            )
        if form.calls is None:
            raise InvalidRequest(
                "calls in the form that this model's response_template declares can't be forced",
                param=use.param,
                code="unsupported_parameter",
            )
        rules = Rules(use.callable, use.is_required, use.max_calls, answer)
        with named(
            {
                **prepared.body.names,
                "structured_outputs": use.param,
                "structured_outputs.calls": "tools",
            }
        ):
            params = await self._forced(prepared, form, rules)
        # Harmony's reasoning is part of the grammar; all else follows the grammar after it.
        reasoning = None if isinstance(form.calls, Channels) else parsing.reasoning
        parsing = msgspec.structs.replace(parsing, is_forced=True, reasoning=reasoning)
        return msgspec.structs.replace(prepared, params=params, parsing=parsing)

    async def _forced(
        self, prepared: Prepared[B], form: ModelFormat, rules: Rules
    ) -> SamplingParams:
        """The parameters with the grammar of the calls, compiled."""
        marks = self._marks
        grammar = await self.engine.compiled(
            lambda grammars: compiled_calls(form, marks, rules, grammars),
            "tools",
            prepared.num_bytes,
            prepared.salt,
        )
        return msgspec.structs.replace(prepared.params, structured_outputs=grammar)

    @property
    def format(self) -> tuple[ModelFormat, frozenset[int]]:
        """What the model's answers may have besides prose, and the special tokens of that."""
        if self._format is None:
            tokenizer, config = self.engine.tokenizer, self.config
            found = find_format(
                tokenizer.templates, config.tool_call_parser, config.reasoning_parser
            )
            template = tokenizer.response_template
            is_found = found.calls is not None or (found != NO_FORMAT and not has_calls(template))
            if template is None or is_found or config.tool_call_parser or config.reasoning_parser:
                marks = "\n".join(found.markers)
            else:
                found, marks = ModelFormat(template=template), template.marks
            parts = self._marks.split(marks)
            self._format = found, frozenset(part for part in parts if isinstance(part, int))
        return self._format

    def _beginning(self, template: ResponseTemplate, prompt: Sequence[int]) -> str:
        """What of a prompt belongs to its answer: what a template opens, or a client has begun."""
        length = TAIL
        while True:
            tail = self.engine.tokenizer.decode(prompt[-length:], skip_special_tokens=False)
            found = template.beginning(tail)
            if found is not None or length >= min(len(prompt), MAX_BEGINNING):
                return found or ""
            length *= 4

    def _reasoning(
        self, form: ModelFormat, stage: Literal["before", "inside", "after"]
    ) -> Reasoning | None:
        """What the engine must know of the reasoning in an answer."""
        marks = form.marks
        if marks is None:
            return None
        closing = self.engine.tokenizer.encode(marks.closing, add_special_tokens=False)
        return Reasoning(stage, marks.opens, marks.ends, tuple(closing))

    async def plain_tokens(self, text: str, salt: str) -> tuple[int, ...]:
        """Token ids of a text in which special tokens are not recognized."""
        if not text:
            return ()
        engine = self.engine
        encode, limit = engine.tokenizer.encode_plain, engine.info.max_model_len - 1
        return tuple(await engine.in_pool(lambda: encode(text, limit), len(text), salt))

    async def predicted(self, prediction: Prediction | None, salt: str) -> tuple[int, ...]:
        """Token ids of a body's `prediction`, as many as the context holds."""
        if prediction is None:
            return ()
        limit = self.engine.info.max_model_len
        try:
            return (await self.plain_tokens(prediction.text, salt))[:limit]
        except ContextLengthExceeded:
            raise InvalidRequest(
                f"prediction is longer than the model's context of {limit} tokens",
                param="prediction",
            ) from None

    @property
    def fingerprint(self) -> str:
        """OpenAI's: a digest of what affects the output besides a request's seed and settings."""
        info = self.engine.info
        parts = (__version__, info.name, info.dtype, info.device, self.config.kv_cache_dtype)
        return "fp_" + blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()

    async def built(self, work: Callable[[], T], num_entries: int, scope: Scope) -> T:
        """Build part of an answer, or all of it, which a client may request repeatedly.

        num_entries  its size: a large one is built in the pool, where tenants take turns
        """
        if num_entries > LARGE:
            return await self.engine.in_pool(work, LONG + num_entries, f"{tenant_of(scope)}:")
        return await self.pace.turn(work)

    async def texts_of(
        self,
        prompts: Sequence[str | Sequence[int]],
        skip_special_tokens: bool,
        param: str = "prompt",
        *,
        salt: str,
    ) -> list[str]:
        """Each prompt's text, token ids decoded in the pool; `param` names them in errors."""
        engine = self.engine
        ids = [p for p in prompts if not isinstance(p, str)]
        for each in ids:
            check_ids(param, each, engine.info.vocab_size)
        decode, skips = engine.tokenizer.decode, skip_special_tokens
        size = sum(map(len, ids))
        found = await engine.in_pool(lambda: [decode(i, skips) for i in ids], size, salt)
        texts = iter(found)
        return [p if isinstance(p, str) else next(texts) for p in prompts]

    def submit(
        self,
        prepared: Prepared[B],
        prompt: tuple[int, ...],
        request_id: str,
        *,
        context: Context | None = None,
        share_with: str | None = None,
        prediction: tuple[int, ...] = (),
    ) -> TokenStream:
        """Hand one prompt to the engine.

        prediction  tokens that the answer is expected to repeat
        context     kept with the answer, which is found by its id
        share_with  the request that it was forked from
        """
        body, reading = prepared.body, prepared.reading
        is_alone = context is not None and context.is_background
        detach_s = reading.detach_s if body.detach_s is None else body.detach_s
        window = self.config.stream_window if reading.window is None else reading.window
        is_whole = reading.transport == "http" and not is_alone
        parsing = prepared.parsing if context is None else context.parsing
        request = GenerateRequest(
            prompt=prompt,
            params=prepared.params,
            request_id=request_id,
            priority=self.admission.priority(prepared.tenant, body.priority),
            tenant=prepared.tenant,
            cache_salt=prepared.salt,
            share_with=share_with,
            prediction=prediction,
            shown=frozenset() if parsing is None else parsing.shown,
            reasoning=None if parsing is None else parsing.reasoning,
            detach_s=None if is_alone else detach_s,
            window=window,
            sends_position=reading.sends_position,
            max_wait_s=self.config.max_wait_s or None,
            deadline_s=deadline_of(prepared.scope, is_whole=is_whole),
            context=context,
            context_bytes=0 if context is None else context.num_bytes(prepared.num_bytes),
            is_durable=context is not None and context.is_resumable,
            is_stored=context is None or context.is_stored,
        )
        with named(body.names):
            stream = self.engine.submit(request)
        self.admission.follow(prepared.tenant, stream)
        return stream

    async def recorded(self, *streams: TokenStream) -> None:
        """Wait until what was done may be relied on: before a client is told.

        streams  were just submitted and have no reader yet: if this is cancelled or one of them is
                 refused after all, none will come
        """
        try:
            for stream in streams or (None,):
                await self.engine.recorded(stream)
        except BaseException:
            for each in streams:
                each.miss()
            raise

    def record(self, prepared: Prepared[B], streams: Sequence[TokenStream]) -> None:
        """Follow a request that was just submitted, for metrics, log and traces."""
        trace = Headers(scope=prepared.scope).get("traceparent") if self._tracer else None
        transport = prepared.reading.transport
        self._record(
            RequestInfo(prepared.operation, transport, prepared.model, prepared.tenant, trace),
            streams,
        )

    def _restored(self, info: RequestInfo, stream: TokenStream) -> None:
        """Count a stream that came back after a restart, as when it was accepted."""
        self.admission.follow(info.tenant, stream)
        self._record(info, [stream])

    def _record(self, info: RequestInfo, streams: Sequence[TokenStream]) -> None:
        Record(
            streams,
            info,
            self.metrics,
            tracer=self._tracer,
            prompts=self._prompt_text if self.config.log_prompts else None,
        )

    def _prompt_text(self, ids: Sequence[int]) -> str:
        return self.engine.tokenizer.decode(ids[:MAX_LOGGED_PROMPT], skip_special_tokens=False)

    def cancel(self, streams: Sequence[TokenStream]) -> None:
        """Cancel the streams that have not finished."""
        for stream in streams:
            if not stream.is_finished:
                self.engine.cancel(stream.request_id)

    def token_text(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one, its written name."""
        if not self._bytes:
            self._bytes = self.engine.tokenizer.token_bytes()
        raw = self._bytes[token_id] if token_id < len(self._bytes) else b""
        if raw:
            return raw
        if token_id not in self._special:
            text = self.engine.tokenizer.decode([token_id], skip_special_tokens=False)
            self._special[token_id] = text.encode()
        return self._special[token_id]

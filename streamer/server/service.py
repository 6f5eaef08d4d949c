"""Service: what every handler needs of the engine, in one place.

Owns the served names, the epoch, the count of requests at work, who wants to hear of a drain, and
the way from a decoded body to a TokenStream. Made once by build_app; never touches a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.engine.requests import GenerateRequest
from streamer.errors import EngineDead, NotFound, Overloaded
from streamer.server.context import Context, context_of
from streamer.server.metrics import Metrics
from streamer.server.openai.common import SamplingFields, clip, named
from streamer.server.turns import make_turn

if TYPE_CHECKING:
    from streamer.engine.engine import AsyncEngine
    from streamer.engine.stream import TokenStream
    from streamer.server.openai.responses import ResponseCreate

TENANT = "tenant"  # in scope["state"]: a digest of the key, put there by the guard
LOADING_RETRY_S = 2.0
DRAINING_RETRY_S = 5.0


def tenant_of(scope: Scope) -> str:
    """A digest of the caller's key; "" where no keys are asked for."""
    tenant: str = scope.get("state", {}).get(TENANT, "")
    return tenant


def salt_of(scope: Scope, body: SamplingFields) -> str:
    """The salt of this caller's blocks: the body's own, within those of its key.

    Blocks of one key are never found by another: how long a prompt took and how much of it was
    cached would tell what others ask.
    """
    tenant = tenant_of(scope)
    salt = body.cache_salt or ""
    return f"{tenant}:{salt}" if tenant else salt


class Service:
    """The engine as the handlers see it."""

    def __init__(self, engine: AsyncEngine, config: Config) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.epoch = secrets.token_hex(8)
        self.started = int(time.time())
        self._drain_callbacks: dict[int, Callable[[float], None]] = {}
        self._num_working = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._bytes: tuple[bytes, ...] = ()
        self._special: dict[int, bytes] = {}

    # ------------------------------------------------------------ state

    def require_ready(self) -> None:
        """Raise what a request gets while the model loads, after death, and while draining."""
        engine = self.engine
        if engine.is_dead:
            raise EngineDead(engine.death.message if engine.death is not None else "engine died")
        if engine.is_draining:
            raise Overloaded(
                "the server is shutting down", retry_after_s=DRAINING_RETRY_S, code="draining"
            )
        if not engine.is_ready:
            raise Overloaded(
                "the model is still loading", retry_after_s=LOADING_RETRY_S, code="model_loading"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model answers to (a comma separates aliases)."""
        given = self.config.served_model_name
        names = tuple(n.strip() for n in given.split(",") if n.strip()) if given else ()
        return names or (self.engine.info.name,)

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

    async def wait_quiet(self, deadline_s: float) -> bool:
        """Wait until nothing is being answered; False if the deadline came first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._is_quiet.wait()
        return self._is_quiet.is_set()

    def on_drain(self, callback: Callable[[float], None]) -> Callable[[], object]:
        """Call back when a drain begins, with the seconds it may take; the result takes it back."""
        key = id(callback)
        self._drain_callbacks[key] = callback
        return partial(self._drain_callbacks.pop, key, None)

    def begin_drain(self, deadline_s: float) -> None:
        """Tell everybody who wants to know that the server stops."""
        for callback in list(self._drain_callbacks.values()):
            callback(deadline_s)

    # ------------------------------------------------------------ requests

    async def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        salt: str,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """A conversation through the chat template, as token ids."""
        ids = await self.engine.encode_chat(
            [dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            cache_salt=salt,
        )
        return tuple(ids)

    def submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        body: SamplingFields,
        *,
        salt: str,
        request_id: str,
        detach_s: float,
        context: Context | None = None,
        body_bytes: int = 0,
        share_with: str | None = None,
        window: int | None = None,
    ) -> TokenStream:
        """Hand one prompt to the engine; `detach_s` is the default where the body names none.

        salt        what `salt_of` made of the caller and the body
        context     by which the answer is found again, made from a body of so many bytes
        share_with  a request that it was forked from
        window      output tokens a reader may lag; None: the server's setting
        """
        is_alone = context is not None and context.is_background
        request = GenerateRequest(
            prompt=prompt,
            params=params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=salt,
            share_with=share_with,
            detach_s=None if is_alone else detach_s if body.detach_s is None else body.detach_s,
            window=self.config.stream_window if window is None else window,
            context=context,
            context_bytes=0 if context is None else context.num_bytes(body_bytes),
        )
        with named(body.names):
            return self.engine.submit(request)

    async def respond(
        self,
        scope: Scope,
        body: ResponseCreate,
        *,
        model: str,
        params: SamplingParams,
        body_bytes: int,
        response_id: str,
        detach_s: float,
        session: str = "",
        window: int | None = None,
    ) -> TokenStream:
        """The stream of a response whose body is checked; `session` is the socket's name."""
        parent = None
        if body.previous_response_id is not None:
            parent = self.find(body.previous_response_id, scope, session, "previous_response_id")
        salt = salt_of(scope, body)
        with named(body.names):
            turn = await make_turn(self.engine, body, parent, response_id=response_id, salt=salt)
        if body.generate is False:
            params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0, stop=())
        context = Context(
            kind="response",
            tenant=tenant_of(scope),
            body=body,
            model=model,
            items=turn.items,
            prefix=turn.prefix,
            session=session,
        )
        return self.submit(
            turn.prompt,
            params,
            body,
            salt=salt,
            request_id=response_id,
            detach_s=detach_s,
            context=context,
            body_bytes=body_bytes,
            share_with=turn.share_with,
            window=window,
        )

    def find(
        self, response_id: str, scope: Scope, session: str = "", param: str | None = None
    ) -> TokenStream:
        """A response that is live, or finished and stored, or was made on this socket.

        Raises NotFound for anything else, another key's included. A response belongs to its key.
        """
        stream = self._look_up(response_id, scope, "response")
        if stream is not None:
            context = context_of(stream)
            is_mine = bool(session) and context.session == session
            if not stream.is_finished or context.is_stored or is_mine:
                return stream
        raise NotFound(
            f"there is no response {clip(response_id)!r} here",
            param=param,
            code="previous_response_not_found" if param == "previous_response_id" else None,
        )

    def find_chat(self, request_id: str, scope: Scope) -> TokenStream:
        """The stream of a chat completion, likewise."""
        stream = self._look_up(request_id, scope, "chat")
        if stream is None:
            raise NotFound(f"there is no chat completion {clip(request_id)!r} here")
        return stream

    def _look_up(self, request_id: str, scope: Scope, kind: str) -> TokenStream | None:
        if not self.engine.is_ready and not self.engine.is_dead:
            self.require_ready()
        stream = self.engine.get(request_id)
        context = None if stream is None else stream.context
        if stream is None or not isinstance(context, Context) or not stream.is_kept:
            return None
        is_theirs = context.kind == kind and context.tenant == tenant_of(scope)
        return stream if is_theirs else None

    def cancel(self, streams: Sequence[TokenStream]) -> None:
        """End what is not finished of these."""
        for stream in streams:
            if not stream.is_finished:
                self.engine.cancel(stream.request_id)

    def token_text(self, token_id: int) -> bytes:
        """The bytes of a token; a special one by its written name."""
        if not self._bytes:
            self._bytes = self.engine.tokenizer.token_bytes()
        raw = self._bytes[token_id] if token_id < len(self._bytes) else b""
        if raw:
            return raw
        if token_id not in self._special:
            text = self.engine.tokenizer.decode([token_id], skip_special_tokens=False)
            self._special[token_id] = text.encode()
        return self._special[token_id]

"""build_app: the routes, and the handlers of OpenAI's HTTP API.

A handler decodes and checks everything, submits, and returns a response that follows the streams.
lifecycle.py serves what this builds; nothing here starts or stops an engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from streamer import __version__
from streamer.config import Config
from streamer.errors import InvalidRequest, NotFound, Overloaded, StreamerError
from streamer.server import openapi, tickets
from streamer.server.admission import LimitHeaders, tenant_of
from streamer.server.answering import chat_answer
from streamer.server.anthropic.models import is_anthropics, model_info, models_page
from streamer.server.anthropic.routes import MessageRoutes
from streamer.server.context import Context
from streamer.server.errors import error_answer, id_headers
from streamer.server.gate import Gate
from streamer.server.ollama.routes import OllamaRoutes
from streamer.server.openai import chat, completions, embeddings, tokenizing
from streamer.server.openai.common import encode, named, new_id
from streamer.server.openai.completion_logprobs import Echo
from streamer.server.openai.completions import CompletionAnswer, CompletionRequest
from streamer.server.openai.models import check_model, model_body, models_body
from streamer.server.page import Page
from streamer.server.parsing.tools import with_tools
from streamer.server.prepared import Form, Prepared, Reading
from streamer.server.responses.routes import ResponseRoutes
from streamer.server.responses.socket import Endpoint
from streamer.server.security import Guard, deny
from streamer.server.service import Service
from streamer.server.telemetry.metrics import Metrics
from streamer.server.transport.sse import respond
from streamer.server.watching import SnapshotStream, engine_body, owner_of, wants_stream

if TYPE_CHECKING:
    from streamer.engine.base import Engine
    from streamer.engine.stream import TokenStream

log = logging.getLogger(__name__)

P = TypeVar("P", bound=CompletionRequest)
CHAT = Form("chat", chat.READER)
COMPLETION = Form("completions", completions.READER)
PROBES = ("/health", "/ready")


class Api:
    """The HTTP handlers over one Service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        service = self._service
        prepared = await service.read(request, CHAT)
        body = prepared.body
        before, is_open, prefill = chat.opened(body, body.template_messages())
        use = body.tool_use()
        keep = body.kept(service.engine.info.max_model_len, prepared.params.max_tokens)
        with service.bodies.used(prepared.tenant, prepared.num_bytes):
            prompt = await service.encode_messages(
                before,
                salt=prepared.salt,
                add_generation_prompt=is_open,
                prefill=prefill,
                variables=with_tools(body.variables, use.tools),
                keep=keep,
            )
            prepared = await service.shaped(prepared, service.parsing(prompt, use), use)
            prediction = await service.predicted(body.prediction, prepared.salt)
        service.admission.accept(prepared.tenant, [prompt])
        context = Context(
            kind="chat",
            tenant=prepared.tenant,
            body=body,
            model=prepared.model,
            parsing=prepared.parsing,
        )
        stream = service.submit(
            prepared,
            prompt,
            service.engine.named(new_id("chatcmpl-"), prompt, prepared.salt),
            context=context,
            prediction=prediction,
        )
        answer = chat_answer(service, stream)
        service.record(prepared, [stream])
        return await respond(service, request, answer, [stream], is_streamed=bool(body.stream))

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        prepared = await self._service.read(request, COMPLETION)
        return await self._complete(request, prepared, CompletionAnswer)

    async def embeddings(self, request: Request) -> ASGIApp:
        """POST /v1/embeddings: completions of one token, whose hidden state is the answer."""
        service = self._service
        service.admit(request.scope)
        data = await service.bodies.read(request)
        body = embeddings.READER.decode(data)
        asked, reading = body.asked(), Reading("http", window=0)
        with named(asked.names):
            prepared = service.prepare(request.scope, "embeddings", asked, len(data), reading)
            answer = partial(embeddings.EmbeddingAnswer, body)
            return await self._complete(request, prepared, answer)

    async def _complete(
        self,
        request: Request,
        prepared: Prepared[P],
        answer_of: Callable[..., CompletionAnswer],
    ) -> ASGIApp:
        """The answer to a checked body of prompts."""
        service = self._service
        body, params, salt = prepared.body, prepared.params, prepared.salt
        is_special = body.add_special_tokens is not False
        given = body.prompts()
        keep = body.kept(service.engine.info.max_model_len, params.max_tokens)
        with service.bodies.used(prepared.tenant, prepared.num_bytes):
            await service.compile(prepared)
            prompts = [
                await service.engine.encode(
                    p, add_special_tokens=is_special, cache_salt=salt, keep=keep
                )
                if isinstance(p, str)
                else p
                for p in given
            ]
            prediction = await service.predicted(body.prediction, salt)
        if keep is not None:
            prompts = [p[-keep:] for p in prompts]
            given = [tuple(p) for p in prompts]
        service.admission.accept(prepared.tenant, prompts)
        echoes: list[Echo] = []
        if body.echo:
            texts = await service.texts_of(given, params.skip_special_tokens, salt=salt)
            special = service.engine.tokenizer.special_ids
            echoes = [Echo(text, special) for text in texts]
        base = new_id("cmpl-")
        streams: list[TokenStream] = []
        try:
            for i, prompt in enumerate(prompts):
                request_id = base if i == 0 else f"{base}-{i}"
                streams.append(
                    service.submit(prepared, tuple(prompt), request_id, prediction=prediction)
                )
        except StreamerError:
            service.cancel(streams)
            raise
        answer = answer_of(
            body, streams, prepared.model, service.token_text, echoes, service.fingerprint
        )
        service.record(prepared, streams)
        return await respond(service, request, answer, streams, is_streamed=bool(body.stream))

    async def tokenize(self, request: Request) -> ASGIApp:
        """POST /tokenize."""
        service = self._service
        tenant = service.admit(request.scope)
        data = await service.bodies.read(request)
        body = tokenizing.TOKENIZE.decode(data)
        check_model(body.model, service.names)
        messages, tools, engine = body.template_messages(), body.template_tools(), service.engine
        text = service.token_text if body.return_token_strs else None
        tokenizer, limit = engine.tokenizer, engine.info.max_model_len
        is_special = body.add_special_tokens is not False

        def work() -> bytes:
            if messages is None:
                tokens = tokenizer.encode(body.prompt or "", is_special, limit - 1)
            else:
                before, is_open, prefill = chat.opened(body, messages)
                tokens = tokenizer.encode_chat(
                    before,
                    add_generation_prompt=is_open,
                    max_tokens=limit - 1,
                    variables=body.chat_template_kwargs,
                    tools=tools,
                )
                tokens += tokenizer.encode_plain(prefill, limit - 1) if prefill else []
            return tokenizing.tokenized(tokens, limit, text)

        with service.bodies.used(tenant, len(data)):
            return json(await engine.in_pool(work, len(data), owner_of(request.scope)))

    async def detokenize(self, request: Request) -> ASGIApp:
        """POST /detokenize."""
        service = self._service
        tenant = service.admit(request.scope)
        data = await service.bodies.read(request)
        body = tokenizing.DETOKENIZE.decode(data)
        check_model(body.model, service.names)
        salt = owner_of(request.scope)
        with service.bodies.used(tenant, len(data)):
            (text,) = await service.texts_of([body.tokens], False, "tokens", salt=salt)
        return json(tokenizing.detokenized(text))

    async def models(self, request: Request) -> ASGIApp:
        """GET /v1/models."""
        service = self._service
        service.require_ready()
        if is_anthropics(request.headers):
            return json(models_page(service.names, service.started))
        return json(models_body(service.names, service.started, service.engine.info))

    async def model(self, request: Request) -> ASGIApp:
        """GET /v1/models/{id}."""
        name, service = request.path_params["model"], self._service
        service.require_ready()
        if is_anthropics(request.headers):
            return json(model_info(name, service.names, service.started))
        return json(model_body(name, service.names, service.started, service.engine.info))

    async def engine(self, request: Request) -> ASGIApp:
        """GET /v1/engine, and ?stream=true."""
        self._service.require_ready()
        is_streamed = wants_stream(request.query_params.get("stream"))
        if is_streamed and request.method != "HEAD":
            return SnapshotStream(self._service)
        return json(await engine_body(self._service, request.scope))

    async def tickets(self, request: Request) -> ASGIApp:
        """POST /v1/tickets; also while the model loads: a socket then receives that error."""
        tickets.READER.decode(await self._service.bodies.read(request))
        secret = self._service.tickets.issue(tenant_of(request.scope))
        response = json(encode(tickets.TicketAnswer(secret)))
        response.headers["cache-control"] = "no-store"
        return response

    async def health(self, request: Request) -> ASGIApp:
        """GET /health: 200 while the engine lives, loading included."""
        engine = self._service.engine
        if engine.is_dead:
            self._service.require_ready()
        return json(encode({"status": "alive"}))

    async def ready(self, request: Request) -> ASGIApp:
        """GET /ready: 200 when requests are taken."""
        self._service.require_ready()
        return json(encode({"status": "ready", "model": self._service.names[0]}))

    async def version(self, request: Request) -> ASGIApp:
        """GET /version, as vLLM has it."""
        return json(encode({"version": __version__}))

    async def openapi(self, request: Request) -> ASGIApp:
        """GET /openapi.json."""
        config = self._service.config
        return json(openapi.document(config.root_path, bool(config.api_key)))

    async def metrics(self, request: Request) -> ASGIApp:
        """GET /metrics."""
        return Response(self._service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)


def json(body: bytes, status: int = 200) -> Response:
    """A JSON response from encoded bytes."""
    return Response(body, status, {"x-content-type-options": "nosniff"}, "application/json")


async def nothing_there(scope: Scope, receive: Receive, send: Send) -> None:
    """The 404 of every other path, for requests and handshakes."""
    if scope["type"] == "websocket":
        text = f"there is no WebSocket at {scope['path']}{_perhaps(scope)}"
        await deny(scope, send, NotFound(text))
    else:
        raise HTTPException(404)


async def on_error(metrics: Metrics, request: Request, error: Exception) -> Response:
    """Any exception as the wire's error object."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers = error.headers or headers
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            error = NotFound(f"there is nothing at {where}{_perhaps(request.scope)}")
        else:
            text = f"{where}: {error.detail}"
            if error.status_code == 405:
                headers = {"allow": _allowed(request)}
                text += f"; it takes {headers['allow']}{_upgrade(request)}"
            status, error = error.status_code, InvalidRequest(text)
            error.status = status
    elif not isinstance(error, StreamerError):
        log.error("a handler failed", exc_info=error)
        error = StreamerError("internal error", code="internal")
    status, body = error_answer(error, request.url.path)
    response = json(body, status)
    if not (error.status == 503 and request.url.path.endswith(PROBES)):  # only a probe
        response.raw_headers += id_headers(metrics.refused(error))
    response.headers.update(headers)
    if isinstance(error, Overloaded):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 413 or error.code == "internal":  # after which uvicorn closes it
        response.headers["connection"] = "close"
    return response


def _allowed(request: Request) -> str:
    """The methods of a path: Starlette names those of its first route alone."""
    routes = [r for r in request.app.routes if isinstance(r, Route)]
    path = next(r.path for r in routes if r.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({m for r in routes if r.path == path for m in r.methods or ()}))


def _upgrade(request: Request) -> str:
    """What to add for a path where a WebSocket is opened, too."""
    sockets = [r.path for r in request.app.routes if isinstance(r, WebSocketRoute)]
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return ", and a GET with an Upgrade header opens a WebSocket" if path in sockets else ""


def _perhaps(scope: Scope) -> str:
    """What to add for a path that has a route behind /v1, which base URLs may lack."""
    root = scope.get("root_path", "")
    path = f"{root}/v1{scope['path'].removeprefix(root)}"
    found = (r.matches({**scope, "path": path})[0] for r in scope["app"].routes)
    return f"; did you mean {path}?" if any(m is not Match.NONE for m in found) else ""


def build_app(engine: Engine, config: Config) -> ASGIApp:
    """The whole ASGI application over an engine (loading or loaded)."""
    return build_service_app(Service(engine, config))


def build_service_app(service: Service) -> ASGIApp:
    """The application of `build_app`, over a Service that the caller keeps."""
    api, responses, page = Api(service), ResponseRoutes(service), Page()
    messages, ollama = MessageRoutes(service), OllamaRoutes(service)
    limited = [Middleware(LimitHeaders, admission=service.admission)]
    routes = [
        Route("/", page.index),
        Route("/assets/{name}", page.asset),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
        Route("/openapi.json", api.openapi),
        Route("/v1/models", api.models),
        Route("/v1/models/{model:path}", api.model),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"], middleware=limited),
        Route("/v1/completions", api.completions, methods=["POST"], middleware=limited),
        Route("/v1/embeddings", api.embeddings, methods=["POST"], middleware=limited),
        Route("/v1/chat/completions/{id}", responses.resume_chat),
        Route("/v1/responses", responses.create, methods=["POST"], middleware=limited),
        Route("/v1/responses/compact", responses.compact, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}", responses.retrieve),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
        Route("/v1/messages", messages.create, methods=["POST"], middleware=limited),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"], middleware=limited),
        Route("/api/chat", ollama.chat, methods=["POST"], middleware=limited),
        Route("/api/generate", ollama.generate, methods=["POST"], middleware=limited),
        Route("/api/show", ollama.show, methods=["POST"], middleware=limited),
        Route("/api/tags", ollama.tags),
        Route("/api/ps", ollama.ps),
        Route("/api/version", ollama.version),
        Route("/v1/tickets", api.tickets, methods=["POST"]),
        Route("/v1/engine", api.engine),
        Route("/tokenize", api.tokenize, methods=["POST"], middleware=limited),
        Route("/detokenize", api.detokenize, methods=["POST"], middleware=limited),
        WebSocketRoute("/v1/responses", Endpoint(service)),
    ]
    handler = partial(on_error, service.metrics)
    app = Starlette(
        routes=routes,
        exception_handlers={
            StreamerError: handler,
            HTTPException: handler,
            Exception: handler,
        },
    )
    app.router.default = nothing_there
    gate = Gate(app, service)
    return Guard(gate, service.config, service.metrics.refused, service.tickets)

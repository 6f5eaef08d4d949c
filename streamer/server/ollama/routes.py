"""The routes of Ollama's API, over the same Service as every other.

A body becomes a prompt and SamplingParams as a chat's does; the stream is followed by the same
transport, with a builder of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from streamer.errors import InvalidRequest
from streamer.server.ollama.answer import OllamaAnswer, loaded
from streamer.server.ollama.body import (
    CHAT_READER,
    GENERATE_READER,
    SHOW_READER,
    ChatRequest,
    GenerateRequest,
)
from streamer.server.ollama.models import VERSION, loaded_body, models_body, shown_body
from streamer.server.ollama.types import Version
from streamer.server.openai.common import encode, new_id
from streamer.server.openai.models import check_model
from streamer.server.parsing.tools import with_tools
from streamer.server.prepared import Form, Prepared
from streamer.server.transport.sse import respond

if TYPE_CHECKING:
    from streamer.server.service import Service

Asked = TypeVar("Asked", ChatRequest, GenerateRequest)

CHAT = Form("ollama", CHAT_READER)
GENERATE = Form("ollama", GENERATE_READER)


class OllamaRoutes:
    """The handlers over one Service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> ASGIApp:
        """POST /api/chat."""
        return await self._answer(request, await self._service.read(request, CHAT))

    async def generate(self, request: Request) -> ASGIApp:
        """POST /api/generate."""
        return await self._answer(request, await self._service.read(request, GENERATE))

    async def _answer(self, request: Request, prepared: Prepared[Asked]) -> ASGIApp:
        service, body = self._service, prepared.body
        is_chat, is_raw = isinstance(body, ChatRequest), False
        if body.is_load:
            return _json(loaded(prepared.model, time.time(), is_chat=is_chat))
        use = body.tool_use()
        with service.bodies.used(prepared.tenant, prepared.num_bytes):
            if isinstance(body, GenerateRequest) and body.raw:
                is_raw, text = True, body.prompt or ""
                prompt = tuple(await service.engine.encode(text, cache_salt=prepared.salt))
            else:
                messages = body.template_messages()
                variables = with_tools(body.variables, use.tools)
                prompt = await service.encode_messages(
                    messages, salt=prepared.salt, variables=variables
                )
            prepared = prepared.within(service.engine.info.max_model_len, len(prompt))
            parsing = None if is_raw else service.parsing(prompt, use)
            prepared = await service.shaped(prepared, parsing, use)
        service.admission.accept(prepared.tenant, [prompt])
        stream = service.submit(prepared, prompt, new_id("ollama-"))
        answer = OllamaAnswer(
            stream, prepared.model, prepared.parsing, service.token_text, is_chat=is_chat
        )
        service.record(prepared, [stream])
        return await respond(service, request, answer, [stream], is_streamed=bool(body.stream))

    async def show(self, request: Request) -> ASGIApp:
        """POST /api/show."""
        service = self._service
        service.admit(request.scope)
        body = SHOW_READER.decode(await service.bodies.read(request))
        if body.asked is None:
            raise InvalidRequest("model is required", param="model", code="missing_field")
        check_model(body.asked, service.names)
        form, _ = service.format
        can = ["completion"]
        can += ["tools"] if form.calls is not None else []
        can += ["thinking"] if form.think is not None or form.channels is not None else []
        return _json(shown_body(service.engine.info, service.started, can))

    async def tags(self, request: Request) -> ASGIApp:
        """GET /api/tags."""
        service = self._service
        service.require_ready()
        return _json(models_body(service.names, service.engine.info, service.started))

    async def ps(self, request: Request) -> ASGIApp:
        """GET /api/ps."""
        service = self._service
        service.require_ready()
        return _json(loaded_body(service.names, service.engine.info, service.started))

    async def version(self, request: Request) -> ASGIApp:
        """GET /api/version."""
        return _json(encode(Version(VERSION)))


def _json(body: bytes) -> Response:
    return Response(body, 200, {"x-content-type-options": "nosniff"}, "application/json")

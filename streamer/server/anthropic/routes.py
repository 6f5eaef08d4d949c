"""The two routes of Anthropic's Messages API, over the same Service as every other.

A body becomes a prompt and SamplingParams as a chat's does; the stream is followed by the same
transport, with a builder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from streamer.server.anthropic.answer import MessagesAnswer
from streamer.server.anthropic.body import COUNT_READER, READER, Conversation
from streamer.server.anthropic.types import TokenCount
from streamer.server.openai.common import encode, new_id
from streamer.server.parsing.tools import ToolUse, with_tools
from streamer.server.prepared import Form, Prepared
from streamer.server.transport.sse import respond

if TYPE_CHECKING:
    from streamer.server.service import Service

C = TypeVar("C", bound=Conversation)

MESSAGES = Form("messages", READER)
COUNT = Form("messages", COUNT_READER)


class MessageRoutes:
    """The handlers over one Service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> ASGIApp:
        """POST /v1/messages."""
        service = self._service
        prepared = await service.read(request, MESSAGES)
        body, context = prepared.body, service.engine.info.max_model_len
        with service.bodies.used(prepared.tenant, prepared.num_bytes):
            prompt, use = await self._encode(prepared)
            parsing = service.parsing(prompt, use)
            prepared = prepared.within(context, len(prompt))
            budgeted = body.budget(prepared.params)
            if parsing is not None and parsing.reasoning is not None:
                prepared = replace(prepared, params=budgeted)
            prepared = await service.shaped(prepared, parsing, use)
        service.admission.accept(prepared.tenant, [prompt])
        stream = service.submit(prepared, prompt, new_id("msg_"))
        answer = MessagesAnswer(body.max_tokens, prepared.parsing, stream, prepared.model)
        service.record(prepared, [stream])
        return await respond(service, request, answer, [stream], is_streamed=bool(body.stream))

    async def count(self, request: Request) -> ASGIApp:
        """POST /v1/messages/count_tokens."""
        prepared = await self._service.read(request, COUNT)
        with self._service.bodies.used(prepared.tenant, prepared.num_bytes):
            prompt, _ = await self._encode(prepared)
        headers = {"x-content-type-options": "nosniff"}
        return Response(encode(TokenCount(len(prompt))), 200, headers, "application/json")

    async def _encode(self, prepared: Prepared[C]) -> tuple[tuple[int, ...], ToolUse]:
        """The prompt, and the tools in it."""
        service, body = self._service, prepared.body
        messages, prefill = body.opened()
        use = body.tool_use()
        prompt = await service.encode_messages(
            messages,
            salt=prepared.salt,
            prefill=prefill,
            variables=with_tools(body.variables, use.tools),
        )
        return prompt, use

"""GET /openapi.json: every route, its bodies and its statuses, from one table.

The schemas are those of the Structs that decode and encode the bodies, so that they can't differ
from what the server does. A new route is a line in ROUTES; a test compares it with the app's.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, Final

import msgspec

from streamer.server.anthropic import body as anthropic
from streamer.server.anthropic import types as anthropic_types
from streamer.server.errors import AnthropicErrorBody, ApiError, OllamaErrorBody
from streamer.server.ollama import body as ollama
from streamer.server.ollama import types as ollama_types
from streamer.server.openai import chat, chat_types, completions, embeddings, models, tokenizing
from streamer.server.openai.common import encode
from streamer.server.openai.fields import Table
from streamer.server.responses import body as responses
from streamer.server.responses import types as response_types
from streamer.server.tickets import TicketAnswer, TicketRequest
from streamer.server.watching import EngineBody

SSE_TYPE, JSON_TYPE = "text/event-stream", "application/json"
JSON_LINES_TYPE = "application/x-ndjson"


class ErrorBody(msgspec.Struct, frozen=True):
    """An error."""

    error: ApiError


class ModelList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    """The names of the served model."""

    data: list[models.Model]


class Version(msgspec.Struct, frozen=True):
    """The version of the server."""

    version: str


class Alive(msgspec.Struct, frozen=True):
    """The engine lives."""

    status: str


class Ready(msgspec.Struct, frozen=True):
    """The model is loaded and requests are accepted."""

    status: str
    model: str


STATUSES: Final = {
    304: "the page, or this part of it, has not changed",
    400: "a field is at fault: `param` is its path",
    401: "no API key, or one that is not known",
    403: "an Origin or Host that is not allowed here",
    404: "there is no such model, response or part of the page",
    408: "the body came too slowly",
    413: "the body is too large",
    414: "the request's target is too long",
    429: "the limit of this key is reached: see Retry-After",
    431: "the request's headers are too large",
    500: "the request failed inside the engine",
    503: "loading, overloaded, shutting down or dead: see Retry-After",
    504: "the answer was not complete at the request's deadline",
    529: "loading, overloaded or shutting down: see Retry-After",
}
OPEN: Final = (403, 414, 431, 503)
KEYED: Final = (401, *OPEN)
POSTED: Final = (400, 404, 408, 413, 429, 500, *KEYED)
ANSWERED: Final = (*POSTED, 504)
STREAMS: Final = (SSE_TYPE, JSON_LINES_TYPE)


class Route(msgspec.Struct, frozen=True):
    """One route as the document describes it.

    body, fields   the Struct of a JSON body, and the table of its known fields
    answer         the Struct of a JSON answer; None: `media` says what it is
    stream         the media type of the answer's stream, where the body or the query asks for it
    query          name -> JSON schema
    statuses       besides `success`
    error          the Struct of an error
    """

    method: str
    path: str
    summary: str
    answer: Any = None
    body: Any = None
    fields: Table = {}
    media: str = JSON_TYPE
    stream: str = ""
    query: dict[str, Any] = {}
    statuses: tuple[int, ...] = KEYED
    success: int = 200
    error: Any = ErrorBody


_STREAM: Final[dict[str, Any]] = {"stream": {"type": "boolean", "default": False}}
_CURSOR: Final[dict[str, Any]] = {**_STREAM, "starting_after": {"type": "string"}}
_PAGE: Final[dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
}
_DEADLINE: Final[dict[str, Any]] = {"type": "number", "exclusiveMinimum": 0}  # seconds
_NOT_SENT: Final = (("SchedulerView", "owner_of"),)  # fields of the engine's own use
_BY_ID: Final = (400, 404, *KEYED)

ROUTES: Final = (
    Route(
        "POST",
        "/v1/chat/completions",
        "Continue a conversation",
        body=chat.ChatRequest,
        fields=chat.FIELDS,
        answer=chat_types.ChatCompletion,
        stream=SSE_TYPE,
        statuses=ANSWERED,
    ),
    Route(
        "POST",
        "/v1/completions",
        "Continue texts",
        body=completions.CompletionRequest,
        fields=completions.FIELDS,
        answer=completions.Completion,
        stream=SSE_TYPE,
        statuses=ANSWERED,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        "Embed texts",
        body=embeddings.EmbeddingRequest,
        fields=embeddings.FIELDS,
        answer=embeddings.Embeddings,
        statuses=ANSWERED,
    ),
    Route(
        "GET",
        "/v1/chat/completions/{id}",
        "Resume the stream of a chat completion after an event's number",
        media=SSE_TYPE,
        query=_CURSOR,
        statuses=_BY_ID,
    ),
    Route(
        "POST",
        "/v1/responses",
        "Respond to an input, or to what came before it",
        body=responses.ResponseCreate,
        fields=responses.FIELDS,
        answer=response_types.Response,
        stream=SSE_TYPE,
        statuses=ANSWERED,
    ),
    Route(
        "POST",
        "/v1/responses/compact",
        "Not supported; the error says what to do instead",
        answer=ErrorBody,
        success=400,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        "How many tokens the input of such a response has",
        body=responses.ResponseCreate,
        fields=responses.FIELDS,
        answer=response_types.InputTokens,
        statuses=POSTED,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        "A response, or its events after a number",
        answer=response_types.Response,
        stream=SSE_TYPE,
        query=_CURSOR,
        statuses=_BY_ID,
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        "Delete a response; a running one is cancelled first",
        answer=response_types.Deleted,
        statuses=(404, *KEYED),
    ),
    Route(
        "POST",
        "/v1/responses/{id}/cancel",
        "Cancel a response",
        answer=response_types.Response,
        statuses=_BY_ID,
    ),
    Route(
        "GET",
        "/v1/responses/{id}/input_items",
        "The conversation that a response answers",
        answer=response_types.InputPage,
        query=_PAGE,
        statuses=_BY_ID,
    ),
    Route(
        "POST",
        "/v1/messages",
        "Anthropic's: answer a conversation",
        body=anthropic.MessagesRequest,
        fields=anthropic.FIELDS,
        answer=anthropic_types.Message,
        stream=SSE_TYPE,
        statuses=(*ANSWERED, 529),
        error=AnthropicErrorBody,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "Anthropic's: how many tokens a conversation has",
        body=anthropic.Conversation,
        fields=anthropic.FIELDS,
        answer=anthropic_types.TokenCount,
        statuses=(*POSTED, 529),
        error=AnthropicErrorBody,
    ),
    Route(
        "POST",
        "/api/chat",
        "Ollama's: continue a conversation",
        body=ollama.ChatRequest,
        fields=ollama.FIELDS,
        answer=ollama_types.ChatAnswer,
        stream=JSON_LINES_TYPE,
        statuses=ANSWERED,
        error=OllamaErrorBody,
    ),
    Route(
        "POST",
        "/api/generate",
        "Ollama's: answer a prompt",
        body=ollama.GenerateRequest,
        fields=ollama.GENERATE_FIELDS,
        answer=ollama_types.GenerateAnswer,
        stream=JSON_LINES_TYPE,
        statuses=ANSWERED,
        error=OllamaErrorBody,
    ),
    Route(
        "POST",
        "/api/show",
        "Ollama's: what a model is, and what it can do",
        body=ollama.ShowRequest,
        answer=ollama_types.Shown,
        statuses=POSTED,
        error=OllamaErrorBody,
    ),
    Route(
        "GET",
        "/api/tags",
        "Ollama's: list the served model's names",
        answer=ollama_types.Models,
        error=OllamaErrorBody,
    ),
    Route(
        "GET",
        "/api/ps",
        "Ollama's: the models in memory",
        answer=ollama_types.LoadedModels,
        error=OllamaErrorBody,
    ),
    Route(
        "GET",
        "/api/version",
        "Ollama's: the version whose API this is",
        answer=ollama_types.Version,
        error=OllamaErrorBody,
    ),
    Route(
        "POST",
        "/tokenize",
        "Token ids of a prompt or of messages",
        body=tokenizing.TokenizeRequest,
        fields=tokenizing.TOKENIZE_FIELDS,
        answer=tokenizing.Tokenized,
        statuses=POSTED,
    ),
    Route(
        "POST",
        "/detokenize",
        "The text of token ids",
        body=tokenizing.DetokenizeRequest,
        fields=tokenizing.DETOKENIZE_FIELDS,
        answer=tokenizing.Detokenized,
        statuses=POSTED,
    ),
    Route(
        "GET",
        "/v1/models",
        "List the served model's names; with the header anthropic-version in Anthropic's form",
        answer=ModelList,
    ),
    Route("GET", "/v1/models/{model}", "One model", answer=models.Model, statuses=(404, *KEYED)),
    Route(
        "POST",
        "/v1/tickets",
        "A ticket with which a browser opens one socket",
        body=TicketRequest,
        answer=TicketAnswer,
        statuses=(400, 408, 413, 429, *KEYED),
    ),
    Route(
        "GET",
        "/v1/engine",
        "Block pools, page tables, queue and steps",
        answer=EngineBody,
        stream=SSE_TYPE,
        query=_STREAM,
        statuses=(400, *KEYED),
    ),
    Route("GET", "/health", "Whether the engine lives", answer=Alive, statuses=OPEN),
    Route("GET", "/ready", "Whether requests are taken", answer=Ready, statuses=OPEN),
    Route("GET", "/version", "Which version this is", answer=Version, statuses=KEYED),
    Route("GET", "/metrics", "Prometheus metrics", media="text/plain"),
    Route("GET", "/openapi.json", "This document"),
    Route("GET", "/", "The page", media="text/html", statuses=(304, *OPEN)),
    Route("GET", "/assets/{name}", "A part of the page", media="*/*", statuses=(304, 404, *OPEN)),
)


@cache
def document(root_path: str = "", has_keys: bool = False) -> bytes:
    """The OpenAPI document as JSON."""
    types = [t for r in ROUTES for t in (r.body, r.answer, r.error) if t is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for name, field in _NOT_SENT:
        del components[name]["properties"][field]
    for schema in components.values():
        _describe_fields(schema)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        described = _described(route, schema_of)
        paths.setdefault(route.path, {})[route.method.lower()] = described
    built: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "streamer", "version": "1"},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        built["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        built["security"] = [{"key": []}]
    return encode(built)


def _describe_fields(schema: dict[str, Any]) -> None:
    """Move what a Struct's docstring says of its fields to the fields."""
    text, _, notes = inspect.cleandoc(schema.get("description", "")).partition("\n\n")
    schema["description"] = " ".join(text.split())
    for names, note in re.findall(r"^(\w+(?:, \w+)*)  +(.*(?:\n +.*)*)", notes, re.MULTILINE):
        for name in names.split(", "):
            if name in schema["properties"]:
                schema["properties"][name]["description"] = " ".join(note.split())


def _described(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    schema = {} if route.answer is None else schema_of[route.answer]
    if route.media != JSON_TYPE:
        schema = {"type": "string"}
    content: dict[str, Any] = {route.media: {"schema": schema}}
    for media in STREAMS:
        if media in (route.stream, route.media):
            content[media] = {}  # OpenAPI 3.1 can't describe the events of a stream
    error = {JSON_TYPE: {"schema": schema_of[route.error]}}
    responses: dict[str, Any] = {
        str(route.success): {"description": "the answer", "content": content}
    }
    for status in sorted(route.statuses):
        responses[str(status)] = {"description": STATUSES[status]}
        if status >= 400:
            responses[str(status)]["content"] = error
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "responses": responses,
    }
    parameters = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", route.path)]
    parameters += [_parameter(name, "query", schema) for name, schema in route.query.items()]
    if 504 in route.statuses:
        parameters.append(_parameter("X-Request-Timeout", "header", _DEADLINE))
    if "starting_after" in route.query:
        parameters.append(_parameter("Last-Event-ID", "header"))
    if parameters:
        described["parameters"] = parameters
    if route.body is not None:
        described["requestBody"] = {
            "required": True,
            "description": _refusals(route.fields),
            "content": {JSON_TYPE: {"schema": schema_of[route.body]}},
        }
    return described


def _parameter(name: str, where: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1} if schema is None else schema
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _refusals(fields: Table) -> str:
    names = sorted(n for n, r in fields.items() if r.harmless is not None)
    if not names:
        return "Unknown fields are ignored."
    return f"Refused unless null or without effect: {', '.join(names)}. Unknown fields are ignored."

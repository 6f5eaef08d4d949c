"""Responses by their ids: made from a checked body, and found again by the key that made them.

A response is looked up in the engine, live or retained. Only the key that made it finds it: for
every other key it does not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from streamer.errors import NotFound
from streamer.server.admission import tenant_of
from streamer.server.context import Context, TurnItem, context_of
from streamer.server.errors import clip
from streamer.server.openai.common import named
from streamer.server.responses.events import item_id
from streamer.server.responses.parsed import answer_items
from streamer.server.responses.turns import Turn, make_turn

if TYPE_CHECKING:
    from starlette.types import Scope

    from streamer.engine.stream import TokenStream
    from streamer.server.parsing.tools import Parsing, ToolUse
    from streamer.server.prepared import Prepared
    from streamer.server.responses.body import ResponseCreate
    from streamer.server.service import Service


async def respond(
    service: Service,
    prepared: Prepared[ResponseCreate],
    response_id: str,
    *,
    is_announced: bool = False,
) -> TokenStream:
    """The stream of a new response; its body is checked and its caller admitted.

    is_announced  its client has the id already: else the engine may add where it will run
    """
    service.require_room(prepared.scope)  # before its prompt is made
    with service.bodies.used(prepared.tenant, prepared.num_bytes):
        turn = await turn_of(service, prepared, response_id)
        if not is_announced:
            response_id, turn = _named(service, prepared, response_id, turn)
        use = prepared.body.tool_use()
        prepared = await service.shaped(prepared, _parsing(service, use, turn), use)
        prediction = await service.predicted(prepared.body.prediction, prepared.salt)
    service.admission.accept(prepared.tenant, [turn.prompt])
    if prepared.body.generate is False:
        params = msgspec.structs.replace(
            prepared.params, max_tokens=1, min_tokens=0, stop=(), structured_outputs=None
        )
        prepared = msgspec.structs.replace(prepared, params=params)
    context = Context(
        kind="response",
        tenant=prepared.tenant,
        body=prepared.body,
        model=prepared.model,
        items=turn.items,
        prefix=turn.prefix,
        session=prepared.reading.session,
        parsing=prepared.parsing,
    )
    stream = service.submit(
        prepared,
        turn.prompt,
        response_id,
        context=context,
        share_with=turn.share_with,
        prediction=prediction,
    )
    service.record(prepared, [stream])
    await service.recorded(stream)
    return stream


def _named(
    service: Service, prepared: Prepared[ResponseCreate], response_id: str, turn: Turn
) -> tuple[str, Turn]:
    """The response's id as the engine names it, which the ids of its own items have as well."""
    named = service.engine.named(response_id, turn.prompt, prepared.salt)
    if named == response_id:
        return response_id, turn
    before, after = item_id(response_id), item_id(named)
    items = tuple(
        msgspec.structs.replace(item, id=item.id.replace(before, after)) for item in turn.items
    )
    return named, msgspec.structs.replace(turn, items=items)


def _parsing(service: Service, use: ToolUse, turn: Turn) -> Parsing | None:
    """How the answer is read: with the text that it begins with, from the same place on."""
    parsing = service.parsing(turn.prompt, use)
    parent = service.engine.get(turn.share_with) if turn.share_with is not None else None
    if parsing is None or parent is None or not turn.prefix:
        return parsing
    earlier = context_of(parent).parsing
    is_reasoning = earlier is not None and earlier.is_reasoning
    reasoning = parsing.reasoning
    if reasoning is not None:
        inside = is_reasoning or turn.prefix.lstrip().startswith(reasoning.opens)
        is_open = inside and not any(end in turn.prefix for end in reasoning.ends)
        stage = "inside" if is_open else "after"
        reasoning = msgspec.structs.replace(reasoning, stage=stage)
    return msgspec.structs.replace(parsing, is_reasoning=is_reasoning, reasoning=reasoning)


async def turn_of(service: Service, prepared: Prepared[ResponseCreate], response_id: str) -> Turn:
    """The conversation and prompt of a response, with everything its body refers to."""
    body, scope, session = prepared.body, prepared.scope, prepared.reading.session
    parent = None
    if body.previous_response_id is not None:
        parent = await find(
            service, body.previous_response_id, scope, session, "previous_response_id"
        )
    items = await _items(service, body, scope, session, response_id)
    with named(body.names):
        return await make_turn(service, body, items, parent, salt=prepared.salt)


async def _items(
    service: Service, body: ResponseCreate, scope: Scope, session: str, response_id: str
) -> tuple[TurnItem, ...]:
    """The input as items; a reference is replaced by the item that it names."""
    base = item_id(response_id)
    return tuple(
        [
            await _referenced(service, item.id or "", scope, session, f"input[{i}].id")
            if item.is_reference
            else item.turn_item(f"{base}_{i}", tenant_of(scope), f"input[{i}]")
            for i, item in enumerate(body.items())
        ]
    )


async def _referenced(
    service: Service, name: str, scope: Scope, session: str, param: str
) -> TurnItem:
    """An item of a response that `find` returns: its answer, or an item of its input."""
    made_by = "resp_" + name.partition("_")[2].partition("_")[0]
    try:
        stream = await find(service, made_by, scope, session)
    except NotFound:
        stream = None
    if stream is not None:
        context = context_of(stream)
        answer = answer_items(stream, stream.text(0)) if stream.is_finished else ()
        for item in (*context.items, *answer):
            if item.id == name:
                return item
    raise NotFound(f"there is no item {clip(name)!r} here", param=param)


async def find(
    service: Service, response_id: str, scope: Scope, session: str = "", param: str | None = None
) -> TokenStream:
    """A response that is live, or finished and stored, or was made on this socket.

    Raises NotFound for any other, another key's included; `param` is the field with the id.
    """
    stream = await _look_up(service, response_id, scope, "response")
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


async def find_chat(service: Service, request_id: str, scope: Scope) -> TokenStream:
    """The stream of a chat completion, live or retained; NotFound as in `find`."""
    stream = await _look_up(service, request_id, scope, "chat")
    if stream is None:
        raise NotFound(f"there is no chat completion {clip(request_id)!r} here")
    return stream


async def _look_up(
    service: Service, request_id: str, scope: Scope, kind: str
) -> TokenStream | None:
    if not service.engine.is_ready and not service.engine.is_dead:
        service.require_ready()
    stream = await service.engine.find(request_id)
    context = None if stream is None else stream.context
    if stream is None or not isinstance(context, Context) or not stream.is_kept:
        return None
    is_theirs = context.kind == kind and context.tenant == tenant_of(scope)
    return stream if is_theirs else None

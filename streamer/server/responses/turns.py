"""Turns: from a response's body, and the answer it follows, to the conversation and its prompt.

The prompt of a next turn is its parent's token ids and those of what the template adds, so that the
prefix cache has its blocks; where the rendered text does not extend the parent's, all of it is
encoded anew. Called by responses/respond.py before it submits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from streamer.errors import InvalidRequest
from streamer.server.context import TurnItem, context_of
from streamer.server.openai.common import effort_variables
from streamer.server.parsing.tools import call_for_template, template_tools, with_tools
from streamer.server.responses.parsed import answer_items
from streamer.tokenizer.chat import EarlierTurn

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream
    from streamer.server.responses.body import ResponseCreate
    from streamer.server.service import Service

RESTORED_S: Final = 5.0  # how long an answer that a server before this one had sent may take again


class Turn(msgspec.Struct, frozen=True):
    """The conversation and prompt of one response.

    items       the conversation, this input last, without the instructions
    prompt      token ids
    prefix      text that its answer begins with
    share_with  id of the response it was forked from
    """

    items: tuple[TurnItem, ...]
    prompt: tuple[int, ...]
    prefix: str = ""
    share_with: str | None = None


async def make_turn(
    service: Service,
    body: ResponseCreate,
    items: tuple[TurnItem, ...],
    parent: TokenStream | None,
    *,
    salt: str,
) -> Turn:
    """The turn of a checked body whose input is `items`.

    Raises InvalidRequest for a parent that still runs, a fork beyond its end, and what the chat
    template refuses.
    """
    earlier_turn: EarlierTurn | None = None
    if parent is not None:
        if parent.is_restored and body.fork is None:
            # Its client may have read an end that the journal had not written when the server died.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTORED_S):
                    await parent.wait()
        context = context_of(parent)
        tokens, answer = _answer(parent, body)
        text = context.prefix + answer
        if body.fork is not None:
            more = body.fork.text or ""
            tokens += await service.plain_tokens(more, salt)
            text += more
            if not items:
                return Turn(context.items, parent.prompt + tokens, text, parent.request_id)
        is_cut = _is_cut(parent) and body.fork is None
        earlier_turn = (
            None
            if is_cut
            else EarlierTurn(
                _messages(context.body, context.items),
                context.body.generate is not False,
                text,
                parent.prompt + tokens,
                template_tools(context.body.tool_use().tools),
                effort_variables(context.body.effort),
            )
        )
        answered = text.removeprefix(context.prefix)
        items = (*context.items, *answer_items(parent, answered), *items)
    ids = await service.engine.encode_chat(
        _messages(body, items),
        variables=with_tools(effort_variables(body.effort), body.tool_use().tools),
        add_generation_prompt=body.generate is not False,
        cache_salt=salt,
        earlier_turn=earlier_turn,
    )
    return Turn(items, tuple(ids))


def _answer(parent: TokenStream, body: ResponseCreate) -> tuple[tuple[int, ...], str]:
    """Tokens and text of the parent's answer, or of what a fork keeps of it."""
    if context_of(parent).body.generate is False:
        if body.fork is not None and body.fork.at:
            raise _beyond(body.fork.at, 0)
        return (), ""
    tokens = parent.token_ids(0)
    finish = parent.finishes[0]
    if body.fork is not None and body.fork.at > len(tokens):
        raise _beyond(body.fork.at, len(tokens))
    if finish is not None and finish.text_bytes is not None and not isinstance(finish.stop, str):
        tokens = tokens[:-1]  # the template writes the end token itself
    if body.fork is not None:
        return tokens[: body.fork.at], parent.text_before(body.fork.at)
    if not parent.is_finished:
        raise InvalidRequest(
            f"response {parent.request_id} still runs: continue it on its own lane, or fork it",
            param="previous_response_id",
            code="previous_response_running",
        )
    return tokens, parent.text(0)


def _is_cut(parent: TokenStream) -> bool:
    """Whether its text ends before its tokens do: at a stop string."""
    finish = parent.finishes[0]
    return finish is not None and isinstance(finish.stop, str)


def _beyond(at: int, num_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"fork.at is {at}, but the response has {num_tokens} tokens so far", param="fork.at"
    )


def _messages(body: ResponseCreate, items: Sequence[TurnItem]) -> list[dict[str, Any]]:
    """The conversation for the chat template, instructions first."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    called: set[str] = set()
    for item in items:
        last = messages[-1] if messages else {}
        if item.role == "tool":
            if item.call_id not in called:
                raise InvalidRequest(
                    f"no call before function_call_output has the call_id {item.call_id[:80]!r}",
                    param="input",
                )
            messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
        elif item.role in ("reasoning", "call", "assistant"):
            if last.get("role") != "assistant" or not _can_join(last, item):
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            if item.role == "reasoning":
                last["reasoning_content"] = last["thinking"] = item.text
            elif item.role == "call":
                called.add(item.call_id)
                call = call_for_template(item.call_id, item.name, item.text)
                last.setdefault("tool_calls", []).append(call)
            else:
                last["content"] = item.text
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.text})
    return messages


def _can_join(last: dict[str, Any], item: TurnItem) -> bool:
    """Whether an item belongs to the assistant's message before it: reasoning, text, then calls."""
    if item.role == "call":
        return True
    is_reasoned_alone = "reasoning_content" in last and not last["content"]
    return item.role == "assistant" and is_reasoned_alone and "tool_calls" not in last

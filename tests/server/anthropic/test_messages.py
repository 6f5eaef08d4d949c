"""POST /v1/messages and /count_tokens over real sockets: events, usage, errors, keys."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from streamer.fake.model import expected_text
from streamer.server.anthropic.body import READER
from streamer.server.transport import sse as event_stream
from tests.server.support.counting import CHAT, ENDLESS, Event, sse
from tests.server.support.running import BUNDLED, Running

PATH = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "count to 7"}],
}


def post(server: Running, path: str = PATH, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {**ASKED, **fields}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=20)


def events_of(server: Running, **fields: Any) -> list[Event]:
    body = {**ASKED, **fields, "stream": True}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return list(sse(response))


def test_a_whole_message(server: Running) -> None:
    answer = post(server)
    body = answer.json()
    assert body["id"].startswith("msg_")
    assert answer.headers["x-request-id"] == body["id"]
    prompt = post(server, PATH + "/count_tokens").json()["input_tokens"]
    assert prompt == len("count to 7") + 4  # with the template's marks
    del body["id"]
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": expected_text(7)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt,
            "output_tokens": 8,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens_details": {
                "thinking_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_the_events_of_a_stream_are_the_whole_message(server: Running) -> None:
    events = events_of(server)
    assert [e.kind for e in events] == [e.json["type"] for e in events]
    start, begun, *deltas, stop, end, last = (e.json for e in events)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    assert begun == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert {(d["type"], d["index"], d["delta"]["type"]) for d in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(d["delta"]["text"] for d in deltas) == expected_text(7)
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 8
    assert last == {"type": "message_stop"}


def test_a_stream_that_waits_is_kept_alive_by_pings(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.05)
    server = server_with(model="fake:tokens_per_s=10")
    events = events_of(server)
    pings = [e for e in events if e.kind == "ping"]
    assert pings
    assert {e.data for e in pings} == {'{"type":"ping"}'}
    asked = {**ASKED, "messages": [{"role": "user", "content": "count to 7"}]}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**asked) as stream,
    ):
        assert "".join(stream.text_stream) == expected_text(7)


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stopped"),
    [
        ({"stop_sequences": ["x", " 4"]}, " 1 2 3", "stop_sequence", " 4"),
        ({"max_tokens": 2}, " 1 2", "max_tokens", None),
        ({"stop_sequences": [" 1"]}, "", "stop_sequence", " 1"),
    ],
)
def test_why_it_ended(
    server: Running, fields: dict[str, Any], text: str, reason: str, stopped: str | None
) -> None:
    body = post(server, **fields).json()
    assert [block["text"] for block in body["content"]] == ([text] if text else [])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stopped)
    events = [e.json for e in events_of(server, **fields)]
    ended = next(e for e in events if e["type"] == "message_delta")
    assert ended["delta"] == {"stop_reason": reason, "stop_sequence": stopped}
    assert sum(e["type"] == "content_block_start" for e in events) == bool(text)


def test_a_limit_beyond_the_context_is_what_fits(server_with: Any) -> None:
    """Clients set max_tokens without regard to the context: it is a bound, not a demand."""
    small = server_with(max_model_len=64)
    asked = [{"role": "user", "content": "count"}]
    body = post(small, messages=asked, max_tokens=32_000).json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["input_tokens"] + body["usage"]["output_tokens"] == 64
    refused = post(small, messages=[{"role": "user", "content": "x" * 99}])
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]


def test_the_prompt_is_that_of_the_same_chat(server: Running) -> None:
    """Blocks, joined messages of one role, and an answer that goes on from its beginning."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "Count to 3."},
        {"role": "assistant", "content": " 1"},
    ]
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "Hello.\nCount to 3."},
            {"role": "assistant", "content": " 1"},
        ],
        "max_tokens": 1,
    }
    wanted = {"continue_final_message": True, "return_token_ids": True}
    url = server.url + "/v1/chat/completions"
    whole = httpx.post(url, json={**chat, **wanted}).json()
    asked = post(server, PATH + "/count_tokens", messages=messages, system=system)
    assert asked.json() == {"input_tokens": len(whole["prompt_token_ids"])}
    usage = post(server, messages=messages, system=system, max_tokens=1).json()["usage"]
    assert usage["cache_read_input_tokens"] >= len(whole["prompt_token_ids"]) - 17
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
        whole["prompt_token_ids"]
    )


ATTRIBUTION = (
    "x-anthropic-billing-header: cc_version=2.1.{0}.{0:03x}; cc_entrypoint=cli; cch={0:05x};"
)


@pytest.mark.parametrize("form", ["block", "line", "text"])
@pytest.mark.parametrize("settings", [{}, BUNDLED], ids=["fake", "bundled"])
def test_claude_codes_attribution_line_does_not_change_the_prompt(
    server_with: Any, settings: dict[str, Any], form: str
) -> None:
    """The second request of a session finds at least 95% of the first one's blocks."""
    server = server_with(**settings)
    rules = "You are a coding agent. " + "Answer in few words. " * 20

    def ask(number: int, messages: list[Any]) -> Any:
        line = ATTRIBUTION.format(number)
        system: Any = [{"type": "text", "text": line}, {"type": "text", "text": rules}]
        if form == "line":
            system = [{"type": "text", "text": f"{line}\n{rules}"}]
        elif form == "text":
            system = f"{line}\n{rules}"
        fields = {"system": system, "messages": messages, "max_tokens": 5, "temperature": 0}
        return post(server, model=server.engine.info.name, **fields).json()

    asked = [{"role": "user", "content": "Count to 3."}]
    first = ask(0x12345, asked)
    assert first["usage"]["cache_read_input_tokens"] == 0
    more = [*asked, {"role": "assistant", "content": first["content"]}]
    second = ask(0x54321, [*more, {"role": "user", "content": "And to 4."}])
    block = server.config.block_size
    blocks = first["usage"]["input_tokens"] // block
    assert second["usage"]["cache_read_input_tokens"] // block >= 0.95 * blocks


def test_a_later_message_of_the_system_is_a_part_of_the_users_turn(server: Running) -> None:
    """Claude Code sends them; many chat templates take one at the beginning alone."""
    ask, rule = {"role": "user", "content": "Count."}, {"role": "system", "content": "To 3."}
    counts = [
        post(server, PATH + "/count_tokens", messages=messages, system="Be brief.").json()
        for messages in ([ask, rule], [{"role": "user", "content": "Count.\nTo 3."}])
    ]
    assert counts[0] == counts[1]
    alone = post(server, PATH + "/count_tokens", messages=[rule, ask]).json()
    whole = post(server, PATH + "/count_tokens", messages=[ask], system="To 3.").json()
    assert alone == whole


def test_the_effort_and_the_switch_of_thinking_are_variables_of_the_template() -> None:
    def variables(**fields: Any) -> dict[str, Any]:
        body = {"messages": [], "max_tokens": 1, **fields}
        return READER.decode(json.dumps(body)).variables

    low = {"effort": "low"}
    assert variables(output_config=low) == {"reasoning_effort": "low"}
    both = variables(output_config=low, thinking={"type": "adaptive"})
    assert both == {"reasoning_effort": "low", "enable_thinking": True}
    assert variables() == {}


def test_the_attribution_line_of_a_user_stays(server: Running) -> None:
    text = ATTRIBUTION.format(1)
    asked = [{"role": "user", "content": text}]
    count = post(server, PATH + "/count_tokens", messages=asked).json()
    assert count["input_tokens"] == len(text) + 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"messages": []}, "messages has 1 to 4096 entries"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 entries"),
        (
            {"tools": [{"name": "f", "input_schema": {}}]},
            "tools: the chat template of this model has no known format",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: Invalid value 'image'; accepted: ",
        ),
    ],
)
def test_a_field_at_fault_is_named(server: Running, fields: dict[str, Any], message: str) -> None:
    answer = post(server, **fields)
    assert answer.status_code == 400
    body = answer.json()
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(message)


def test_a_thread_is_refused_so_that_clients_send_all_messages(server: Running) -> None:
    error = post(server, thread={"type": "create"}).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}


def test_settings_that_ask_for_nothing_are_taken(server: Running) -> None:
    """What Claude Code sends besides the conversation."""
    fields = {
        "metadata": {"user_id": "user_1"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "thinking": {"type": "disabled"},
        "tools": [],
        "top_k": 40,
        "top_p": 0.9,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    assert post(server, path=PATH + "?beta=true", headers=headers, **fields).status_code == 200


def test_errors_have_anthropics_form_and_statuses(server_with: Any) -> None:
    keyed = server_with(api_key=("secret",), max_requests_per_minute=3)

    def kind(path: str = PATH, **given: Any) -> tuple[int, str]:
        given.setdefault("headers", {"x-api-key": "secret"})
        answer = post(keyed, path, **given)
        assert answer.json()["type"] == "error"
        return answer.status_code, answer.json()["error"]["type"]

    for headers in ({}, {"x-api-key": "other"}, {"authorization": "Bearer other"}):
        assert kind(headers=headers) == (401, "authentication_error")
    assert kind(headers={"host": "evil.example"}) == (403, "permission_error")
    assert kind(model="other") == (404, "not_found_error")
    assert kind(system="x" * (4 << 20)) == (413, "request_too_large")
    assert post(keyed, headers={"authorization": "Bearer secret"}).status_code == 200
    answer = post(keyed, headers={"x-api-key": "secret"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) > 0
    got = httpx.get(keyed.url + PATH, headers={"x-api-key": "secret"})
    assert (got.status_code, got.json()["error"]["type"]) == (405, "invalid_request_error")
    assert got.headers["allow"] == "POST"


def test_a_full_queue_is_529_and_a_client_that_leaves_frees_its_place(server_with: Any) -> None:
    busy = server_with(model="fake:tokens_per_s=50", max_num_seqs=1, max_queue=0)
    endless = {**ASKED, **CHAT, **ENDLESS, "stream": True}
    with httpx.stream("POST", busy.url + PATH, json=endless) as response:
        events = sse(response)  # kept: it closes the response when it goes
        assert next(events).kind == "message_start"
        busy.wait_metric('streamer_requests{state="running"}', 1)
        refused = post(busy)
        assert (refused.status_code, refused.json()["error"]["type"]) == (529, "overloaded_error")
        assert "retry-after" in refused.headers
    busy.wait_idle()

"""Errors, health, models and metrics over HTTP, and the life of the process around them."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

import streamer
from streamer.fake.tokenizer import FIRST_NUMBER
from tests.server.support.counting import CHAT, sse
from tests.server.support.running import Running


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", {}, 400, "messages", "missing_field"),
        ("chat/completions", {"messages": []}, 400, "messages", None),
        ("chat/completions", {**CHAT, "model": "x"}, 404, "model", "model_not_found"),
        ("chat/completions", {**CHAT, "store": True}, 400, "store", "unsupported_parameter"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "unsupported_parameter"),
        ("completions", {"prompt": [1, 1 << 40]}, 400, "prompt", None),
        ("completions", {"prompt": [-1]}, 400, "prompt", None),
        ("completions", {"prompt": "x", "logit_bias": {"999999999": 1}}, 400, "logit_bias", None),
    ],
)
def test_errors_have_one_shape(
    server: Running, path: str, body: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    response = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).split("[")[0].split(".")[0] == param
    if code is not None:
        assert error["code"] == code


def test_every_answer_has_an_id_in_both_spellings(
    server: Running, refusal_log: pytest.LogCaptureFixture
) -> None:
    """OpenAI's clients read x-request-id, Anthropic's request-id; a refusal's is in the log."""
    ask: dict[str, Any] = {**CHAT, "max_tokens": 2}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
        body = {"prompt": "x", "max_tokens": 2} if path == "/v1/completions" else ask
        for is_streamed in (False, True):
            answer = httpx.post(server.url + path, json={**body, "stream": is_streamed})
            own = answer.headers["x-request-id"]
            assert own in answer.text
            assert answer.headers["request-id"] == own
    answers = [
        httpx.post(server.url + "/v1/messages", json={}),
        httpx.post(server.url + "/v1/nothing"),
        httpx.post(server.url + "/v1/messages", headers={"origin": "http://other.site"}),
    ]
    for answer in answers:
        own = answer.headers["x-request-id"]
        assert answer.status_code >= 400
        assert answer.headers["request-id"] == own
        assert f"id={own}" in refusal_log.text


def test_a_batch_with_one_bad_prompt_leaves_nothing_running(server: Running) -> None:
    body = {"prompt": [[1], [2], [1 << 40]], "max_tokens": 30_000, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 400
    server.wait_idle()


def test_unknown_paths_and_methods(server: Running) -> None:
    missing = httpx.get(server.url + "/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = httpx.get(server.url + "/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    socket = httpx.get(server.url + "/v1/responses")
    assert socket.headers["allow"] == "POST"
    assert "opens a WebSocket" in socket.json()["error"]["message"]
    assert "WebSocket" not in wrong.json()["error"]["message"]
    for method, path in (("POST", "/chat/completions"), ("GET", "/models"), ("POST", "/responses")):
        message = httpx.request(method, server.url + path).json()["error"]["message"]
        assert message == f"there is nothing at {method} {path}; did you mean /v1{path}?"
    assert "did you mean" not in missing.json()["error"]["message"]
    for name, allowed in (("resp_x", "DELETE, GET, HEAD"), ("compact", "POST")):
        several = httpx.options(f"{server.url}/v1/responses/{name}")
        assert (several.status_code, several.headers["allow"]) == (405, allowed)


def test_health_ready_and_models(server: Running) -> None:
    assert httpx.get(server.url + "/health").json() == {"status": "alive"}
    assert httpx.get(server.url + "/ready").json() == {"status": "ready", "model": "fake"}
    (model,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert model["id"] == "fake"
    assert model["max_model_len"] == server.engine.info.max_model_len


def test_version(server: Running) -> None:
    assert httpx.get(server.url + "/version").json() == {"version": streamer.__version__}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": [" 4"]}, " 4"),
        ({"stop_token_ids": [FIRST_NUMBER + 2]}, FIRST_NUMBER + 2),
        ({"max_tokens": 2}, None),
        ({}, None),  # the model's own end
    ],
)
@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_a_choice_says_what_stopped_it(
    server: Running, kind: str, fields: dict[str, Any], reason: str | int | None
) -> None:
    asked = {"messages": [{"role": "user", "content": "count to 7"}], "prompt": "count to 7"}
    body = {**asked, "max_tokens": 20, **fields}
    whole = httpx.post(f"{server.url}/v1/{kind}", json=body).json()
    assert whole["choices"][0]["stop_reason"] == reason
    assert whole["system_fingerprint"].startswith("fp_")
    with httpx.stream("POST", f"{server.url}/v1/{kind}", json={**body, "stream": True}) as got:
        *_, last, _ = sse(got)
    assert last.json["choices"][0]["stop_reason"] == reason
    assert last.json["system_fingerprint"] == whole["system_fingerprint"]


def test_a_prompt_is_cut_to_leave_room_for_the_answer(server_with: Any) -> None:
    server = server_with(max_model_len=64, num_gpu_blocks_override=64)
    text = "x" * 5000 + "y" * 50  # sure to be too long, even before it is encoded
    for kind, fields in (
        ("completions", {"prompt": text, "echo": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        body = {**fields, "max_tokens": 9, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/{kind}", json=body).status_code == 400
        body["truncate_prompt_tokens"] = -1
        answer = httpx.post(f"{server.url}/v1/{kind}", json=body).json()
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (55, 9)
        if "echo" in body:
            assert answer["choices"][0]["text"].startswith("xxxxx" + "y" * 50)


def test_models_in_anthropics_form(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    (listed,) = client.models.list()
    assert (listed.type, listed.id, listed.display_name) == ("model", "fake", "fake")
    (other,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert listed.created_at.timestamp() == other["created"]
    assert client.models.retrieve("fake") == listed
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
    page = httpx.get(server.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    ends = (page["has_more"], page["first_id"], page["last_id"])
    assert (len(page["data"]), *ends) == (1, False, "fake", "fake")


def test_served_names(server_with: Any) -> None:
    server = server_with(served_model_name="first, second")
    names = [m["id"] for m in httpx.get(server.url + "/v1/models").json()["data"]]
    assert names == ["first", "second"]
    for given, status in (("second", 200), ("first", 200), ("fake", 404)):
        body = {**CHAT, "model": given, "max_tokens": 1}
        response = httpx.post(server.url + "/v1/chat/completions", json=body)
        assert response.status_code == status
        if status == 200:
            assert response.json()["model"] == given


def test_metrics_count_tokens_and_ends(server_with: Any) -> None:
    server = server_with()
    body = {**CHAT, "max_tokens": 7, "n": 2, "ignore_eos": True}
    usage = httpx.post(server.url + "/v1/chat/completions", json=body).json()["usage"]
    server.wait_metric("streamer_output_tokens_total", 14)
    server.wait_metric("streamer_prompt_tokens_total", usage["prompt_tokens"])
    server.wait_metric('streamer_requests_finished_total{reason="length",transport="http"}', 1)
    server.wait_metric("streamer_time_to_first_token_seconds_count", 1)
    server.wait_metric("streamer_request_seconds_count", 1)
    server.wait_idle()
    total = sum(
        server.metric(f'streamer_blocks{{pool="device",state="{s}"}}') for s in ("free", "cached")
    )
    assert total == server.engine.info.num_blocks


def test_stopping_by_event_drains_and_exits_0(server_with: Any) -> None:
    server = server_with()
    server.stop()
    assert server.exit_code == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")

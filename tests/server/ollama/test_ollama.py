"""Ollama's routes over real sockets: lines and whole answers, options, models, errors and keys."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from streamer.config import Config
from streamer.fake.model import expected_text, load_fake, parse_name
from streamer.server.ollama.models import models_body
from tests.server.support.running import Running

CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "count to 7"}],
}
GENERATE: dict[str, Any] = {"model": "fake:latest", "prompt": "count to 7"}
MIXED = "GGUF Q4_K; GGUF Q6_K"
BOTH = pytest.mark.parametrize(("path", "body"), [("chat", CHAT), ("generate", GENERATE)])


def post(server: Running, path: str, body: Any, headers: Any = None) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json=body, headers=headers, timeout=20)


def text_of(line: dict[str, Any]) -> str:
    return str(line["message"]["content"] if "message" in line else line["response"])


@BOTH
def test_it_streams_lines_unless_it_shall_not(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    answer = post(server, path, body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, last = map(json.loads, answer.text.splitlines())
    assert not any(line["done"] for line in lines)
    assert "".join(map(text_of, lines)) == expected_text(7)
    whole = post(server, path, {**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert text_of(whole.json()) == expected_text(7)
    for end in (last, whole.json()):
        assert (end["model"], end["done"], end["done_reason"]) == ("fake", True, "stop")
        assert (end["prompt_eval_count"], end["eval_count"]) == (len("count to 7") + 4, 8)
        assert end["total_duration"] >= end["eval_duration"] >= 0
        assert end["created_at"].endswith("Z")


@BOTH
def test_options(server: Running, path: str, body: dict[str, Any]) -> None:
    def ask(**options: Any) -> dict[str, Any]:
        answer = post(server, path, {**body, "stream": False, "options": options})
        return dict(answer.json()) | {"status": answer.status_code}

    cut = ask(num_predict=3, temperature=0, seed=-1, num_ctx=4096, mirostat=0)
    assert (text_of(cut), cut["done_reason"]) == (expected_text(3), "length")
    assert text_of(ask(stop=[" 4"], num_predict=-1)) == expected_text(3)
    for options, name in (
        ({"temperature": 9}, "options.temperature"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"mirostat": 2}, "options.mirostat"),
        ({"stop": "x" * 2000}, "options.stop"),
    ):
        refused = ask(**options)
        assert (refused["status"], name in refused["error"]) == (400, True)


def test_a_generation_is_a_chat_unless_it_is_raw(server: Running) -> None:
    plain = {**GENERATE, "stream": False}
    with_system = post(server, "generate", {**plain, "system": "Be brief."}).json()
    assert with_system["prompt_eval_count"] == len("count to 7Be brief.") + 6
    raw = post(server, "generate", {**plain, "raw": True, "options": {"num_predict": 1}}).json()
    assert raw["prompt_eval_count"] == len("count to 7")


def test_log_probabilities(server: Running) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    lines = [json.loads(line) for line in post(server, "chat", body).text.splitlines()]
    values = [value for line in lines for value in line.get("logprobs", ())]
    assert len(values) == 8
    assert all(len(value["top_logprobs"]) == 2 for value in values)
    assert "".join(value["token"] for value in values).startswith(expected_text(7))


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_asks_whether_the_model_is_loaded(
    server: Running, path: str
) -> None:
    body = post(server, path, {"model": "fake", "keep_alive": "5m"}).json()
    assert (text_of(body), body["done"], body["done_reason"]) == ("", True, "load")


def test_a_limit_beyond_the_context_is_what_fits(server_with: Any) -> None:
    small = server_with(max_model_len=64)
    body = {**CHAT, "messages": [{"role": "user", "content": "count"}], "stream": False}
    answer = post(small, "chat", {**body, "options": {"num_predict": 9999}}).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] == 64
    assert answer["done_reason"] == "length"


@BOTH
def test_a_field_at_fault_is_named(server: Running, path: str, body: dict[str, Any]) -> None:
    for fields, name in (
        ({"format": "xml"}, "format"),
        ({"format": {"type": "strange"}}, "format"),
        ({"think": [1]}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "images"),
        ({"images": ["eA=="]}, "images"),
    ):
        if (path == "chat" and "images" in fields) or (path == "generate" and "messages" in fields):
            continue
        refused = post(server, path, {**body, **fields})
        assert refused.status_code == 400
        assert refused.json().keys() == {"error"}
        assert name in refused.json()["error"]


def test_what_is_served(server_with: Any) -> None:
    server = server_with(served_model_name="one,two")
    version = httpx.get(server.url + "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # Copilot asks for it
    tags = httpx.get(server.url + "/api/tags").json()["models"]
    assert [model["model"] for model in tags] == ["one", "two"]
    (one, _) = httpx.get(server.url + "/api/ps").json()["models"]
    assert one["context_length"] == server.engine.info.max_model_len
    assert one.items() >= tags[0].items()
    for asked in ({"model": "two"}, {"name": "two:latest"}):
        shown = post(server, "show", asked).json()
        assert shown["capabilities"] == ["completion"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == one["context_length"]
        assert shown["details"] == one["details"]


def test_a_file_of_several_quantizations_has_the_level_of_most() -> None:
    info = replace(load_fake(Config(model="fake"), parse_name("fake"))[1], quantization=MIXED)
    (model,) = json.loads(models_body(["m"], info, 0))["models"]
    assert model["details"]["quantization_level"] == "Q4_K"
    assert model["details"]["format"] == "gguf"


def test_errors_and_keys(server_with: Any) -> None:
    keyed = server_with(api_key=("secret",), max_requests_per_minute=3)
    good = {"authorization": "Bearer secret"}
    for path in ("tags", "ps", "version"):
        assert httpx.get(f"{keyed.url}/api/{path}").status_code == 401
        assert httpx.get(f"{keyed.url}/api/{path}", headers=good).status_code == 200
    refused = post(keyed, "chat", CHAT)
    assert (refused.status_code, list(refused.json())) == (401, ["error"])
    for path in ("chat", "show"):
        missing = post(keyed, path, {**CHAT, "model": "other"}, good)
        assert missing.status_code == 404
        assert "model 'other' is not served here" in missing.json()["error"]
    assert "model is required" in post(keyed, "show", {}, good).json()["error"]
    many = post(keyed, "chat", CHAT, good)
    assert (many.status_code, list(many.json())) == (429, ["error"])


@BOTH
def test_a_client_that_leaves_frees_its_place(
    slow: Running, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "messages": [{"role": "user", "content": "count"}], "prompt": "count"}
    with httpx.stream("POST", f"{slow.url}/api/{path}", json=body) as response:
        assert not json.loads(next(response.iter_lines()))["done"]
    slow.wait_idle()

"""Requests of programs in the form in which they send them, with a scripted model.

recorded.json has the last request of a session of Claude Code, Codex CLI and opencode (`make
clients` runs them): their long texts, descriptions and ids are replaced, all but two tools of a
kind left out. Those of Continue, Open WebUI and Copilot follow their public sources, which each
test names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support.running import Running

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text("utf-8"))
SCRIPTS = {"claude-code": "claude_code", "codex": "codex", "opencode": "opencode"}
DONE = "Done: the notes are changed."
# As Qwen3.5's and Mistral's are: one message of the system, then turns that alternate.
STRICT = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('turns alternate') }}{% endif %}"
    "{{ '<|' ~ m.role ~ '|>' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}{{ eos_token }}{% endfor %}{{ '<|assistant|>' }}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "A city's weather.",
        "parameters": PARAMETERS,
    },
}


@pytest.fixture(scope="module")
def weather() -> Iterator[Running]:
    answers = str(HERE / "unchanged" / "scripts" / "answers.json")
    server = Running(script=answers, model="fake:length=9", served_model_name="fake").start()
    yield server
    server.stop()


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recorded_request_is_answered(
    name: str, is_strict: bool, server_with: Callable[..., Running], tmp_path: Path
) -> None:
    answers = HERE / "unchanged" / "scripts" / f"{SCRIPTS[name]}.json"
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT)
    more: dict[str, Any] = {"chat_template": str(template)} if is_strict else {}
    server = server_with(script=str(answers), **more)
    recorded = RECORDED[name]
    got = httpx.post(server.url + recorded["path"], json=recorded["body"], timeout=20)
    assert got.status_code == 200, got.text
    assert "".join(texts(got.text)) == DONE


def texts(stream: str) -> Iterator[str]:
    """The pieces of text in a stream of any of the three APIs."""
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            yield choice["delta"].get("content") or ""
        if event.get("type") == "response.output_text.delta":
            yield event["delta"]
        if event.get("type") == "content_block_delta":
            yield event["delta"].get("text", "")


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    got = httpx.post(server.url + path, json=body, timeout=20)
    assert got.status_code == 200, got.text
    return got


def test_copilots_probes_and_chat(weather: Running) -> None:
    """microsoft/vscode-copilot-chat, extension/byok: ollamaProvider asks for version, tags and
    what is shown of each model; openAIEndpoint, also that of a custom endpoint, sends chats without
    a limit, and networking/openai.ts marks messages for its own service's cache."""
    version = httpx.get(weather.url + "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    (model,) = httpx.get(weather.url + "/api/tags").json()["models"]
    shown = post(weather, "/api/show", {"model": model["model"]}).json()
    about = shown["model_info"]
    assert about["general.basename"]
    assert about[about["general.architecture"] + ".context_length"] > 0
    assert "tools" in shown["capabilities"]
    body = {
        "model": model["model"],
        "messages": [
            {
                "role": "system",
                "content": "Follow the instructions.",
                "copilot_cache_control": {"type": "ephemeral"},
            },
            {
                "role": "user",
                "content": [{"type": "text", "text": "How is the weather?"}],
                "copilot_cache_control": {"type": "ephemeral"},
            },
        ],
        "tools": [
            TOOL,
            {
                "type": "function",
                "function": {
                    "name": "now",
                    "description": "The time.",
                    "parameters": {"type": "object", "properties": {}},
                },
            },
        ],
        "temperature": 0.1,
        "top_p": 1,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = post(weather, "/v1/chat/completions", body).text
    assert '"name":"get_weather"' in stream
    assert '"finish_reason":"tool_calls"' in stream


def test_open_webuis_chats(weather: Running) -> None:
    """open-webui/open-webui, routers/openai.py and utils/payload.py: models, chats with usage, a
    model's settings, titles; over Ollama's API tags, what is loaded, chats with settings."""
    assert httpx.get(weather.url + "/v1/models").json()["data"][0]["id"] == "fake"
    messages = [{"role": "user", "content": "How is the weather?"}]
    chat = {"model": "fake", "messages": messages, "stream": True}
    native = {**chat, "tools": [TOOL], "stream_options": {"include_usage": True}}
    assert '"name":"get_weather"' in post(weather, "/v1/chat/completions", native).text
    settings = {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1, "seed": 5}
    settings |= {"stop": ["###"], "logit_bias": {"5": 1}, "max_tokens": 500}
    settings["stream_options"] = {"include_usage": True}
    assert '"usage":{' in post(weather, "/v1/chat/completions", {**chat, **settings}).text
    title = {**chat, "stream": False, "max_completion_tokens": 1000}
    assert post(weather, "/v1/chat/completions", title).json()["choices"]
    for path in ("/api/tags", "/api/ps"):
        assert httpx.get(weather.url + path).json()["models"]
    ollama = {**chat, "keep_alive": "5m"}
    ollama["options"] = {"num_ctx": 4096, "temperature": 0.7, "top_p": 0.9, "num_predict": 500}
    ollama["options"] |= {"seed": 5, "stop": ["###"], "repeat_penalty": 1.1, "mirostat": 0}
    lines = post(weather, "/api/chat", {**ollama, "tools": [TOOL]}).text.splitlines()
    calls = [c for line in lines for c in json.loads(line)["message"].get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": {"city": "Bern"}}


def test_continues_chats_and_completions(weather: Running) -> None:
    """continuedev/continue, core/llm/openaiTypeConverters.ts: agent mode, whose texts are joined
    and never empty, and completions of a template for what stands between two texts."""
    call = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    body = {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "<important_rules>Be brief.</important_rules>"},
            {"role": "user", "content": "How is the weather?"},
            {
                "role": "assistant",
                "content": " ",
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "18 degrees in Bern", "tool_call_id": "call_1"},
        ],
        "max_tokens": 4096,
        "stream": True,
        "tools": [TOOL],
    }
    stream = post(weather, "/v1/chat/completions", body).text
    assert "".join(texts(stream)) == "It is 18 degrees in Bern."
    fim = {
        "model": "fake",
        "prompt": "<|fim_prefix|>def f(<|fim_suffix|>    return 1\n<|fim_middle|>",
        "max_tokens": 4096,
        "temperature": 0.01,
        "stop": ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "\n\n"],
        "stream": True,
    }
    assert '"text":' in post(weather, "/v1/completions", fim).text

"""POST /tokenize and /detokenize: what they count is what a completion uses; echo of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from streamer.demo import CHECKPOINT
from streamer.fake.model import fake_tokenizer
from tests.server.support.counting import check_counting, sse
from tests.server.support.running import Running

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


def test_a_prompt_comes_back_from_its_tokens(server: Running) -> None:
    answer = post(server, "/tokenize", prompt="héllo").json()
    assert answer == {
        "count": 6,
        "max_model_len": server.engine.info.max_model_len,
        "tokens": list("héllo".encode()),
        "token_strs": None,
    }
    assert post(server, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "héllo"}


def test_messages_count_what_a_chat_uses(server: Running) -> None:
    answer = post(server, "/tokenize", messages=MESSAGES, model="fake").json()
    chat = post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert answer["count"] == len(answer["tokens"]) == chat.json()["usage"]["prompt_tokens"]
    bare = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    tokenizer = fake_tokenizer()
    assert bare["tokens"] == tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    assert bare["count"] < answer["count"]
    # special tokens are written out: the text has all that the model sees
    text = post(server, "/detokenize", tokens=answer["tokens"]).json()["prompt"]
    assert text == tokenizer.render_chat(MESSAGES)


def test_tools_count_as_a_chat_presents_them(server_with: Any, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    server = server_with(chat_template=str(template), tool_call_parser="hermes")
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools = [{"type": "function", "function": function}, {"type": "web_search"}]
    chat = {"messages": MESSAGES, "tools": tools}
    count = post(server, "/tokenize", **chat).json()["count"]
    asked = post(server, "/v1/chat/completions", **chat, max_tokens=1).json()
    assert count == asked["usage"]["prompt_tokens"]
    assert count > post(server, "/tokenize", messages=MESSAGES).json()["count"]
    mine = {"messages": MESSAGES[1:], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    counted = post(server, "/v1/messages/count_tokens", **mine).json()["input_tokens"]
    usage = post(server, "/v1/messages", **mine, max_tokens=1).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (
        counted
        > post(server, "/v1/messages/count_tokens", messages=MESSAGES[1:]).json()["input_tokens"]
    )
    for body, param in (
        ({**chat, "tools": [tools[0]] * 2}, "tools[1].function.name"),
        ({"prompt": "x", "tools": tools}, "tools"),
    ):
        refused = post(server, "/tokenize", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_special_tokens_of_a_prompt_are_added_unless_disabled(server: Running) -> None:
    for value in (True, False):
        answer = post(server, "/tokenize", prompt="x", add_special_tokens=value).json()
        assert answer["tokens"] == fake_tokenizer().encode("x", add_special_tokens=value)


def test_token_strings_are_the_log_probabilities_tokens(server: Running) -> None:
    answer = post(server, "/tokenize", prompt="hé", return_token_strs=True).json()
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
        ("/v1/completions", {"prompt": [1 << 40], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_is_at_fault_is_named(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_a_text_beyond_the_context_is_refused_without_being_encoded(server_with: Any) -> None:
    server = server_with(max_model_len=64)
    for body in ({"prompt": "12" * 1000}, {"messages": [{"role": "user", "content": "x" * 999}]}):
        answer = post(server, "/tokenize", **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_they_require_the_key_as_everything_does(server_with: Any) -> None:
    server = server_with(api_key=("secret",))
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert post(server, path, **body).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(server.url + path, json=body, headers=headers).status_code == 200


def test_bundled_tokens_are_those_of_transformers(bundled: Running) -> None:
    theirs = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = "Füße, 注意 \N{GRINNING FACE} <|im_end|>"
    answer = post(bundled, "/tokenize", prompt=text).json()
    assert answer["tokens"] == theirs.encode(text)
    assert post(bundled, "/detokenize", tokens=answer["tokens"]).json()["prompt"] == (
        "<|bos|>" + text  # all that the model sees
    )
    asked = post(bundled, "/tokenize", messages=MESSAGES).json()
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert asked["tokens"] == expected
    chat = post(bundled, "/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert asked["count"] == chat["usage"]["prompt_tokens"] == len(expected)


# ---------------------------------------------------------------- echo

PROMPTS: list[Any] = ["first:", [104, 105, 58]]  # the second spells "hi:"


def test_echo_puts_the_prompt_before_every_choice(server: Running) -> None:
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 3, "echo": True, "return_token_ids": True}
    answer = post(server, "/v1/completions", **body).json()
    plain = post(server, "/v1/completions", **{**body, "echo": False}).json()
    texts = ["first:", "first:", "hi:", "hi:"]
    for text, choice, bare in zip(texts, answer["choices"], plain["choices"], strict=True):
        assert choice["text"] == text + bare["text"]
        check_counting(bare["text"])
        assert bytes(choice["prompt_token_ids"]).decode() == text
        assert choice["token_ids"] == bare["token_ids"]
    assert answer["usage"] == plain["usage"]


def test_echo_streams_the_prompt_once(server: Running) -> None:
    body = {"prompt": "count:", "max_tokens": 5, "echo": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        events = [json.loads(e.data) for e in sse(response) if not e.is_done]
    text = "".join(choice["text"] for e in events for choice in e["choices"])
    assert text.startswith("count: ")
    assert len(check_counting(text.removeprefix("count:"))) == 5

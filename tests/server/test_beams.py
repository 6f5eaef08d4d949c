"""Beam search over HTTP and WebSocket: transformers' tokens and scores, streamed as they settle."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from websockets.sync.client import connect

from streamer.demo import CHECKPOINT
from tests.checkpoints import reference_model
from tests.server.support.counting import sse
from tests.server.support.running import Running

PROMPT = [5, 300, 41, 77, 1000, 12]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(CHECKPOINT)


def searched(model: Any, width: int, **settings: Any) -> list[tuple[list[int], float]]:
    """What transformers finds, best first."""
    ids = torch.tensor([PROMPT])
    ends = model.generation_config.eos_token_id
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=2,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=ends,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    stops = set(ends if isinstance(ends, list) else [ends])
    rows = []
    for row in found.sequences[:, len(PROMPT) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        rows.append(row[:end])
    return list(zip(rows, found.sequences_scores.tolist(), strict=True))


def body(width: int, **fields: Any) -> dict[str, Any]:
    given = {"prompt": PROMPT, "n": 2, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return {**given, "use_beam_search": True, "beam_width": width, **fields}


@pytest.mark.parametrize(
    ("width", "settings"),
    [(2, {}), (4, {"length_penalty": 0.6, "early_stopping": True}), (8, {"length_penalty": 2.0})],
)
def test_completions_bring_what_transformers_finds(
    bundled: Running, model: Any, width: int, settings: dict[str, Any]
) -> None:
    url = bundled.url + "/v1/completions"
    whole = httpx.post(url, json=body(width, **settings), timeout=60).json()
    expected = searched(model, width, **settings)
    for choice, (tokens, score) in zip(whole["choices"], expected, strict=True):
        assert choice["token_ids"] == tokens
        assert choice["score"] == pytest.approx(score, rel=1e-4)
    streamed: dict[int, list[int]] = {0: [], 1: []}
    scores = {}
    sent = body(width, stream=True, **settings)
    with httpx.stream("POST", url, json=sent, timeout=60) as response:
        for event in sse(response):
            for choice in [] if event.is_done else event.json["choices"]:
                streamed[choice["index"]] += choice.get("token_ids", [])
                if "score" in choice:
                    scores[choice["index"]] = choice["score"]
    assert [streamed[0], streamed[1]] == [tokens for tokens, _ in expected]
    assert [scores[0], scores[1]] == [choice["score"] for choice in whole["choices"]]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_stop_strings_and_log_probabilities_go_with_a_search(bundled: Running, path: str) -> None:
    """The answer ends where the stop string begins, whole and streamed; each token has its own."""
    text, stop, url = "Tell me a story about a fox.", " the", f"{bundled.url}/v1/{path}"
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3,
            "stop": stop,
        },
        "completions": {"prompt": text, "logprobs": 3, "stop": stop},
        "responses": {"input": text, "top_logprobs": 3, "stop": stop},
    }  # fmt: skip
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    sent = bodies[path] | {"use_beam_search": True, "beam_width": 4, limit: 40}
    answer = httpx.post(url, json=sent, timeout=60).json()
    end, whole, scores = parts_of(answer)
    streamed, logprobs = "", []
    with httpx.stream("POST", url, json=sent | {"stream": True}, timeout=60) as response:
        for event in sse(response):
            text, found = ("", []) if event.is_done else piece_of(event.json)
            streamed += text
            logprobs += found
    assert (streamed, logprobs) == (whole, scores)
    assert whole
    assert stop not in whole
    if path != "responses":
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)
    values = [each if isinstance(each, float) else each["logprob"] for each in scores]
    assert sum(values) == pytest.approx(end["cumulative_logprob"], abs=1e-4)


def parts_of(answer: Any) -> tuple[Any, str, list[Any]]:
    """What has the answer's end, its text, and its tokens' log probabilities."""
    if "output" in answer:
        (part,) = answer["output"][0]["content"]
        return answer, part["text"], part["logprobs"]
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    if "text" in choice:
        return choice, choice["text"], found["token_logprobs"]
    return choice, choice["message"]["content"], found["content"]


def piece_of(event: Any) -> tuple[str, list[Any]]:
    """The text and the log probabilities of one event."""
    if event.get("type") == "response.output_text.delta":
        return event["delta"], event["logprobs"]
    text, logprobs = "", []
    for choice in event.get("choices", ()):
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        found = choice.get("logprobs") or {}
        logprobs += found.get("content") or found.get("token_logprobs") or []
    return text, logprobs


def test_what_is_settled_streams_over_a_socket(bundled: Running) -> None:
    asked = {"input": "Tell me a story.", "max_output_tokens": 60, "ignore_eos": True}
    asked |= {"use_beam_search": True, "beam_width": 4}
    deltas = []
    with connect(bundled.ws_url, max_size=None) as socket:
        socket.send(json.dumps({"type": "response.create", **asked}))
        while True:
            event = json.loads(socket.recv(timeout=30))
            if event["type"] == "response.output_text.delta":
                deltas.append(event["delta"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                break
    response = event["response"]
    assert "".join(deltas) == response["output"][0]["content"][0]["text"]
    assert len(deltas) >= 4  # not all at the end
    assert response["score"] == pytest.approx(response["cumulative_logprob"] / 60)

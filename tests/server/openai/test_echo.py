"""echo with logprobs: a prompt's log probabilities, as OpenAI's client and lm-eval read them."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamer.core.plan import TokenLogprob
from streamer.demo import CHECKPOINT
from streamer.fake.model import expected_text
from streamer.server.openai.completion_logprobs import Echo, OffsetCounter, prompt_logprobs
from tests.server.support.counting import sse
from tests.server.support.running import Running

LONG = "a prompt that takes more than one step to score. " * 12


def complete(server: Running, **body: Any) -> Any:
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_offsets(choice: Any) -> None:
    """Every token is at its offset."""
    logprobs, text = choice["logprobs"], choice["text"]
    assert len({len(logprobs[name]) for name in logprobs}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


# ---------------------------------------------------------------- the form


def test_a_prompts_tokens_come_first(server: Running) -> None:
    body = {"prompt": ["first:", LONG, [104]], "n": 2, "max_tokens": 3, "echo": True, "logprobs": 2}
    answer = complete(server, **body)
    texts = [text for text in ("first:", LONG, "h") for _ in range(2)]
    for text, choice in zip(texts, answer["choices"], strict=True):
        assert choice["text"] == text + expected_text(3)
        check_offsets(choice)
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"] == [None, *[0.0] * (len(text) + 2)]
        assert logprobs["top_logprobs"][0] is None
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert (len(top), max(top.values()), top[token]) == (2, 0.0, 0.0)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6 + len(LONG) + 1, 18)


def test_only_the_prompt(server: Running) -> None:
    body = {"prompt": [LONG, "x"], "max_tokens": 0, "echo": True, "n": 2, "stop": "1"}
    for logprobs in (None, 1):
        answer = complete(server, **body, logprobs=logprobs)
        assert [c["text"] for c in answer["choices"]] == [LONG, LONG, "x", "x"]
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] == 0
        for choice in answer["choices"]:
            assert (choice["logprobs"] is None) == (logprobs is None)
            if logprobs is not None:
                assert len(choice["logprobs"]["tokens"]) == len(choice["text"])


def test_an_echo_without_new_tokens_ends_by_length(server: Running) -> None:
    (choice,) = complete(server, prompt="count to 0", max_tokens=0, echo=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("count to 0", "length")


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_brings_it_with_the_first_chunk(server: Running, max_tokens: int) -> None:
    body = {"prompt": ["go:", LONG], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "n": 2}
    whole = complete(server, **body, seed=1)
    texts, logprobs = [""] * 4, [[[], [], [], []] for _ in range(4)]
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}) as response:
        events = [json.loads(e.data) for e in sse(response) if not e.is_done]
    for choice in (c for e in events for c in e["choices"]):
        i = choice["index"]
        if not texts[i]:
            assert choice["text"].startswith(body["prompt"][i // 2])
        texts[i] += choice["text"]
        for into, values in zip(logprobs[i], choice["logprobs"].values(), strict=True):
            into += values
    for choice, text, lists in zip(whole["choices"], texts, logprobs, strict=True):
        assert (choice["text"], list(choice["logprobs"].values())) == (text, lists)


def test_a_scored_prompt_is_not_from_the_cache_and_fills_it(server: Running) -> None:
    def cached(**body: Any) -> int:
        usage = complete(server, prompt="unheard of: " + LONG, max_tokens=1, **body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(echo=True, logprobs=1) for _ in range(2)] == [0, 0]
    assert cached(echo=True) == cached(logprobs=1) > 500


def test_openais_client(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="fake", prompt=[[104, 105], [58]], echo=True, logprobs=3, max_tokens=0
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="x", max_tokens=0)
    assert caught.value.param == "max_tokens"
    first, second = (c.logprobs for c in answer.choices)
    assert first is not None
    assert second is not None
    assert (first.tokens, first.text_offset) == (["h", "i"], [0, 1])
    assert first.token_logprobs == [None, 0.0]
    assert (second.tokens, second.token_logprobs, second.top_logprobs) == ([":"], [None], [None])


# ---------------------------------------------------------------- offsets

PIECES = {0: b"<s>", 1: b" Hello", 2: b"\xe2\x82", 3: b"\xac", 4: b"</s>"}


def offsets(prompt: list[int], echo: str) -> list[int]:
    scores = [TokenLogprob(token, -1.0) for token in prompt[1:]]
    return prompt_logprobs(
        prompt, scores, Echo(echo, frozenset([0, 4])), PIECES.__getitem__, PIECES.__getitem__
    ).text_offset


def test_offsets_follow_the_text_that_is_sent() -> None:
    assert offsets([0, 1, 2, 3, 4, 1], "<s> Hello€</s> Hello") == [0, 3, 9, 9, 10, 14]
    assert offsets([0, 1, 2, 3, 4, 1], " Hello€ Hello") == [0, 0, 6, 6, 7, 7]
    assert offsets([0, 1, 1], "Hello Hello") == [0, 0, 5]  # SentencePiece adds the first space
    assert offsets([1, 1], "Hi") == [0, 2]  # never beyond the text


def test_tokens_that_are_written_alike_show_the_better_one() -> None:
    pieces = {0: b"a", 1: b"a", 2: b"b"}
    found = TokenLogprob(2, -9.0, ((0, -1.0), (1, -2.0)))
    (top,) = OffsetCounter().build([found], pieces.__getitem__, pieces.__getitem__).top_logprobs
    assert top == {"a": -1.0, "b": -9.0}


# ---------------------------------------------------------------- lm-eval's local-completions


def parse_logprobs(answer: Any, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """(log likelihood of what follows each context, whether it is greedy): what lm-eval 0.4.13
    makes of an answer, in our words."""
    out = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, start in zip(choices, ctxlens, strict=True):
        own = choice["logprobs"]["token_logprobs"][start:-1]
        top = choice["logprobs"]["top_logprobs"][start:-1]
        best = [max(t.values()) for t in top]
        out.append((sum(own), own == best))
    return out


def test_log_likelihoods_are_transformers_own(bundled: Running) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    context = tokenizer.encode("The capital of France is")
    greedy = model.generate(
        torch.tensor([context]), attention_mask=torch.ones(1, len(context)),
        max_new_tokens=4, do_sample=False,
    )[0].tolist()  # fmt: skip
    endings = [
        tokenizer.encode(t, add_special_tokens=False) for t in (" a dog.", " ü", " no " * 150)
    ]
    prompts = [greedy, *(context + ending for ending in endings), [5, 6]]
    ctxlens = [len(context)] * 4 + [1]
    answer = complete(
        bundled, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    got = parse_logprobs(answer, ctxlens)
    for (likelihood, is_greedy), prompt, start in zip(got, prompts, ctxlens, strict=True):
        with torch.inference_mode():
            logs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = sum(logs[i - 1, prompt[i]].item() for i in range(start, len(prompt)))
        best = [int(logs[i - 1].argmax()) for i in range(start, len(prompt))]
        assert likelihood == pytest.approx(expected, abs=1e-4 * (len(prompt) - start))
        assert is_greedy == (best == prompt[start:])
    assert [is_greedy for _, is_greedy in got] == [True, False, False, False, False]


def test_a_prompt_of_text_has_its_offsets(bundled: Running) -> None:
    body = {"prompt": "héllo 注意 world", "max_tokens": 4, "echo": True, "logprobs": 0}
    body["temperature"] = 0
    (choice,) = complete(bundled, **body)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<|bos|>"
    assert choice["text"].startswith(body["prompt"])
    shown = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    for token, offset in list(shown)[1:]:
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token

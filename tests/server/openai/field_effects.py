"""What each honoured field of the create bodies does, shown on answers, or on the sampler.

An effect is a function of an Asker and the kind of body; it asserts. The fake model ignores the
sampling fields, so what the server made of them is given to the real sampler.
"""

from __future__ import annotations

from typing import Any, get_args

import httpx
import pytest
import torch
from openai.types.responses import ResponseIncludable

from streamer.core.plan import Add, Facts, FinishReason
from streamer.core.request import Request
from streamer.core.sampling import SamplingParams
from streamer.core.speculation.speculator import Speculator
from streamer.core.speculation.values import SpeculationSizes
from streamer.engine.flow import Limits
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import TokenStream
from streamer.fake.model import expected_text, fake_tokenizer
from streamer.fake.tokenizer import FIRST_NUMBER
from streamer.kernels.ops import for_cpu
from streamer.model.sampling.host import Sampler
from tests.engine.helpers import Calls
from tests.model.sampling.joins import join
from tests.server.support.calls import LIMIT, PATHS, Answer, Asker, Refused
from tests.server.support.counting import sse

VOCAB = 64
BEST, NEXT = 7, 9
LONG = 100_000


def params(asker: Asker, kind: str, **fields: Any) -> SamplingParams:
    """The SamplingParams that the server makes of these fields."""
    return asker.ask(kind, **fields).stream.params


def draw(params: SamplingParams, best: float, *tokens: int, num_prompt: int = 1) -> set[int]:
    """Tokens drawn at forty positions after these, with logits `best` for BEST, 1 for NEXT, 0."""
    logits = torch.zeros(1, VOCAB)
    logits[0, BEST], logits[0, NEXT] = best, 1.0
    drawn = set()
    for position in range(len(tokens), len(tokens) + 40):
        sampler = Sampler(for_cpu(), VOCAB, 1)
        join(sampler, 0, params, list(tokens), num_prompt, choice=0)
        drawn.add(sampler.sample(logits.clone(), [0], [position]).tokens[0])
    return drawn


# ---------------------------------------------------------------- on the sampler


def temperature(asker: Asker, kind: str) -> None:
    assert len(draw(params(asker, kind, seed=1), 1.1, 1)) > 5
    assert draw(params(asker, kind, seed=1, temperature=0), 1.1, 1) == {BEST}


def keeps_only_the_best(**fields: Any) -> Any:
    """A filter so narrow that one candidate is left."""

    def effect(asker: Asker, kind: str) -> None:
        assert draw(params(asker, kind, seed=1, **fields), 1.1, 1) == {BEST}

    return effect


def repetition_penalty(asker: Asker, kind: str) -> None:
    greedy = params(asker, kind, temperature=0, repetition_penalty=2)
    assert draw(greedy, 1.5, BEST) == {NEXT}
    assert draw(greedy, 1.5, 1) == {BEST}


def presence_penalty(asker: Asker, kind: str) -> None:
    greedy = params(asker, kind, temperature=0, presence_penalty=0.6)
    assert draw(greedy, 1.5, 1, BEST) == {NEXT}
    assert draw(greedy, 1.5, BEST, 1) == {BEST}  # the prompt's tokens don't count


def frequency_penalty(asker: Asker, kind: str) -> None:
    greedy = params(asker, kind, temperature=0, frequency_penalty=0.3)
    assert draw(greedy, 1.5, 1, BEST) == {BEST}
    assert draw(greedy, 1.5, 1, BEST, BEST) == {NEXT}


def logit_bias(asker: Asker, kind: str) -> None:
    greedy = params(asker, kind, temperature=0, logit_bias={"33": 5})
    assert draw(greedy, 1.5, 1) == {33}


def seed(asker: Asker, kind: str) -> None:
    one, again, other = (asker.ask(kind, seed=s) for s in (5, 5, 6))
    assert (one.body["seed"], other.body["seed"]) == (5, 6)
    draws = [draw(a.stream.params, 1.1, 1) for a in (one, again, other)]
    assert draws[0] == draws[1] != draws[2]
    assert asker.ask(kind).body["seed"] != asker.ask(kind).body["seed"]


def skip_special_tokens(asker: Asker, kind: str) -> None:
    for skips, text in ((True, "ab"), (False, "a<x>b")):
        request = GenerateRequest(
            prompt=(1,), params=params(asker, kind, skip_special_tokens=skips)
        )
        stream = TokenStream(request, Limits(), Calls(), (b"a", b"b", b""), {2: b"<x>"})
        for token in (0, 2, 1):
            stream.push(0, token, None, None)
        assert stream.text(0) == text


def speculation(asker: Asker, kind: str) -> None:
    for value in (True, False):
        add = Add("r", (1, 2, 3, 4, 5, 1, 2, 3), params(asker, kind, speculation=value))
        (seq,) = Request(add, 0, 9).sequences
        speculator = Speculator(SpeculationSizes(max_proposed=4))
        speculator.begin(seq)
        seq.tokens += [1, 2, 3]
        free = Facts(step_s=((1, 1.0), (9, 1.0)))
        looked = list(speculator.looks(1, 9, free))
        assert bool(speculator.choose(looked, 9, free)) is value


# ---------------------------------------------------------------- on the answer


def limit(name: str) -> Any:
    def effect(asker: Asker, kind: str) -> None:
        answer = asker.ask(kind, limit=None, ignore_eos=True, **{name: 5})
        assert (answer.num_tokens, answer.text) == (5, expected_text(5))

    return effect


def stop(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, stop=" 5").text == expected_text(4)
    assert asker.ask(kind, stop=[" 7", "3"]).text == expected_text(2) + " "


def stop_token_ids(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, stop_token_ids=[FIRST_NUMBER + 3])
    assert [f and f.reason for f in answer.stream.finishes] == [FinishReason.STOP]
    assert answer.num_tokens == 4


def min_tokens(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, "count to 3").num_tokens == 4  # the end token is the fourth
    assert asker.ask(kind, "count to 3", min_tokens=6).num_tokens >= 6


def ignore_eos(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, "count to 3", ignore_eos=True).text == expected_text(8)


def return_token_ids(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, return_token_ids=True)
    ids = list(range(FIRST_NUMBER, FIRST_NUMBER + 8))
    if kind == "responses":
        deltas = [e for e in answer.events if e["type"] == "response.output_text.delta"]
        assert [i for e in deltas for i in e["token_ids"]] == ids
        assert tuple(answer.events[0]["prompt_token_ids"]) == answer.stream.prompt
        return
    assert answer.choices[0]["token_ids"] == ids
    holder = answer.body if kind == "chat" else answer.choices[0]
    assert tuple(holder["prompt_token_ids"]) == answer.stream.prompt


def priority(asker: Asker, kind: str) -> None:
    """The scheduler serves lower values first (tests/core); here the request has the value."""
    assert asker.ask(kind, priority=3).request.priority == 3


def cache_salt(asker: Asker, kind: str) -> None:
    text = f"a {kind} long enough for blocks of its own: " + "x" * 100
    asker.ask(kind, text, cache_salt="one")
    assert asker.ask(kind, text, cache_salt="two").num_cached == 0
    assert asker.ask(kind, text, cache_salt="one").num_cached > 0


def detach_s(asker: Asker, kind: str) -> None:
    """Of closed connections: with 0 the answer is cancelled, with a minute it runs to its end."""
    with asker.begun(kind, detach_s=0, **{LIMIT[kind]: LONG}) as dropped:
        pass
    with asker.begun(kind, detach_s=60, **{LIMIT[kind]: 2000}) as kept:
        pass

    asker.server.wait_idle()
    reasons = [f.reason for s in (dropped, kept) if (f := s.finishes[0]) is not None]
    assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH]


def model(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, model="fake").body["model"] == "fake"
    with pytest.raises(Refused) as caught:
        asker.ask(kind, model="other")
    assert (caught.value.status, caught.value.param) == (404, "model")


def metadata(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, metadata={"a": "b"}).body["metadata"] == {"a": "b"}


def n(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, n=3)
    assert [c["index"] for c in answer.choices] == [0, 1, 2]
    assert answer.num_tokens == 24


def streams(asker: Asker, kind: str) -> None:
    body = {**asker.body(kind, "count", 4), "stream": True}
    with httpx.stream("POST", asker.server.url + PATHS[kind], json=body, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        last = response.read().rstrip().rpartition(b"\n\n")[2]
    assert last == b"data: [DONE]" if kind != "responses" else b"event: response.incomplete" in last


def stream_options(asker: Asker, kind: str) -> None:
    body = {**asker.body(kind, "count", 4), "stream": True}
    for value in (True, False):
        body["stream_options"] = {"include_usage": value}
        got = httpx.post(asker.server.url + PATHS[kind], json=body, timeout=20)
        assert ('"completion_tokens":4' in got.text) is value
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with httpx.stream("POST", asker.server.url + PATHS[kind], json=body, timeout=20) as response:
        chunks = [event.json for event in sse(response) if not event.is_done]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def end_of(answer: Answer) -> dict[str, Any]:
    """What has the scores of a beam search's best answer."""
    return answer.choices[0] if "choices" in answer.body else answer.body


def use_beam_search(asker: Asker, kind: str) -> None:
    """The fake model counts with a log probability of -0.1 a number."""
    assert "score" not in end_of(asker.ask(kind))
    answer = asker.ask(kind, use_beam_search=True, beam_width=3)
    assert answer.text == expected_text(8)
    scores = end_of(answer)
    assert scores["cumulative_logprob"] == pytest.approx(-0.8)
    assert scores["score"] == pytest.approx(-0.1)
    if kind == "responses":
        return
    texts = [
        choice.get("text") or choice["message"]["content"]
        for choice in asker.ask(kind, use_beam_search=True, n=3).choices
    ]
    assert texts[0] == expected_text(8)
    assert len(set(texts)) == 3


def beam_width(asker: Asker, kind: str) -> None:
    """As many hypotheses; wrong widths are named."""
    asker.ask(kind, use_beam_search=True, beam_width=5)
    assert asker.seen[-1][0].queue_needs.n == 5
    for fields in ({"beam_width": 5}, {"beam_width": 65, "use_beam_search": True}):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, **fields)
        assert (caught.value.status, caught.value.param) == (400, "beam_width")


def length_penalty(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, use_beam_search=True, beam_width=2, length_penalty=0)
    assert end_of(answer)["score"] == pytest.approx(-0.8)


def early_stopping(asker: Asker, kind: str) -> None:
    for value in (True, "never"):
        given = params(asker, kind, use_beam_search=True, beam_width=2, early_stopping=value)
        assert given.early_stopping == value
    with pytest.raises(Refused) as caught:
        asker.ask(kind, use_beam_search=True, early_stopping="always")
    assert (caught.value.status, caught.value.param) == (400, "early_stopping")


# ---------------------------------------------------------------- of one body


def best_of(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, n=2, best_of=5)
    assert [choice["index"] for choice in answer.choices] == [0, 1]
    assert [choice["logprobs"] for choice in answer.choices] == [None, None]
    assert (answer.stream.params.n, answer.num_tokens) == (5, 40)  # all that were drawn count
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 65}, {"best_of": 2, "stream": True}):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, **fields)
        assert (caught.value.status, caught.value.param) == (400, "best_of")
        assert "'message': 'best_of" in str(caught.value)


def prompt(asker: Asker, kind: str) -> None:
    name = {"chat": "messages", "completions": "prompt", "responses": "input"}[kind]
    sent = asker.body(kind, "say this", 2)[name]
    tokenizer = fake_tokenizer()
    if kind == "completions":
        expected = tokenizer.encode("say this")
    else:
        messages = [{"role": "user", "content": "say this"}]
        expected = tokenizer.encode_chat(messages, add_generation_prompt=True)
    assert list(asker.ask(kind, limit=2, **{name: sent}).stream.prompt) == expected


def chat_logprobs(asker: Asker, kind: str) -> None:
    assert asker.ask(kind).choices[0]["logprobs"] is None
    content = asker.ask(kind, logprobs=True).choices[0]["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == expected_text(8)
    assert [t["top_logprobs"] for t in content] == [[]] * 8


def chat_top_logprobs(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, logprobs=True, top_logprobs=3)
    content = answer.choices[0]["logprobs"]["content"]
    assert [len(t["top_logprobs"]) for t in content] == [3] * 8


def completion_logprobs(asker: Asker, kind: str) -> None:
    logprobs = asker.ask(kind, logprobs=2).choices[0]["logprobs"]
    assert "".join(logprobs["tokens"]) == expected_text(8)
    assert [len(t) for t in logprobs["top_logprobs"]] == [2] * 8
    echoed = asker.ask(kind, "go:", echo=True, logprobs=2).choices[0]["logprobs"]
    assert echoed["token_logprobs"][:3] == [None, 0.0, 0.0]


def add_generation_prompt(asker: Asker, kind: str) -> None:
    bare = asker.ask(kind, add_generation_prompt=False).stream.prompt
    opened = asker.ask(kind).stream.prompt
    assert opened[: len(bare)] == bare
    assert len(opened) > len(bare)


def add_special_tokens(asker: Asker, kind: str) -> None:
    """The fake tokenizer adds none: the tokenizer gets it (tests/tokenizer/test_tokenizer.py)."""
    for value in (False, True):
        asker.ask(kind, add_special_tokens=value)
        assert asker.encoded[-1][-1]["add_special_tokens"] is value


def echo(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, "go:", echo=True)
    assert answer.text == "go:" + expected_text(8)
    assert answer.stream.params.prompt_logprobs is None
    answer = asker.ask(kind, "go:", echo=True, limit=None, max_tokens=0)
    assert (answer.text, answer.body["usage"]["completion_tokens"]) == ("go:", 0)


def prompt_logprobs(asker: Asker, kind: str) -> None:
    """As vLLM writes them: nothing of the first token, then each one and the best beside it."""
    answer = asker.ask(kind, prompt_logprobs=2)
    holder = answer.body if kind == "chat" else answer.choices[0]
    first, *rest = holder["prompt_logprobs"]
    assert first is None
    assert [int(next(iter(scores))) for scores in rest] == list(answer.stream.prompt[1:])
    assert all(2 <= len(scores) <= 3 for scores in rest)
    shown = [next(iter(scores.values())) for scores in rest]
    assert {s["rank"] for s in shown} == {1}  # to the fake model each token is the best one
    text = fake_tokenizer().decode(answer.stream.prompt[1:], skip_special_tokens=False)
    assert "".join(s["decoded_token"] for s in shown) == text
    with pytest.raises(Refused) as caught:
        asker.ask(kind, prompt_logprobs=1, stream=True)
    assert caught.value.param == "prompt_logprobs"


def prediction(asker: Asker, kind: str) -> None:
    """The tokens of its text alone, in whatever form, or an error with its name."""
    expected = tuple(asker.server.engine.tokenizer.encode_plain("1 2 3"))
    parts = [{"type": "text", "text": "1 2"}, {"type": "text", "text": " 3"}]
    for content in ("1 2 3", parts):
        answer = asker.ask(kind, prediction={"type": "content", "content": content})
        assert answer.request.prediction == expected
        name = "output" if kind == "responses" else "completion"
        assert set(answer.body["usage"][f"{name}_tokens_details"]) == {
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
            "reasoning_tokens",
        }
    for wrong, param in (
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
    ):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, prediction=wrong)
        assert caught.value.param == param, caught.value


def truncate_prompt_tokens(asker: Asker, kind: str) -> None:
    whole = asker.ask(kind).stream.prompt
    assert asker.ask(kind, truncate_prompt_tokens=4).stream.prompt == whole[-4:]
    assert asker.ask(kind, truncate_prompt_tokens=-1).stream.prompt == whole
    context = asker.server.engine.info.max_model_len
    for wrong in (0, -2, context + 1):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, truncate_prompt_tokens=wrong)
        assert caught.value.param == "truncate_prompt_tokens"


def return_tokens_as_token_ids(asker: Asker, kind: str) -> None:
    logprobs: Any = {"logprobs": 1} if kind == "completions" else {"logprobs": True}
    answer = asker.ask(kind, return_tokens_as_token_ids=True, **logprobs)
    found = answer.choices[0]["logprobs"]
    ids = [f"token_id:{token}" for token in answer.stream.token_ids()]
    if kind == "completions":
        assert found["tokens"] == ids
        assert [list(top) for top in found["top_logprobs"]] == [[each] for each in ids]
        assert found["text_offset"][:2] == [0, 2]  # of the text, whatever stands for its tokens
    else:
        assert [t["token"] for t in found["content"]] == ids
        own = asker.ask(kind, **logprobs).choices[0]["logprobs"]["content"]
        assert [t["bytes"] for t in found["content"]] == [t["bytes"] for t in own]


def continue_final_message(asker: Asker, kind: str) -> None:
    """The last message's text is the beginning of the answer, which says only what follows it."""
    asked = {"role": "user", "content": "count"}
    messages = [asked, {"role": "assistant", "content": " 7 8"}]
    for more in ({}, {"add_generation_prompt": False}):
        answer = asker.ask(kind, messages=messages, continue_final_message=True, **more)
        tokenizer = fake_tokenizer()
        opened = tokenizer.encode_chat([asked])
        assert list(answer.stream.prompt) == opened + tokenizer.encode(" 7 8")
        assert not answer.text.startswith(" 7")
    for wrong in ({"messages": [asked]}, {"messages": messages, "add_generation_prompt": True}):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, continue_final_message=True, **wrong)
        assert caught.value.param == "continue_final_message"


def chat_template_kwargs(asker: Asker, kind: str) -> None:
    """They reach the template (tests/tokenizer/test_chat.py), whose own names they can't take."""
    asker.ask(kind, chat_template_kwargs={"enable_thinking": False})
    for name in ("messages", "add_generation_prompt"):
        with pytest.raises(Refused) as caught:
            asker.ask(kind, chat_template_kwargs={name: []})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def reasoning_effort(asker: Asker, kind: str) -> None:
    """It reaches the template, beside the switch that turns reasoning off."""
    for effort, variables in {
        "high": {"reasoning_effort": "high"},
        "none": {"reasoning_effort": "none", "enable_thinking": False},
    }.items():
        if kind == "responses":
            given = {"effort": effort, "summary": "auto"}
            answer = asker.ask(kind, reasoning=given)
            assert answer.body["reasoning"] == {"effort": effort, "summary": None}
        else:
            asker.ask(kind, reasoning_effort=effort)
        assert asker.encoded[-1][-1]["variables"] == variables
    with pytest.raises(Refused):
        asker.ask(kind, reasoning={"effort": "much"}, reasoning_effort="much")


def instructions(asker: Asker, kind: str) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "count, please"},
    ]
    answer = asker.ask(kind, instructions="be brief")
    assert list(answer.stream.prompt) == fake_tokenizer().encode_chat(messages)
    assert answer.body["instructions"] == "be brief"


def response_logprobs(asker: Asker, kind: str) -> None:
    def content(**fields: Any) -> Any:
        return asker.ask(kind, **fields).body["output"][0]["content"][0]["logprobs"]

    assert content() == []
    expected = content(include=["message.output_text.logprobs"])
    assert "".join(t["token"] for t in expected) == expected_text(8)
    assert [len(t["top_logprobs"]) for t in content(top_logprobs=3)] == [3] * 8


def include(asker: Asker, kind: str) -> None:
    """Log probabilities come; what never applies is accepted, like OpenAI; names are checked."""
    response_logprobs(asker, kind)
    asker.ask(kind, include=list(get_args(ResponseIncludable)))
    with pytest.raises(Refused, match=r"accepted: .code_interpreter_call") as caught:
        asker.ask(kind, include=["file_search_call.results", "nothing.known"])
    assert (caught.value.status, caught.value.param) == (400, "include[1]")


def says_again(name: str, value: Any) -> Any:
    """A field that only the response object repeats."""

    def effect(asker: Asker, kind: str) -> None:
        assert asker.ask(kind, **{name: value}).body[name] == value
        assert asker.ask(kind).body[name] in (None, True)

    return effect


# What tools do to an answer is in tests/server/test_tool_calls.py and test_forced_calls.py: this
# model's template has none.
def tools(asker: Asker, kind: str) -> None:
    with pytest.raises(Refused) as caught:
        asker.ask(kind, tools=[_tool(kind)])
    assert caught.value.param == "tools"
    assert asker.ask(kind, tools=[{"type": "web_search"}]).text


def tool_choice(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, tools=[_tool(kind)], tool_choice="none").text
    with pytest.raises(Refused) as caught:
        asker.ask(kind, tools=[_tool(kind)], tool_choice={"type": "function", "name": "other"})
    assert caught.value.param == "tool_choice.name"


def parallel_tool_calls(asker: Asker, kind: str) -> None:
    assert asker.ask(kind, parallel_tool_calls=False).text == asker.ask(kind).text


def _tool(kind: str) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    if kind == "responses":
        return {"type": "function", **function}
    return {"type": "function", "function": function}


def stream_id(asker: Asker, kind: str) -> None:
    answer = asker.ask(kind, stream_id="lane")
    assert {e["stream_id"] for e in answer.events} == {"lane"}


def obfuscation(asker: Asker, kind: str) -> None:
    """Its one option is accepted where it asks for nothing."""
    asker.ask(kind, stream_options={"include_obfuscation": False})
    with pytest.raises(Refused) as caught:
        asker.ask(kind, stream_options={"include_obfuscation": True})
    assert caught.value.param == "stream_options.include_obfuscation"


def background(asker: Asker, kind: str) -> None:
    """It is answered at once, and runs to its end without a reader."""
    body = post(asker, background=True, max_output_tokens=500)
    assert (body["background"], body["status"]) == (True, "queued")
    asker.server.wait_idle()
    assert asker.seen[-1][1].text() == expected_text(500)


def generate(asker: Asker, kind: str) -> None:
    warmed = asker.ask(kind, generate=False)
    assert (warmed.body["status"], warmed.body["output"]) == ("completed", [])
    child = asker.ask(kind, "go on", previous_response_id=warmed.body["id"])
    prompt = warmed.stream.prompt
    assert child.stream.prompt[: len(prompt)] == prompt


def previous_response_id(asker: Asker, kind: str) -> None:
    parent = asker.ask(kind)
    child = asker.ask(kind, "and then?", previous_response_id=parent.body["id"])
    known = parent.stream.prompt + parent.stream.token_ids()
    assert child.stream.prompt[: len(known)] == known
    with pytest.raises(Refused) as caught:
        asker.ask(kind, previous_response_id="resp_1")
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")


def fork(asker: Asker, kind: str) -> None:
    parent = asker.ask(kind)
    body = {"previous_response_id": parent.body["id"], "fork": {"at": 3, "text": " or"}}
    child = post(asker, input=None, **body)
    assert child["output"][0]["content"][0]["text"].startswith(expected_text(3) + " or")
    kept = parent.stream.prompt + parent.stream.token_ids()[:3]
    assert asker.seen[-1][1].prompt[: len(kept)] == kept


def store(asker: Asker, kind: str) -> None:
    for value, status in ((True, 200), (False, 404)):
        made = post(asker, store=value)
        found = httpx.get(f"{asker.server.url}{PATHS[kind]}/{made['id']}", timeout=20)
        assert (made["store"], found.status_code) == (value, status)


def post(asker: Asker, **fields: Any) -> Any:
    """A response asked for over HTTP."""
    body = {**asker.body("responses", "count, please", 8), **fields}
    answer = httpx.post(asker.server.url + PATHS["responses"], json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()

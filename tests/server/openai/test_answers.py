"""The builders of answers by themselves: how often they iterate over their input."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streamer.core.plan import Finish, FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.engine.stream import Delta, Timing
from streamer.server.anthropic.answer import MessagesAnswer
from streamer.server.context import Context
from streamer.server.openai import chat, completions
from streamer.server.responses import body as responses
from streamer.server.responses.events import ResponseEvents

N = 8
NUM_TOKENS = 5
VALUES = tuple(TokenLogprob(97 + k, -1.0, ((97, -1.0),)) for k in range(NUM_TOKENS))


class Counting(list[Delta]):
    """Deltas that count the passes over them."""

    num_passes = 0

    def __iter__(self) -> Iterator[Delta]:
        self.num_passes += 1
        return super().__iter__()


def stream(n: int = 1) -> Any:
    """The part of a finished stream that the builders read; its text is abcde."""
    finishes = [Finish("r", c, FinishReason.LENGTH, NUM_TOKENS) for c in range(n)]
    return SimpleNamespace(
        request_id="r",
        created=1.0,
        seed=7,
        params=SamplingParams(n=n, seed=7, logprobs=1),
        prompt=(1, 2),
        num_prompt_tokens=2,
        cached_tokens=0,
        shared_tokens=0,
        reasoning_tokens=0,
        copied_tokens=0,
        proposed_tokens=0,
        accepted_tokens=0,
        finishes=finishes,
        timing=Timing(),
        error=None,
        is_finished=True,
        is_restored=False,
        num_output_tokens=NUM_TOKENS,
        text=lambda choice: "abcde",
        logprobs=lambda choice: VALUES,
        has_rest=lambda choice=0: False,
    )


def deltas(n: int) -> Counting:
    """A token at a time of every choice, then the finishes."""
    made = [Delta(c, k, (97 + k,), "abcde"[k]) for k in range(NUM_TOKENS) for c in range(n)]
    ends = [Finish("r", c, FinishReason.LENGTH, NUM_TOKENS) for c in range(n)]
    return Counting([*made, *(Delta(c, NUM_TOKENS, (), "", None, ends[c]) for c in range(n))])


def letter(token_id: int) -> bytes:
    return bytes([token_id])


def test_many_choices_of_a_chat_are_sorted_in_one_pass() -> None:
    body = chat.READER.decode(b'{"messages": []}')
    given = deltas(N)
    answer = msgspec.json.decode(chat.ChatAnswer(body, [stream(N)], "m", letter).whole([given]))
    assert [c["message"]["content"] for c in answer["choices"]] == ["abcde"] * N
    assert given.num_passes == 1


def test_many_choices_of_a_completion_are_sorted_in_one_pass() -> None:
    body = completions.READER.decode(b'{"prompt": ["x", "y"], "n": %d}' % N)
    given = [deltas(N), deltas(N)]
    builder = completions.CompletionAnswer(body, [stream(N), stream(N)], "m", letter)
    answer = msgspec.json.decode(builder.whole(given))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (i, "abcde") for i in range(2 * N)
    ]
    assert [g.num_passes for g in given] == [1, 1]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.FAILED])
def test_log_probabilities_are_built_once_at_the_end(reason: FinishReason) -> None:
    asked: list[int] = []

    def text(token_id: int) -> bytes:
        asked.append(token_id)
        return letter(token_id)

    body = responses.READER.decode(b'{"input": "x"}')
    one = stream()
    one.context = Context(kind="response", tenant="", body=body, model="m")
    events = ResponseEvents(one, text)
    events.deltas([Delta(0, 0, tuple(v.token_id for v in VALUES), "abcde", VALUES)])
    asked.clear()
    closing = events.deltas(
        [Delta(0, NUM_TOKENS, (), "", None, Finish("r", 0, reason, NUM_TOKENS))]
    )
    last = msgspec.to_builtins(closing[-1])
    (part,) = last["response"]["output"][0]["content"]
    assert "".join(lp["token"] for lp in part["logprobs"]) == "abcde"
    assert len(asked) == NUM_TOKENS  # each token once; its one alternative is one of them


def test_every_usage_has_the_tokens_that_were_proposed() -> None:
    """Right and wrong, of all choices, at the end of an answer."""
    one = stream()
    one.proposed_tokens, one.accepted_tokens = 9, 6
    right_and_wrong = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}
    body = chat.READER.decode(b'{"messages": []}')
    answer = msgspec.json.decode(chat.ChatAnswer(body, [one], "m", letter).whole([deltas(1)]))
    assert right_and_wrong.items() <= answer["usage"]["completion_tokens_details"].items()
    several = completions.READER.decode(b'{"prompt": ["x", "y"]}')
    builder = completions.CompletionAnswer(several, [one, stream()], "m", letter)
    answer = msgspec.json.decode(builder.whole([deltas(1), deltas(1)]))
    assert right_and_wrong.items() <= answer["usage"]["completion_tokens_details"].items()
    one.context = Context(
        kind="response", tenant="", body=responses.READER.decode(b'{"input": "x"}'), model="m"
    )
    last = msgspec.to_builtins(ResponseEvents(one, letter).deltas(deltas(1))[-1])
    assert right_and_wrong.items() <= last["response"]["usage"]["output_tokens_details"].items()
    answer = msgspec.json.decode(MessagesAnswer(9, None, one, "m").whole([deltas(1)]))
    assert right_and_wrong.items() <= answer["usage"]["output_tokens_details"].items()

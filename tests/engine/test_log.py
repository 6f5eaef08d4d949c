"""ChoiceLog and TokenStream: the bytes that they report are the bytes that they occupy."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from streamer.core.plan import Finish, FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.engine.flow import Limits
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import TokenStream
from streamer.tokenizer import text as tokenizer_text
from tests.engine.helpers import LETTERS, Calls, end, lone_stream

NUM_TOKENS = 3000


def stream_of(prompt: tuple[int, ...], num_tops: int | None) -> TokenStream:
    """A stream of one choice of letters; `num_tops` alternatives for each token, unless None."""
    params = SamplingParams(seed=5, logprobs=num_tops)
    request = GenerateRequest(prompt=prompt, params=params, request_id="r")
    stream = TokenStream(request, Limits(), Calls(), LETTERS, {})
    for k in range(NUM_TOKENS):
        lp = None
        if num_tops is not None:
            # New objects, as a step's result has them.
            top = tuple((1000 + k * 20 + i, -0.5 - i - k) for i in range(num_tops))
            lp = TokenLogprob(100_000 + k, -0.25 - k, top)
        stream.push(0, 97, lp, None)
    return stream


def occupied(make: Callable[[], TokenStream]) -> tuple[int, TokenStream]:
    """Bytes kept alive by what `make` returns."""
    make()  # objects that are made once only
    gc.collect()
    tracemalloc.start()
    try:
        stream = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], stream
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_tops", [None, 0, 1, 5, 20])
def test_the_bytes_of_the_output_are_as_measured(num_tops: int | None) -> None:
    real, stream = occupied(lambda: stream_of((1,), num_tops))
    assert stream.num_bytes == pytest.approx(real, rel=0.3, abs=8192)


def test_the_bytes_of_the_prompt_are_as_measured() -> None:
    real, stream = occupied(lambda: stream_of(tuple(range(1000, 101_000)), None))
    assert stream.num_bytes == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("asked", ["", "stop", "logit_bias"])
def test_the_bytes_of_choices_and_parameters_are_as_measured(n: int, asked: str) -> None:
    def make() -> TokenStream:
        fields: dict[str, Any] = {}
        if asked == "stop":
            tokenizer_text._fallbacks.cache_clear()
            fields["stop"] = tuple("x" * k + str(k) for k in range(1, 17))
        elif asked:
            fields["logit_bias"] = {i: i / 1e4 for i in range(1000, 1300)}
        stream = lone_stream(n=n, **fields)
        for choice in range(n):
            stream.push(choice, 97, None, None)
            stream.end(Finish("r", choice, FinishReason.LENGTH, 1))
        return stream

    real, stream = occupied(make)
    assert stream.num_bytes == pytest.approx(real, rel=0.2, abs=2048)


async def test_a_retained_stream_holds_no_other_stream() -> None:
    """Each observer refers to all streams of a batch."""
    streams = [lone_stream(), lone_stream()]
    seen = Seen(streams)
    for stream in streams:
        stream.observers.append(seen)
        end(stream)
    kept, gone = streams[0], weakref.ref(streams.pop())
    del stream, seen
    gc.collect()
    assert kept.is_finished
    assert gone() is None


class Seen:
    """An observer of several streams."""

    def __init__(self, streams: list[TokenStream]) -> None:
        self.streams = tuple(streams)

    def __call__(self, stream: TokenStream) -> None:
        assert stream in self.streams

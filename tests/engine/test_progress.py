"""Streams of requests that were accepted in an engine before this one: what they had, and go on."""

from __future__ import annotations

import random
import time

import pytest
from msgspec.structs import replace

from streamer.core.plan import Drawn, Finish, FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.engine.engine import GenerateRequest
from streamer.engine.flow import Limits
from streamer.engine.requests import Progress, Timing
from streamer.engine.stream import TokenStream
from streamer.errors import InvalidRequest, Overloaded
from tests.engine.helpers import (
    LETTERS,
    Calls,
    all_deltas,
    assert_all_back,
    make_engine,
    request,
    until,
)

CREATED = 1_790_000_000.0


def stream_of(params: SamplingParams, progress: Progress | None = None) -> TokenStream:
    asked = GenerateRequest(prompt=(1, 2, 3), params=params, request_id="r", progress=progress)
    return TokenStream(asked, Limits(detach_s=None), Calls(), LETTERS, {})


def drawn_of(stream: TokenStream, choice: int) -> Drawn:
    return Drawn(stream.token_ids(choice), stream.logprobs(choice) or (), stream.finishes[choice])


def progress_of(stream: TokenStream) -> Progress:
    return Progress(
        outputs=tuple(drawn_of(stream, choice) for choice in range(stream.params.n)),
        created=stream.created,
        prompt_logprobs=tuple(stream.prompt_logprobs),
        timing=stream.timing,
        cached_tokens=stream.cached_tokens,
        shared_tokens=stream.shared_tokens,
    )


def seen(stream: TokenStream, at: int = 0) -> list[object]:
    """All that a reader may ask of it, from any cursor on."""
    n = stream.params.n
    cursors = [(c, i) for c in range(n) for i in range(len(stream.token_ids(c)) + 1)]
    reader = stream.attach(at, lambda: None)
    deltas = stream.take(reader)
    return [
        deltas,
        [stream.token_ids(c) for c in range(n)],
        [stream.text_before(i, c) for c, i in cursors],
        [stream.num_shown(i, c) for c, i in cursors],
        [stream.has_rest(c) for c in range(n)],
        [stream.logprobs(c) for c in range(n)],
        stream.finishes,
        stream.num_output_tokens,
        stream.is_finished,
        stream.num_bytes,
    ]


TEXT = "häll{ST}o \u20ac, {STO and on{STOP"
ENDS = {
    "stop string": Finish("r", 0, FinishReason.STOP, 0, len(TEXT.encode()) - 5, "{STOP"),
    "length": Finish("r", 0, FinishReason.LENGTH, 0),
    "stop id": Finish("r", 0, FinishReason.STOP, 0, len(TEXT.encode()) - 1, ord("P")),
    "cancelled": Finish("r", 0, FinishReason.CANCELLED, 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_restored_at_any_token_goes_on_as_if_nothing_had_happened(end: str) -> None:
    """Characters and what may be a stop string are cut in two; each choice at its own token."""
    params = SamplingParams(n=2, seed=5, stop=["{STOP"], logprobs=1)
    tokens, last = TEXT.encode(), len(TEXT.encode()) - 1
    scores = [TokenLogprob(t, -float(i)) for i, t in enumerate(tokens)]
    rng = random.Random(1)
    for cut in range(len(tokens) + 1):
        whole = stream_of(params)
        parts = [whole]
        cuts = [cut, rng.randint(0, len(tokens))]
        for phase in (0, 1):
            for stream in parts:
                for choice in (0, 1):
                    at = range(cuts[choice]) if phase == 0 else range(cuts[choice], last + 1)
                    finish = replace(ENDS[end], choice=choice)
                    is_late = finish.reason is FinishReason.CANCELLED
                    for i in at:
                        ending = None if is_late or i < last else finish
                        stream.push(choice, tokens[i], scores[i], ending)
                    if is_late and phase == 1:
                        stream.end(finish)
                stream.wake()
            if phase == 0:
                parts.append(stream_of(params, progress_of(whole)))
            assert seen(parts[1]) == seen(whole)
        again = stream_of(params, progress_of(whole))
        assert seen(again) == seen(whole)
        assert again.timing.total_s == pytest.approx(whole.timing.total_s)


def test_times_and_counts_of_before_stay() -> None:
    timing = Timing(queue_s=1.0, prefill_s=2.0, first_token_s=3.0, per_token_s=0.5, total_s=9.0)
    finish = Finish("r", 0, FinishReason.LENGTH, 3)
    done = Progress(
        outputs=(Drawn((65, 66, 67), (), finish),), created=CREATED, timing=timing,
        cached_tokens=2, shared_tokens=1, prompt_logprobs=(TokenLogprob(2, -1.0),),
    )  # fmt: skip
    stream = stream_of(SamplingParams(seed=5), done)
    assert (stream.created, stream.cached_tokens, stream.shared_tokens) == (CREATED, 2, 1)
    assert stream.timing.total_s == pytest.approx(9.0)
    assert stream.timing.prefill_s == pytest.approx(2.0)
    assert stream.timing.per_token_s == pytest.approx(0.5)
    assert stream.prompt_logprobs == [TokenLogprob(2, -1.0)]
    began = replace(done, outputs=(Drawn((65,)),), created=time.time() - 60, timing=Timing())
    stream = stream_of(SamplingParams(seed=5), began)
    assert stream.is_started
    assert stream.timing.first_token_s == pytest.approx(60, abs=5)
    new = stream_of(SamplingParams(seed=5), replace(began, outputs=(Drawn(),)))
    assert not new.is_started


@pytest.mark.parametrize("cut", [0, 1, 5, 7])
async def test_an_engine_goes_on_with_a_request_of_another(cut: int) -> None:
    """Its stream has what the first one had; events and cursors of readers are what they were."""
    async with make_engine() as engine:
        whole = engine.submit(request(8, n=2, logprobs=0, request_id="a", seed=3, detach_s=None))
        await all_deltas(whole)
        texts, first = [whole.text(0), whole.text(1)], whole.finishes[0]
        outputs = (
            Drawn(whole.token_ids(0)[:cut], (whole.logprobs(0) or ())[:cut]),
            drawn_of(whole, 1),
        )
    async with make_engine(max_queue=1, max_num_seqs=4) as engine:
        progress = Progress(outputs=outputs, created=CREATED)
        stream = engine.submit(
            request(8, n=2, logprobs=0, request_id="a", seed=3, detach_s=None, progress=progress)
        )
        assert stream.num_output_tokens == cut + 8
        await all_deltas(stream)
        assert [stream.text(0), stream.text(1)] == texts
        assert stream.token_ids(0) == whole.token_ids(0)
        assert stream.logprobs(0) == whole.logprobs(0)
        assert stream.finishes[0] is not None
        assert first is not None
        assert replace(stream.finishes[0], copied_tokens=0) == replace(first, copied_tokens=0)
        assert stream.created == CREATED
        await assert_all_back(engine)


async def test_a_request_that_had_ended_is_retained_and_runs_no_step() -> None:
    finish = Finish("a", 0, FinishReason.STOP, 2, 2)
    done = Progress(outputs=(Drawn((65, 66, 0), (), finish),), created=CREATED)
    async with make_engine() as engine:
        stream = engine.submit(request(8, request_id="a", seed=3, progress=done))
        assert stream.is_finished
        assert engine.get("a") is stream
        assert (await all_deltas(stream))[-1].finish == finish
        assert engine.stats.steps == 0
        with pytest.raises(InvalidRequest, match="exists"):
            engine.submit(request(8, request_id="a"))
        engine.forget("a")
        assert engine.get("a") is None


async def test_accepted_requests_are_not_refused_for_a_full_queue() -> None:
    before = Progress(outputs=(Drawn(),), created=CREATED)
    async with make_engine(max_queue=1, max_num_seqs=1) as engine:
        streams = [engine.submit(request(8, seed=3, progress=before)) for _ in range(5)]
        with pytest.raises(Overloaded):
            engine.submit(request(8))
        for stream in streams:
            assert len((await all_deltas(stream))[-1].token_ids) > 0
        await until(engine, running=0, waiting=0)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((Drawn(), Drawn()), "2 outputs of 1 choices"),
        ((Drawn((65,) * 9),), "9 output tokens of a choice are more than its 8"),
        ((Drawn((1 << 20,)),), "is not a token id"),
    ],
)
async def test_progress_that_can_not_be_is_refused(
    outputs: tuple[Drawn, ...], message: str
) -> None:
    async with make_engine() as engine:
        progress = Progress(outputs=outputs, created=CREATED)
        with pytest.raises(InvalidRequest, match=message) as caught:
            engine.submit(request(8, seed=3, progress=progress))
        assert caught.value.param == "outputs"

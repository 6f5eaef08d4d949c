"""SamplingParams: every bound is checked, and the error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.sampling import MAX_LOGIT_BIAS, MAX_N, SamplingParams
from streamer.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("seed", 1 << 64),
        ("seed", 10**400),
        pytest.param("seed", -(10**5000), id="longer than Python writes out"),
        ("top_k", 10**400),
        ("temperature", 10**400),
        ("temperature", float("-inf")),
        ("max_tokens", 0),
        ("max_tokens", 1 << 40),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("n", 0),
        ("n", MAX_N + 1),
        ("stop", ("x",) * 17),
        ("stop_token_ids", tuple(range(200))),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


def test_an_entry_of_a_list_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=("ok", ""))
    assert caught.value.param == "stop[1]"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias={7: 101.0})
    assert caught.value.param == "logit_bias.7"


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(9\) exceeds max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_the_bounds_themselves_are_allowed() -> None:
    params = SamplingParams(temperature=2.0, top_p=1.0, top_k=-1, logprobs=20, n=MAX_N, seed=-5)
    assert not params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(frequency_penalty=0.1).has_penalties

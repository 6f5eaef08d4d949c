"""SamplingParams: every bound is checked, and the error names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamer.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_N,
    PARAMETERS,
    SamplingParams,
    model_defaults,
)
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


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("seed", 1.5, "seed must be an integer, got float 1.5"),
        ("logprobs", 2.0, "logprobs must be an integer, got float 2.0"),
        ("prompt_logprobs", 1.0, "prompt_logprobs must be an integer, got float 1.0"),
        ("max_tokens", 2.5, "max_tokens must be an integer, got float 2.5"),
        ("n", True, "n must be an integer, got bool True"),
        ("n", None, "n must be an integer, got NoneType"),
        ("seed", np.array([1, 2]), "seed must be an integer, got ndarray"),
        ("temperature", "1", "temperature must be a number, got str '1'"),
        ("top_p", True, "top_p must be a number, got bool True"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got int 1"),
        ("skip_special_tokens", None, "skip_special_tokens must be true or false, got NoneType"),
        ("stop", 5, "stop must be a list, got int 5"),
        ("stop", (5,), "stop[0] must be a string, got int 5"),
        ("stop", ("ok", "a\ud800"), "stop[1] is not valid Unicode: a lone surrogate at 1"),
        ("stop_token_ids", 7, "stop_token_ids must be a list, got int 7"),
        ("stop_token_ids", (7, 1.5), "stop_token_ids[1] must be an integer, got float 1.5"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {"5": 1.0}, "logit_bias.5 must be an integer, got str '5'"),
        ("logit_bias", {5: float("nan")}, "logit_bias.5 must be from -100.0 to 100.0, got nan"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.message == says
    assert str(caught.value.param).startswith(field)


def test_one_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="qqqy").stop == ("qqqy",)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_lists_become_pythons_own() -> None:
    bias = {np.int64(3): np.float32(0.5)}
    given: dict[str, Any] = {"seed": np.int64(5), "temperature": np.float64(0.5), "stop": ["a"]}
    params = SamplingParams(**given, stop_token_ids=[np.int32(7)], logit_bias=bias)  # type: ignore[arg-type]
    assert params == SamplingParams(
        seed=5, temperature=0.5, stop=("a",), stop_token_ids=(7,), logit_bias={3: 0.5}
    )
    numbers = [params.seed, *params.stop_token_ids, *params.logit_bias, params.temperature]
    assert [type(each) for each in numbers] == [int, int, int, float]
    bias[np.int64(4)] = np.float32(1e9)
    assert params.logit_bias == {3: 0.5}  # later changes of the caller's values have no effect


def test_an_entry_of_a_list_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=("ok", ""))
    assert caught.value.param == "stop[1]"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias={7: 101.0})
    assert caught.value.param == "logit_bias.7"


def test_every_parameter_has_bounds_that_are_checked() -> None:
    for parameter in PARAMETERS.values():
        for value in (object(), 1 if parameter.kind == tuple[str, ...] else "1"):
            with pytest.raises(InvalidRequest) as caught:
                SamplingParams(**{parameter.name: value})
            assert caught.value.param == parameter.name
        if parameter.kind in (int, float):
            low, high = parameter.field.bounds
            for number in (low - 1, high * 2 + 1):
                with pytest.raises(InvalidRequest, match=f"{parameter.name} must be from"):
                    SamplingParams(**{parameter.name: parameter.kind(number)})


def test_a_models_defaults_are_named_whether_it_decides_them_or_not() -> None:
    others = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert model_defaults({}) == {"temperature": 1.0, "top_p": 1.0, **others}
    decided = {"temperature": 0.7, "top_p": 0.9}
    assert model_defaults(decided) == {**decided, **others}


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(9\) exceeds max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_the_bounds_themselves_are_allowed() -> None:
    params = SamplingParams(temperature=2.0, top_p=1.0, top_k=-1, logprobs=20, n=MAX_N, seed=-5)
    assert not params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(frequency_penalty=0.1).has_penalties

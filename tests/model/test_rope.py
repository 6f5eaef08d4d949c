"""Inverse frequencies against transformers' functions, and rope fields that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from streamer.errors import ModelNotSupported
from streamer.model.rope import inverse_frequencies, parse_rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
        {**LLAMA3, "factor": 8.0, "high_freq_factor": 8.0},
        YARN,
        {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 3.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
        {**YARN, "attention_factor": 0.8},
        {**YARN, "factor": 1.0},
    ],
    ids=lambda f: "-".join([f["rope_type"], *sorted(f.keys() - {"rope_type", "rope_theta"})]),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(fields: dict[str, Any], head_dim: int) -> None:
    """To the last bits of fp32, with the factor on cos and sin."""
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(fields)
    )
    want, scale = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, "cpu")
    rope = parse_rope({"rope_parameters": fields}, head_dim, 131072)
    torch.testing.assert_close(inverse_frequencies(rope), want, rtol=3e-7, atol=0)
    assert rope.attention_factor == pytest.approx(scale, rel=1e-12)


def test_default_frequencies() -> None:
    """theta ** (-2i / d)."""
    rope = parse_rope({"rope_theta": 100.0}, 4, 99)
    torch.testing.assert_close(inverse_frequencies(rope), torch.tensor([1.0, 0.1]))
    assert (rope.limit, rope.kind) == (99, "default")


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"type": "linear", "factor": 2.0}, 4096),
        ({"type": "dynamic", "factor": 8.0}, 2048),
        ({**LLAMA3}, 2048),
    ],
)
def test_limits(fields: dict[str, Any], limit: int) -> None:
    """The longest context each kind is defined for; dynamic only as far as it is plain."""
    assert parse_rope({"rope_scaling": fields}, 64, 2048).limit == limit


def test_null_scaling_is_none() -> None:
    """Most checkpoints say rope_scaling: null."""
    config = {"rope_scaling": None, "rope_theta": 5e5}
    assert parse_rope(config, 64, 2048).theta == 5e5


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type", "'longrope'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "rope_type", "'mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_scaling", "mrope_section"),
        ({"rope_type": "linear"}, "factor", "lacks factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor", "must be a number"),
        ({"rope_type": "linear", "factor": -2.0}, "factor", "above 0"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor", "below high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters", "full_attention"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta", "rope_theta 1.0 gives rotary angles"),
        ({**YARN, "beta_fast": 1e-310}, "beta_fast", "beta_fast 1e-310 gives"),
        ({**YARN, "beta_slow": 1e-310}, "beta_slow", "beta_slow 1e-310 gives"),
        ({**YARN, "beta_fast": 1e-310, "truncate": False}, "beta_fast", "beta_fast 1e-310 gives"),
        ({**YARN, "beta_fast": 1e-310, "beta_slow": 1e-310}, "rope_scaling", "not finite"),
        ({**YARN, "factor": 1e-45}, "factor", "factor 1e-45 gives"),
        ({**LLAMA3, "factor": 1e-45}, "factor", "factor 1e-45 gives"),
        ({"rope_theta": 1e-300}, "rope_theta", "rope_theta 1e-300 gives"),
        ({"rope_theta": 5e-324}, "rope_theta", "rope_theta 5e-324 gives"),
        ({"rope_type": "linear", "factor": 1e-45}, "factor", "factor 1e-45 gives"),
        ({"rope_type": "linear", "factor": 1e-38}, "factor", "factor 1e-38 gives"),
        ({"rope_type": "factors", "factors": [1e-45] * 32}, "factors", "factors gives"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, says: str) -> None:
    """Each refusal names the field."""
    with pytest.raises(ModelNotSupported, match=says) as error:
        parse_rope({"rope_scaling": fields}, 64, 2048)
    assert error.value.param == param


def test_strange_numbers_that_compute_are_kept() -> None:
    """Only what is no finite number is refused, up to the last position."""
    for theta in (1e-30, 1.0, 1e30):
        assert parse_rope({"rope_theta": theta}, 64, 2048).theta == theta
    slow = {**YARN, "beta_slow": 1e-310, "truncate": False}
    assert parse_rope({"rope_scaling": slow}, 64, 2048).beta_slow == 1e-310


def test_a_head_that_no_file_could_hold_is_refused_before_it_is_computed() -> None:
    with pytest.raises(ModelNotSupported, match="at most 65536") as error:
        parse_rope({}, 1 << 30, 2048)
    assert error.value.param == "head_dim"

"""Philox against its published vectors, and the mapping from bits to noise at its ends."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from streamer.kernels.philox import GUMBEL_SPAN, gumbel, philox4x32, seed_key, token_noise
from tests.kernels.sampling_oracle import philox

# Counter, key and result of Random123's known-answer tests for Philox4x32-10.
VECTORS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def column(words: str) -> NDArray[np.uint32]:
    return np.array([[int(word, 16)] for word in words.split()], dtype=np.uint32)


def test_known_answers() -> None:
    for counter, key, expected in VECTORS:
        assert (philox4x32(column(counter), column(key)) == column(expected)).all()
        words = [[int(word, 16) for word in part.split()] for part in (counter, key, expected)]
        assert list(philox(tuple(words[0]), tuple(words[1]))) == words[2]  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 3, 8191, 8192, 8193, 20000])
def test_each_counter_is_alone(n: int) -> None:
    counter = np.tile(column(VECTORS[2][0]), n)
    key = np.tile(column(VECTORS[2][1]), n)
    counter[:, : n // 2] = 7
    out = philox4x32(counter, key)
    assert (out[:, n // 2 :] == column(VECTORS[2][2])).all()
    assert n < 2 or not (out[:, 0] == column(VECTORS[2][2])[:, 0]).any()


def test_gumbel_is_finite_and_exact_at_the_ends() -> None:
    low, high = gumbel(np.array([0, 0xFFFFFFFF], dtype=np.uint32))
    assert low == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)
    assert high == pytest.approx(24 * np.log(2), rel=1e-6)
    assert high - low < GUMBEL_SPAN


def test_gumbel_follows_its_mapping() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10000, dtype=np.uint32)
    u = ((bits >> 9).astype(np.float64) + 0.5) * 2.0**-23
    np.testing.assert_allclose(gumbel(bits), -np.log(-np.log(u)), rtol=1e-6, atol=1e-6)


def test_noise_is_laid_out_by_token_id() -> None:
    origin = np.array([[5, 5], [6, 6], [100, 101], [2, 2], [0, 0]], dtype=np.uint32)
    noise = token_noise(origin, np.array([3, 3]))
    counter = np.array([[100, 101], [2, 2], [0, 0], [3, 3]], dtype=np.uint32)
    key = np.array([[5, 5], [6, 6]], dtype=np.uint32)
    assert (noise == gumbel(philox4x32(counter, key)).T).all()
    assert (noise[0] != noise[1]).all()


def test_seed_key_takes_64_bits() -> None:
    assert seed_key((7 << 32) + 5) == (5, 7)
    assert seed_key(-1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert seed_key(-1) == seed_key((1 << 64) - 1)

"""GGUF's blocks as codes and scales: to the bit what the gguf package's dequantizers make."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from streamer.kernels import ops
from streamer.kernels.cpu.blocks import FORMATS as NATIVE
from streamer.kernels.weights import dequantize
from streamer.model.gguf.blocks import LAYOUTS, unpack
from streamer.model.gguf.header import FORMATS

QUANTIZED = {f.name: f for f in FORMATS.values() if f.name in LAYOUTS}
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # the package quantizes to these


def test_every_format_that_is_not_dense_has_a_parser() -> None:
    assert {f.name for f in FORMATS.values()} - {"F32", "F16", "BF16"} == set(LAYOUTS)
    assert set(NATIVE) == set(LAYOUTS)
    assert {name: (each.weights, each.bytes) for name, each in LAYOUTS.items()} == {
        name: (each.weights, each.bytes) for name, each in QUANTIZED.items()
    }
    sizes = {k.name: size for k, size in gguf.GGML_QUANT_SIZES.items()}
    assert {f.name: (f.weights, f.bytes) for f in FORMATS.values()} == {
        f.name: sizes[f.name] for f in FORMATS.values()
    }


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In C, and in torch."""
    way: str = request.param
    monkeypatch.setenv("STREAMER_KERNELS", "torch" if way == "torch" else "")
    if way == "native" and ops.why_not_native():
        pytest.skip(ops.why_not_native())
    return way


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_blocks_are_what_the_gguf_package_makes_of_them(name: str) -> None:
    """Any bytes: each scale is some float16, infinity and NaN too."""
    size = (19, 40 * QUANTIZED[name].bytes)  # rows of more than one chunk
    raw = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    weight = unpack(name, torch.from_numpy(raw))
    np.testing.assert_array_equal(dequantize(weight).numpy(), expected)
    weight = weight.unpacked()
    assert int(weight.codes.max()) < 1 << weight.bits
    assert weight.codes.dtype == torch.uint8
    assert weight.scales.shape == (19, weight.shape[1] // weight.group)
    assert weight.scales.is_contiguous()
    assert weight.codes.is_contiguous()


@pytest.mark.parametrize("name", WRITTEN)
def test_quantized_weights_come_back(name: str) -> None:
    dense = np.random.default_rng(2).normal(0, 0.05, (5, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(dense, kind)
    got = dequantize(unpack(name, torch.from_numpy(raw))).numpy()
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, kind))
    assert np.abs(got - dense).max() < 0.06

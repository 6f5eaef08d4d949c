"""What codes, scales, offsets, tables and permutations mean: element by element."""

from __future__ import annotations

import torch

from streamer.kernels.weights import QuantizedWeight, dequantize, stack

N, K, GROUP = 5, 40, 16  # the last group has 8 columns


def codes(bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (N, K), generator=torch.Generator().manual_seed(bits)).to(
        torch.uint8
    )


def test_every_element_is_what_the_formula_says() -> None:
    random = torch.Generator().manual_seed(1)
    scales, offsets = torch.randn(2, N, 3, generator=random)
    table = torch.arange(16, dtype=torch.uint8).flip(0) * 3
    permutation = torch.randperm(K, generator=random)
    weight = QuantizedWeight(codes(4), scales, GROUP, 4, 7, offsets, table, permutation)
    dense = dequantize(weight)
    for n in range(N):
        for k in range(K):
            value = int(table[int(weight.codes[n, k])]) - 7
            expected = scales[n, k // GROUP] * value + offsets[n, k // GROUP]
            assert dense[n, permutation[k]] == expected


def test_float8_codes_are_their_own_values() -> None:
    values = torch.linspace(-400, 400, N * K).view(N, K).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(values, torch.full((N, 1), 0.5), K, 8)
    assert torch.equal(dequantize(weight), values.float() * 0.5)


def test_parts_of_different_forms_are_stacked_in_order() -> None:
    quantized = QuantizedWeight(codes(8), torch.ones(N, 1), K, 8, 128)
    dense = torch.randn(3, K)
    whole = stack([dense, quantized], torch.bfloat16)
    assert whole.shape == (N + 3, K)
    assert whole.dtype is torch.bfloat16
    assert torch.equal(whole[3:].float(), codes(8).float() - 128)

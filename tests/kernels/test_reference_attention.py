"""paged_attention and store_kv against loops in float64, at shapes that fit nothing."""

from __future__ import annotations

import pytest
import torch

from streamer.kernels import ops
from tests.kernels.oracle import Case, attention_oracle

MIXED = [(1, 1), (1, 15), (7, 7), (1, 16), (5, 21), (1, 17), (1, 33), (11, 40), (1, 48), (3, 35)]
OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 9},
    {"sliding_window": 16},
    {"softcap": 2.0},
    {"sliding_window": 20, "softcap": 0.7},
]


def run(case: Case, scale: float, **options: object) -> torch.Tensor:
    layer, batch = ops.layer_view(case.pool, case.layer), case.batch()
    ops.store_kv(case.new_k(), case.new_v(), layer, batch)
    return ops.paged_attention(torch.cat(case.q), layer, batch, scale, **options)  # type: ignore[arg-type]


def expected(case: Case, scale: float, **options: object) -> torch.Tensor:
    return torch.cat(
        [
            attention_oracle(q, k, v, scale, **options)  # type: ignore[arg-type]
            for q, k, v in zip(case.q, case.k, case.v, strict=True)
        ]
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 80), (6, 1, 128)])
def test_mixed_rows(heads: int, kv_heads: int, dim: int, options: dict[str, float]) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, block=16)
    out = run(case, dim**-0.5, **options)
    assert out.shape == (sum(n for n, _ in MIXED), heads, dim)
    torch.testing.assert_close(
        out.double(), expected(case, dim**-0.5, **options), rtol=1e-5, atol=2e-6
    )

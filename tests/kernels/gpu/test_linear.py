"""Weights of codes: every form against dequantise-then-matmul, packed, split, mixed, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from streamer.kernels.weights import QuantizedWeight, Weight, dequantize

pytest.importorskip("triton")

E4M3 = torch.float8_e4m3fn
FORMS: dict[str, dict[str, Any]] = {
    "4 bits, zero 8, groups of 32": {"bits": 4, "zero": 8, "group": 32},
    "4 bits, offsets, groups of 128": {"bits": 4, "group": 128, "offsets": True},
    "4 bits, table": {"bits": 4, "zero": 128, "group": 32, "table": True},
    "3 bits, groups of 16": {"bits": 3, "zero": 4, "group": 16},
    "8 bits, zero 128, a row": {"bits": 8, "zero": 128, "group": 0},
    "6 bits, offsets, groups of 16, order": {
        "bits": 6, "group": 16, "offsets": True, "permutation": True
    },
    "8 bits, offsets, a row": {"bits": 8, "group": 0, "offsets": True},
    "e4m3, groups of 128": {"bits": 8, "group": 128, "is_float": True},
    "e4m3, a row": {"bits": 8, "group": 0, "is_float": True},
    "4 bits, groups of 20": {"bits": 4, "zero": 8, "group": 20},
}  # fmt: skip


def made(n: int, k: int, seed: int = 0, **form: Any) -> QuantizedWeight:
    """A weight of random codes; scales that differ by more than a float16's bits hold."""
    rng = torch.Generator().manual_seed(seed)
    bits, group = form["bits"], form["group"] or k
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), generator=rng, dtype=torch.uint8)
    if form.get("is_float"):
        codes = torch.randn(n, k, generator=rng).to(E4M3)
    table = torch.randperm(255, generator=rng)[:16].sort().values.to(torch.uint8)
    scales = torch.rand(n, groups, generator=rng) * 2.0 ** (2 - bits) + 1e-3
    return QuantizedWeight(
        codes=codes,
        scales=scales / (64 if form.get("table") else 1),
        group=group,
        bits=bits,
        zero=form.get("zero", 0),
        offsets=torch.randn(n, groups, generator=rng) if form.get("offsets") else None,
        table=table if form.get("table") else None,
        permutation=torch.randperm(k, generator=rng) if form.get("permutation") else None,
    )


def moved(weight: Weight, device: str) -> Weight:
    """The weight on the device."""
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    names = ("codes", "scales", "offsets", "table", "permutation")
    tensors = {name: getattr(weight, name) for name in names}
    return replace(weight, **{n: t.to(device) for n, t in tensors.items() if t is not None})


def packed(device: str, parts: list[Weight], *more: Any, **settings: Any) -> Any:
    """The GPU's Linear of the parts."""
    from streamer.kernels.gpu import backend

    more = tuple(m.to(device) if isinstance(m, torch.Tensor) else m for m in more)
    return backend.pack_weight([moved(part, device) for part in parts], *more, **settings)


def close(got: torch.Tensor, exact: torch.Tensor, near: float = 1e-5) -> None:
    """Within a share of the largest element."""
    assert float((got.cpu().double() - exact).abs().max()) < near * float(exact.abs().max())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_dequantise_then_matmul(device: str, form: dict[str, Any]) -> None:
    """Every way by the number of rows, with a bias, added to what is there; ragged N and K."""
    n, k = 70, 200
    weight, bias = made(n, k, **form), torch.randn(n, generator=torch.Generator().manual_seed(9))
    exact_weight = dequantize(weight).double()
    linear = packed(device, [weight], bias, dtype=torch.float32)
    assert linear.shape == (n, k)
    for rows in (1, 2, 18, 129):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        exact = F.linear(x.double(), exact_weight, bias.double())
        there = x.to(device)
        close(linear(there), exact)
        total = torch.full((rows, n), 3.0, device=device)
        assert linear(there, add_to=total) is total
        close(total, exact + 3.0)
    tokens = torch.tensor([5, 69, 0, 5], device=device)
    table = packed(device, [weight], dtype=torch.float32, is_table=True)
    close(table.rows(tokens), exact_weight[tokens.cpu()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(device: str, dtype: torch.dtype) -> None:
    """The weight is rounded to the dtype or not at all, products are added in float32."""
    weight = made(40, 256, **FORMS["4 bits, offsets, groups of 128"])
    linear = packed(device, [weight], dtype=dtype)
    for rows in (1, 5, 130):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = linear(x.to(device))
        assert y.dtype is dtype
        close(y, F.linear(x.double(), dequantize(weight).to(dtype).double()), 2.0**-7)
    assert linear.rows(torch.tensor([3], device=device)).dtype is dtype


def test_mixed_forms_write_side_by_side(device: str) -> None:
    """q, k and v of two forms and a dense one; gates of two forms with their activation."""
    four, eight = FORMS["4 bits, zero 8, groups of 32"], FORMS["8 bits, zero 128, a row"]
    dense = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    parts: list[Weight] = [made(32, 64, 1, **four), made(16, 64, 2, **four), made(8, 64, **eight)]
    parts.append(dense)
    bias = torch.randn(80, generator=torch.Generator().manual_seed(4))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    linear = packed(device, parts, bias, dtype=torch.float32)
    assert [part.shape[0] for part in linear._parts] == [48, 8, 24]
    weight = torch.cat([dequantize(part) for part in parts]).double()
    exact = F.linear(x.double(), weight, bias.double())
    close(linear(x.to(device)), exact)
    total = torch.zeros(3, 80, device=device)
    close(linear(x.to(device), add_to=total), exact)
    gates = packed(device, [parts[0], made(32, 64, 7, **eight)], None, "silu", dtype=torch.float32)
    gate, up = (x.double() @ dequantize(p).double().T for p in (parts[0], made(32, 64, 7, **eight)))
    close(gates(x.to(device)), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(
    "form", ["4 bits, zero 8, groups of 32", "8 bits, offsets, a row", "e4m3, a row"]
)
def test_k_is_split_among_programs(
    device: str, monkeypatch: pytest.MonkeyPatch, form: str, rows: int
) -> None:
    """The same sum to rounding, and no part beyond K."""
    from streamer.kernels.gpu.linear import few_rows, multiply

    weight, bias = made(70, 5000, **FORMS[form]), torch.ones(70)
    x = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(1))
    linear = packed(device, [weight], bias, dtype=torch.float32)
    exact = F.linear(x.double(), dequantize(weight).double(), bias.double())
    codes = linear._parts[0].codes
    for module in (few_rows, multiply):
        monkeypatch.setattr(module, "ENOUGH", 0)
    assert multiply.num_splits(rows, codes) == 1
    close(linear(x.to(device)), exact)
    for module in (few_rows, multiply):
        monkeypatch.setattr(module, "ENOUGH", 1000)
    monkeypatch.setattr(multiply, "MIN_TILES", 1)
    assert multiply.num_splits(rows, codes) >= 2
    for total in (None, torch.zeros(rows, 70, device=device)):
        close(linear(x.to(device), add_to=total), exact)


def test_rows_up_to_a_power_of_two_are_split_alike() -> None:
    from streamer.kernels.gpu.linear.codes import Codes
    from streamer.kernels.gpu.linear.multiply import num_splits

    for n, k in ((1024, 1024), (4096, 14_336), (152_000, 128), (64, 16)):
        weight = made(1, k, **FORMS["4 bits, zero 8, groups of 32"])
        codes = Codes([weight], torch.bfloat16)
        codes.shape = (n, k)
        for rows in (5, 8, 33, 64, 65, 100):
            upper = 1 << (rows - 1).bit_length()
            assert num_splits(rows, codes) == num_splits(upper, codes)
        for rows in (1, 2, 3, 100):
            assert 1 <= num_splits(rows, codes) <= max(1, codes.blocks // 16)


def test_many_rows_take_the_weight_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into outputs beside others, the last piece shorter; columns in an order of their own."""
    from streamer.kernels.gpu.linear import many_rows

    weight = made(70, 200, **FORMS["6 bits, offsets, groups of 16, order"])
    bias = torch.randn(70, generator=torch.Generator().manual_seed(9))
    x = torch.randn(129, 200, generator=torch.Generator().manual_seed(1))
    exact = F.linear(x.double(), dequantize(weight).double(), bias.double())
    linear = packed(device, [weight], bias, dtype=torch.float32)
    monkeypatch.setattr(many_rows, "PIECE_BYTES", 32 * 200 * 4)
    sizes: list[int] = []
    widen = type(linear._parts[0].codes).widen

    def noted(codes: Any, first: int, out: torch.Tensor) -> None:
        sizes.append(len(out))
        widen(codes, first, out)

    monkeypatch.setattr(type(linear._parts[0].codes), "widen", noted)
    out = torch.full((129, 90), 7.0, device=device)
    linear._parts[0].multiply(x.to(device), bias.to(device), out[:, 10:80], is_added=False)
    assert sizes == [32, 32, 6]
    close(out[:, 10:80], exact)
    assert bool((out[:, :10] == 7.0).all() & (out[:, 80:] == 7.0).all())
    close(linear(x.to(device), add_to=out[:, 10:80]), 2 * exact)


def test_scales_are_halved_where_no_bit_counts(device: str) -> None:
    from streamer.kernels.gpu.linear.codes import Codes

    weight = made(8, 64, **FORMS["4 bits, offsets, groups of 128"])
    weight = replace(weight, offsets=-weight.scales * 7)
    halved = Codes([weight], torch.bfloat16)
    assert halved.scales.dtype is halved.offsets.dtype is torch.float16
    assert Codes([weight], torch.float32).scales.dtype is torch.float32
    far = replace(weight, offsets=-weight.scales * 99)
    assert Codes([far], torch.bfloat16).offsets.dtype is torch.float32
    tiny = replace(weight, scales=weight.scales * 1e-6)
    assert Codes([tiny], torch.bfloat16).scales.dtype is torch.float32
    close(packed(device, [tiny], is_table=True, dtype=torch.float32)
          .rows(torch.arange(8, device=device)), dequantize(tiny).double())  # fmt: skip


@pytest.mark.parametrize("form", ["dense", "e4m3, a row"])
def test_two_rows_go_into_a_slice_of_wider_outputs(
    device: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Beside which nothing is written."""
    from streamer.kernels.gpu.linear import fp8
    from streamer.kernels.gpu.linear.dense import Dense

    monkeypatch.setattr(fp8, "has_products", lambda device: True)
    weight = made(48, 128, **FORMS["e4m3, a row"])
    exact_weight = dequantize(weight).double()
    part: Any
    if form == "dense":
        exact_weight = exact_weight.bfloat16().double()
        part = Dense(exact_weight.bfloat16().to(device))
    else:
        (part,) = packed(device, [weight], dtype=torch.bfloat16)._parts
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = torch.full((2, 64), 7.0, dtype=torch.bfloat16, device=device)
    part.multiply(x.to(device), None, wide[:, 8:56], is_added=False)
    close(wide[:, 8:56].cpu(), F.linear(x.double(), exact_weight), 2.0**-7)
    assert bool((wide[:, :8] == 7).all() & (wide[:, 56:] == 7).all())


def test_fp8_products_where_the_device_has_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x is quantized for each token: within e4m3's own rounding, a row by itself. One row or two
    are multiplied as they are."""
    from streamer.kernels.gpu.linear import fp8

    monkeypatch.setattr(fp8, "has_products", lambda device: True)
    weight = made(48, 128, **FORMS["e4m3, a row"])
    bias = torch.ones(48).bfloat16()
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[2] *= 1000
    linear = packed(device, [weight, weight], torch.cat([bias, bias]), dtype=torch.bfloat16)
    assert [type(part).__name__ for part in linear._parts] == ["Fp8"]
    exact = F.linear(x.double(), dequantize(weight).double(), bias.double()).repeat(1, 2)
    y = linear(x.to(device)).cpu()
    for row in range(5):
        close(y[row], exact[row], 2.0**-4)
    assert torch.equal(linear(x[2:].to(device)).cpu()[1], y[3])
    for few in (x[3:4], x[1:3]):
        exact = F.linear(few.double(), dequantize(weight).double(), bias.double()).repeat(1, 2)
        close(linear(few.to(device)).cpu(), exact, 2.0**-7)  # the interpreter cuts bits off
    total = torch.zeros(5, 96, dtype=torch.bfloat16, device=device)
    assert torch.equal(linear(x.to(device), add_to=total).cpu(), y)
    codes, scales = fp8.quantize_rows(x.to(device))
    error = (codes.cpu().double() * scales.cpu().double() - x.double()).abs()
    assert bool((error <= 2.0**-4 * x.double().abs() + scales.cpu() * 2.0**-10).all())
    odd = replace(weight, codes=weight.codes[:, :100].contiguous(), group=100)
    assert not fp8.can_multiply(odd, torch.bfloat16)
    assert not fp8.can_multiply(weight, torch.float16)

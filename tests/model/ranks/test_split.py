"""Splitting a decoder: every row and column is one rank's, groups stay whole, sums are exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamer.errors import ConfigError
from streamer.kernels import reference as kernels
from streamer.kernels.weights import QuantizedWeight, columns_of, dequantize, rows_of
from streamer.model.checkpoint import TensorEntry, open_checkpoint
from streamer.model.families import DecoderConfig, parse_config
from streamer.model.files import WeightFiles
from streamer.model.loader import FileSource, check_tensors, load_decoder
from streamer.model.ranks import group as tested
from streamer.model.ranks.group import LOOPBACK, Group, Seat
from streamer.model.ranks.linear import Shared
from streamer.model.ranks.split import PartSource, spans, split
from streamer.model.ranks.store import FirstStore
from streamer.model.runner.device import CPU
from tests.checkpoints import reference_logits
from tests.model.hand import paged_logits
from tests.model.test_decoder import random_tokens


def llama(**changes: Any) -> DecoderConfig:
    sizes = {"vocab_size": 1000, "hidden_size": 4096, "intermediate_size": 14336}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
    fields = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    return parse_config({**fields, **sizes, **heads, **changes})


@pytest.mark.parametrize(("total", "count", "unit"), [(10, 3, 1), (96, 4, 16), (7, 7, 1)])
def test_spans_cover_everything_once(total: int, count: int, unit: int) -> None:
    found = spans(total, count, unit)
    assert [i for span in found for i in range(*span)] == list(range(total))
    assert max(s.size for s in found) - min(s.size for s in found) <= unit
    assert all(span.start % unit == 0 for span in found)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 32])
def test_parts_of_a_real_size(count: int) -> None:
    """Columns begin at whole groups of 256; with more ranks than KV heads, ranks share one."""
    whole = llama()
    parts = split(whole, count)
    for name, total in (("heads", 32), ("inner", 14336), ("vocab", 1000)):
        found = [getattr(part, name) for part in parts]
        assert [i for span in found for i in range(*span)] == list(range(total))
    for part in parts:
        assert part.inner.start % 256 == 0
        assert [h // 4 for h in range(*part.heads)] == [
            kv for kv in range(*part.kv_heads) for _ in range(part.heads.size // part.kv_heads.size)
        ]
        if count <= 8:
            assert part.heads.start * whole.head_dim % 256 == 0
        assert part.config.num_heads % part.config.num_kv_heads == 0
    assert sum(part.share for part in parts) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("count", "heads", "kv"), [(9, 32, 8), (12, 32, 8), (64, 32, 8), (3, 4, 2)]
)
def test_what_can_not_be_split_is_refused(count: int, heads: int, kv: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {count}: .* heads"):
        split(llama(num_attention_heads=heads, num_key_value_heads=kv), count)


def codes(n: int, k: int, group: int) -> QuantizedWeight:
    groups = -(-k // group)
    return QuantizedWeight(
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        torch.rand(n, groups) + 0.5,
        group,
        4,
        zero=8,
        offsets=torch.rand(n, groups),
    )


@pytest.mark.parametrize(("k", "group"), [(128, 32), (100, 32), (64, 64)])
def test_parts_of_codes_are_parts_of_the_numbers(k: int, group: int) -> None:
    weight = codes(6, k, group)
    whole = dequantize(weight)
    assert torch.equal(dequantize(rows_of(weight, 2, 5)), whole[2:5])
    cut = group if group < k else 16
    for start, end in ((0, cut), (cut, k)):
        assert torch.equal(dequantize(columns_of(weight, start, end)), whole[:, start:end])


def test_a_cut_group_and_permuted_columns_are_refused() -> None:
    permuted = codes(2, 128, 32)
    object.__setattr__(permuted, "permutation", torch.randperm(128))
    for weight, end in ((codes(2, 128, 32), 16), (permuted, 32)):
        with pytest.raises(ValueError, match=f"columns 0 to {end} are no whole groups of 32"):
            columns_of(weight, 0, end)


def on_ranks(count: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` returns on each of `count` ranks, which are threads here."""
    found: list[Any] = [None] * count
    store = FirstStore(10.0)

    def run(index: int) -> None:
        group = Group(Seat(index, count, count, LOOPBACK), store)
        try:
            found[index] = work(group)
        finally:
            group.leave()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("split_from", [1 << 20, 9], ids=["whole", "in parts"])
def test_sums_and_gathers_are_the_same_everywhere_and_in_order(
    monkeypatch: pytest.MonkeyPatch, split_from: int
) -> None:
    monkeypatch.setattr(tested, "SPLIT_FROM", split_from)
    parts = [torch.randn(5, 7, generator=torch.manual_seed(i)).bfloat16() for i in range(4)]
    sizes = [7, 7, 7, 3]

    def work(group: Group) -> Any:
        mine = parts[group.index]
        total = group.sum(mine.clone())
        whole = group.concatenate(mine[:, : sizes[group.index]], sizes)
        row = group.sum(mine[2:3].clone())
        return total, whole, row, group.minima((group.index + 3, -group.index))

    exact = (((parts[0].float() + parts[1]) + parts[2]) + parts[3]).bfloat16()
    for total, whole, row, minima in on_ranks(4, work):
        assert torch.equal(total, exact)
        assert torch.equal(row, total[2:3]), "a row's sum depends on the others"
        assert torch.equal(whole, torch.cat([parts[0], parts[1], parts[2], parts[3][:, :3]], 1))
        assert minima == [3, -3]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"num_key_value_heads": 4}),
    ("qwen2", {"vocab_size": 251, "intermediate_size": 80}),
    ("qwen3", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=[v[0] for v in VARIANTS])
def test_logits_of_every_family_are_transformers(
    checkpoint: Any, reference: Any, family: str, overrides: Any, count: int
) -> None:
    """On every rank, to the last bit the same: heads, vocabulary and columns that do not divide."""
    folder = checkpoint(family, 1, **overrides)
    tokens = [t % 251 for t in random_tokens(60)]
    opened = open_checkpoint(folder)

    def work(group: Group) -> torch.Tensor:
        shared = Shared(parse_config(opened.config), group)
        model = load_decoder(kernels, opened, shared, torch.float32)
        return paged_logits(model, tokens, cuts=(23,))

    found = on_ranks(count, work)
    assert all(torch.equal(each, found[0]) for each in found)
    want = reference_logits(reference(folder), tokens)
    assert (found[0] - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_matrices_are_split_after_they_are_made(checkpoint: Any, kind: str) -> None:
    """So that they have the codes of the whole matrix."""
    folder = checkpoint("llama", 2, intermediate_size=128)
    opened = open_checkpoint(folder, kind)
    tokens = random_tokens(30)
    config = parse_config(opened.config)
    want = paged_logits(load_decoder(kernels, opened, config, torch.float32), tokens)

    def work(group: Group) -> torch.Tensor:
        model = load_decoder(kernels, opened, Shared(config, group), torch.float32)
        return paged_logits(model, tokens)

    for found in on_ranks(2, work):
        assert (found - want).abs().max() < 1e-4


def test_rows_of_a_dense_matrix_are_all_that_is_read(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks read each matrix that is split by rows once, together."""
    opened = open_checkpoint(checkpoint("llama", 1))
    config = parse_config(opened.config)
    sizes: dict[str, int] = {}
    read = WeightFiles.read

    def counted(self: WeightFiles, entry: TensorEntry) -> torch.Tensor:
        sizes[entry.name] = sizes.get(entry.name, 0) + entry.end - entry.start
        return read(self, entry)

    monkeypatch.setattr(WeightFiles, "read", counted)
    matrices = check_tensors(opened, config)
    parts = split(config, 2)
    for index in range(2):
        with FileSource(opened, matrices, torch.float32, CPU, lambda: None) as files:
            source = PartSource(files, parts, index)
            for module in matrices:
                source.weight(module)
    for name, entry in opened.tensors.items():
        if name.endswith("weight") and "norm" not in name:
            count = 2 if "o_proj" in name or "down_proj" in name else 1
            assert sizes[name] == count * (entry.end - entry.start), name

"""Which part of a decoder each rank computes, and a WeightSource that reads that part.

As in Megatron-LM (Shoeybi et al. 2019): queries, keys, values, gates and ups by rows of their
matrices, what follows them by columns, embedding and head by tokens of the vocabulary. Rows are
split at whole heads, and at whole groups of quantized columns, so parts may differ in size. Pure;
called by load.py, and by decoder.py for the layers of linear.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec.structs import replace

from streamer.errors import ConfigError
from streamer.kernels.weights import Weight, columns_of, has_columns, rows_of
from streamer.model.families import DecoderConfig
from streamer.model.layers import WeightSource

# Columns that a part begins at, so that it has whole groups: as many as the matrix allows.
UNITS = (256, 128, 64, 32, 16, 1)
FIELD = "tensor_parallel_size"


class Span(NamedTuple):
    """Indices from start up to end."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def times(self, count: int) -> Span:
        """Of things of which each of these has `count`."""
        return Span(self.start * count, self.end * count)


def spans(total: int, count: int, unit: int = 1) -> list[Span]:
    """`total` indices in `count` parts of whole units, which differ by a unit at most."""
    each, more = divmod(total // unit, count)
    sizes = [unit * (each + (i < more)) for i in range(count)]
    ends = list(itertools.accumulate(sizes))
    return [Span(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def split(config: DecoderConfig, count: int) -> list[Part]:
    """What each of `count` ranks computes; ConfigError where there is too little to share."""
    group = config.num_heads // config.num_kv_heads
    if count > config.num_kv_heads:
        if count % config.num_kv_heads or config.num_heads % count:
            raise _unfit(config, count, "heads", config.num_heads)
        heads = spans(config.num_heads, count)
        kv = [Span(h.start // group, h.start // group + 1) for h in heads]
    else:
        kv = spans(config.num_kv_heads, count, _unit(config.num_kv_heads, count, group, config))
        heads = [part.times(group) for part in kv]
    unit = next(u for u in UNITS if config.intermediate_size % u == 0 and _has(config, u, count))
    inner = spans(config.intermediate_size, count, unit)
    vocab = spans(config.vocab_size, count)
    if min(part.size for part in (*inner, *vocab)) < 1:
        raise _unfit(config, count, "intermediate_size", config.intermediate_size)
    hidden = spans(config.hidden_size, count, 16 if config.hidden_size >= 16 * count else 1)
    return [Part(config, *found) for found in zip(heads, kv, inner, vocab, hidden, strict=True)]


def _has(config: DecoderConfig, unit: int, count: int) -> bool:
    return unit == 1 or config.intermediate_size // unit >= count


def _unit(kv_heads: int, count: int, group: int, config: DecoderConfig) -> int:
    """KV heads that stay together: their queries' columns are whole groups, where that leaves
    some for every rank."""
    for columns in UNITS:
        for together in range(1, kv_heads // count + 1):
            if kv_heads % together == 0 and together * group * config.head_dim % columns == 0:
                return together
    return 1


def _unfit(config: DecoderConfig, count: int, name: str, size: int) -> ConfigError:
    return ConfigError(
        f"{FIELD} {count}: {config.architecture} has {size} {name}, with {config.num_kv_heads} "
        "KV heads, which can't be split so",
        param=FIELD,
    )


class Part(NamedTuple):
    """One rank's part of a decoder: its heads, KV heads, feed-forward columns and tokens; `hidden`:
    its rows of a matrix whose columns can't be divided."""

    whole: DecoderConfig
    heads: Span
    kv_heads: Span
    inner: Span
    vocab: Span
    hidden: Span

    @property
    def config(self) -> DecoderConfig:
        """The decoder that has this part alone; its vocabulary stays whole."""
        return replace(
            self.whole,
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.inner.size,
        )

    @property
    def share(self) -> float:
        """About the part of all matrices that it has."""
        return self.inner.size / self.whole.intermediate_size

    def rows(self, module: str) -> Span | None:
        """The rows of a module's matrix; None: all."""
        dim, name = self.whole.head_dim, module.rpartition(".")[2]
        known = {
            "q_proj": self.heads.times(dim),
            "k_proj": self.kv_heads.times(dim),
            "v_proj": self.kv_heads.times(dim),
            "gate_proj": self.inner,
            "up_proj": self.inner,
            "embed_tokens": self.vocab,
            "lm_head": self.vocab,
        }
        return known.get(name)

    def columns(self, module: str) -> Span | None:
        """The columns of a module's matrix; None: all."""
        name = module.rpartition(".")[2]
        known = {"o_proj": self.heads.times(self.whole.head_dim), "down_proj": self.inner}
        return known.get(name)


class RowSource(WeightSource, Protocol):
    """A WeightSource that can read some rows of a matrix."""

    def rows(self, module: str, start: int, end: int) -> Weight:
        """Rows of `weight` from `start` up to `end`, in memory of their own."""
        ...


class PartSource:
    """A decoder's WeightSource that has a part's rows and columns of another one's matrices.

    Of a matrix split by rows the source reads what it must; one split by columns is whole for as
    long as it takes to read it. Where its quantization does not let columns be divided, on some
    rank, it is split by rows on all. The bias of a sum over ranks is the first rank's, and zeros
    elsewhere.
    """

    def __init__(self, source: RowSource, parts: Sequence[Part], index: int) -> None:
        self.dtype = source.dtype
        self.device = source.device
        self._source = source
        self._parts = parts
        self._part = parts[index]
        self._is_first = index == 0
        self._undivided: set[str] = set()  # modules

    def take(self, name: str) -> torch.Tensor:
        """See layers.WeightSource."""
        found = self._source.take(name)
        module, _, kind = name.rpartition(".")
        if kind != "bias":
            return found
        if module in self._undivided:
            return found[slice(*self._part.hidden)].clone()
        if self._part.columns(module) is not None:
            return found if self._is_first else torch.zeros_like(found)
        rows = self._part.rows(module)
        return found if rows is None else found[rows.start : rows.end].clone()

    def weight(self, module: str) -> Weight:
        """See layers.WeightSource."""
        rows, columns = self._part.rows(module), self._part.columns(module)
        if rows is not None:
            return self._source.rows(module, *rows)
        found = self._source.weight(module)
        if columns is None:
            return found
        of_all = [part.columns(module) for part in self._parts]
        if all(has_columns(found, *span) for span in of_all if span is not None):
            return columns_of(found, *columns)
        self._undivided.add(module)
        return rows_of(found, *self._part.hidden)

    def layer_done(self) -> None:
        """See layers.WeightSource."""
        self._source.layer_done()

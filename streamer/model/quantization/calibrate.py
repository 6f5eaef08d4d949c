"""int4 with its errors compensated on a text: GPTQ (Frantar and others, 2023), a layer at a time.

Calibration runs the decoder's layers over the tokens, each first as it is stored, to see the inputs
of its matrices, then quantized, so that later layers see what they will see. Called by write.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from streamer.errors import ConfigError, ModelNotSupported
from streamer.kernels import ops
from streamer.kernels.weights import QuantizedWeight, dequantize
from streamer.model.decoder import DecoderLayer
from streamer.model.families import DecoderConfig
from streamer.model.layers import RopeTable, Step, WeightSource
from streamer.model.memory import num_cores
from streamer.model.quantization.on_the_fly import LEVELS, fit, in_parallel

SEQUENCE = 512  # tokens that see each other
MAX_TOKENS = 1 << 16  # of a calibration; what comes after is not read
MIN_TOKENS = 2048
BLOCK = 16
DAMPING = 0.01  # of the mean of the diagonal, added to it


class Calibration:
    """The hidden states of a text between two layers; each call of `layer` takes them on by one."""

    def __init__(
        self,
        kernels: ops.Backend,
        config: DecoderConfig,
        source: WeightSource,
        tokens: list[int],
    ) -> None:
        if len(tokens) < MIN_TOKENS:
            raise ConfigError(
                f"calibration: {len(tokens)} tokens, at least {MIN_TOKENS} say something",
                param="calibration",
            )
        kernels.set_threads(num_cores())
        self._kernels = kernels
        self._config = config
        self._source = source
        self._rope = RopeTable(kernels, config.rope, source.dtype)
        self._pool = kernels.new_pool(
            SEQUENCE // BLOCK, 1, BLOCK, config.num_kv_heads, config.head_dim, source.dtype
        )
        table = source.take("model.embed_tokens.weight")
        whole = torch.tensor(tokens[: min(len(tokens), MAX_TOKENS) // SEQUENCE * SEQUENCE])
        if (largest := int(whole.max())) >= len(table):
            raise ConfigError(
                f"calibration: the tokenizer makes token {largest} of the text, the model has a "
                f"vocab_size of {len(table)}",
                param="calibration",
            )
        self._hidden = [table[part].contiguous() for part in whole.view(-1, SEQUENCE)]

    def layer(
        self, index: int, modules: list[str], scale_dtype: torch.dtype, group: int
    ) -> dict[str, QuantizedWeight]:
        """The matrices of a layer in int4; the layers before it must have been asked for."""
        seen = _Seen(self._kernels, self._source)
        before = [hidden.clone() for hidden in self._hidden]
        self._run(index, cast(ops.Backend, seen), seen)
        made = {}
        known: dict[int, torch.Tensor] = {}
        for module in modules:
            gram = seen.grams[module]
            if id(gram) not in known:  # q, k and v see the same, and so do gates and ups
                known[id(gram)] = _factor(module, gram)
            weight = self._source.take(f"{module}.weight")
            factor = known[id(gram)]
            made[module] = compensated(weight, gram.diagonal(), factor, scale_dtype, group)
        self._hidden = before
        self._run(index, self._kernels, _Replaced(self._source, made))
        return made

    def _run(self, index: int, kernels: ops.Backend, source: WeightSource) -> None:
        """Take the hidden states through a layer."""
        layer = DecoderLayer(kernels, self._config, index, source)
        positions = torch.arange(SEQUENCE)
        batch = ops.AttentionBatch.of_row(torch.arange(SEQUENCE // BLOCK), 0, SEQUENCE, BLOCK)
        step = Step(batch, positions, self._rope.up_to(SEQUENCE))
        pool = ops.layer_view(self._pool, 0)
        for hidden in self._hidden:
            layer(hidden, pool, step)


class _Seen:
    """Kernels and source of a layer whose matrices sum up what they are multiplied by.

    grams: sum of x x^T over the tokens, by module
    """

    def __init__(self, kernels: ops.Backend, source: WeightSource) -> None:
        self._kernels = kernels
        self._source = source
        self._asked: list[str] = []
        self.dtype, self.device = source.dtype, source.device
        self.grams: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def take(self, name: str) -> torch.Tensor:
        return self._source.take(name)

    def weight(self, module: str) -> ops.Weight:
        self._asked.append(module)
        return self._source.weight(module)

    def layer_done(self) -> None:
        self._source.layer_done()

    def pack_weight(self, parts: list[ops.Weight], *args: Any, **kwargs: Any) -> _Summing:
        linear = self._kernels.pack_weight(parts, *args, **kwargs)
        gram = torch.zeros(linear.shape[1], linear.shape[1])
        self.grams.update(dict.fromkeys(self._asked, gram))
        self._asked.clear()
        return _Summing(linear, gram)


class _Summing:
    """A Linear that adds its inputs' products to `gram`."""

    def __init__(self, linear: ops.Linear, gram: torch.Tensor) -> None:
        self._linear = linear
        self._gram = gram

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        self._gram.addmm_(wide.t(), wide)
        return self._linear(x, add_to=add_to)


class _Replaced:
    """A source with the matrices of a layer as they will be read."""

    def __init__(self, source: WeightSource, made: Mapping[str, QuantizedWeight]) -> None:
        self._source = source
        self._made = made
        self.dtype, self.device = source.dtype, source.device

    def take(self, name: str) -> torch.Tensor:
        return self._source.take(name)

    def weight(self, module: str) -> ops.Weight:
        if module in self._made:
            return dequantize(self._made[module]).to(self.dtype)
        return self._source.weight(module)

    def layer_done(self) -> None:
        self._source.layer_done()


def compensated(
    weight: torch.Tensor,
    importance: torch.Tensor,
    factor: torch.Tensor,
    scale_dtype: torch.dtype,
    group: int,
) -> QuantizedWeight:
    """A matrix [N, K] in int4, column by column: what a column loses, those after it make up for,
    as far as their inputs go together.

    importance  [K], mean squares of the inputs, up to a factor
    factor      factor_of the inputs' gram
    """
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales, zeros = torch.empty(n, k // group), torch.empty(n, k // group)

    def rows(first: int, last: int) -> None:
        left = weight[first:last].float().t().contiguous()  # columns side by side
        for index, column in enumerate(range(0, k, group)):
            end = column + group
            part, lost = left[column:end], torch.empty(group, last - first)
            weights = importance[column:end] / importance[column:end].mean().clamp(min=1e-30)
            scale, zero = fit(part, scale_dtype, weights.unsqueeze(1))
            scales[first:last, index], zeros[first:last, index] = scale, zero
            corner = factor[column:end, column:end]
            for i in range(group):
                found = (part[i] / scale).add_(zero).round_().clamp_(0, LEVELS)
                lost[i] = (part[i] - (found - zero) * scale) / corner[i, i]
                part[i + 1 :].addr_(corner[i, i + 1 :], lost[i], alpha=-1)
                part[i] = found
            codes[first:last, column:end] = part.t()
            left[end:].addmm_(factor[column:end, end:].t(), lost, alpha=-1)

    in_parallel(rows, n, -(-n // num_cores()))
    return QuantizedWeight(codes, scales, group, 4, zeros=zeros.to(torch.uint8))


def _factor(module: str, gram: torch.Tensor) -> torch.Tensor:
    """factor_of the gram of a module's inputs; ModelNotSupported where there is none."""
    if not bool(gram.isfinite().all()):
        raise _unfit(module, "are so large that their squares are infinite, or are NaN")
    try:
        return factor_of(gram)
    except torch.linalg.LinAlgError as e:  # type: ignore[attr-defined]
        raise _unfit(module, f"have sums of products without a Cholesky factor: {e}") from e


def _unfit(module: str, why: str) -> ModelNotSupported:
    says = f"{module}: its inputs on the calibration's text {why}"
    return ModelNotSupported(f"{says}; without a calibration they don't matter", param="model")


def factor_of(gram: torch.Tensor) -> torch.Tensor:
    """The upper triangle U of which U^T U is the inverse of the damped gram [K, K]."""
    damped = gram.double()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean().clamp(min=1e-30)
    # The Cholesky factor of the gram from its last row up is R with R R^T, and U its inverse.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        upper, torch.eye(len(gram), dtype=torch.float64), upper=True
    )
    return inverse.float()

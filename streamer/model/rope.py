"""Rotary embedding variants: the config fields, old and new, and their inverse frequencies.

Owns RopeConfig and the arithmetic (default, linear, dynamic, llama3, yarn, factors). The rotation
itself is a kernel. Called by families.py and layers.py.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from streamer.errors import ModelNotSupported
from streamer.model.fields import MAX_SIZE, Fields

DEFAULT_THETA = 10_000.0
MAX_DIM = 1 << 16  # of a head; models have 32 to 512
PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
SCALED = PLAIN | {"factor", "original_max_position_embeddings"}
KNOWN_FIELDS: dict[str, set[str]] = {
    "default": SCALED,
    "linear": SCALED,
    "dynamic": SCALED | {"max_position_embeddings"},
    "llama3": SCALED | {"low_freq_factor", "high_freq_factor"},
    "factors": PLAIN | {"factors"},
    "yarn": SCALED
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rotary embedding. Fields that a kind does not use keep their defaults.

    dim               rotated dimensions of a head
    limit             longest context in tokens that it is defined for
    attention_factor  scales cos and sin (YaRN)
    factors           what each frequency is divided by, dim / 2 of them (GGUF's llama3)
    """

    kind: str = "default"
    dim: int
    theta: float = DEFAULT_THETA
    limit: int
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 4's rope_scaling and rope_theta, or 5's rope_parameters, as one dict."""
    chosen = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(chosen, dict):
        raise ModelNotSupported(f"rope_scaling must be an object, not {chosen!r}", param="rope")
    fields = {k: v for k, v in chosen.items() if v is not None}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in fields and config.get(name) is not None:
            fields[name] = config[name]
    return fields


def rope_kind(fields: dict[str, Any]) -> str:
    """The variant's name; "type" is the field's old name."""
    return str(fields.get("rope_type", fields.get("type", "default")))


def parse_rope(config: dict[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """The rotary embedding of a config.json, or ModelNotSupported naming type or field."""
    fields = rope_fields(config)
    if nested := sorted(k for k, v in fields.items() if isinstance(v, dict)):
        raise ModelNotSupported(
            f"rope parameters per layer type: {', '.join(nested)}", param="rope_parameters"
        )
    kind = rope_kind(fields)
    if kind not in KNOWN_FIELDS:
        raise ModelNotSupported(
            f"rope type {kind!r} is not one of {', '.join(KNOWN_FIELDS)}", param="rope_type"
        )
    if unknown := sorted(fields.keys() - KNOWN_FIELDS[kind]):
        raise ModelNotSupported(
            f"rope type {kind!r} does not know {', '.join(unknown)}", param="rope_scaling"
        )
    read = Fields(fields, "rope_scaling")
    if read.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelNotSupported(
            f"partial_rotary_factor {fields['partial_rotary_factor']} needs another family",
            param="partial_rotary_factor",
        )
    if head_dim % 2:
        raise ModelNotSupported(f"head_dim {head_dim} is odd", param="head_dim")
    if head_dim > MAX_DIM:
        raise ModelNotSupported(
            f"head_dim {head_dim}: heads can have at most {MAX_DIM} elements", param="head_dim"
        )
    plain = RopeConfig(dim=head_dim, theta=read.number("rope_theta", DEFAULT_THETA), limit=0)
    scaled = _scaled(plain, kind, read, config, max_positions)
    if scaled.limit > MAX_SIZE:
        raise ModelNotSupported(
            f"rope_scaling makes a context of {scaled.limit} tokens, at most {MAX_SIZE} can be",
            param="rope_scaling",
        )
    if not _is_finite(scaled):
        raise _not_finite(scaled)
    return scaled


def _is_finite(rope: RopeConfig) -> bool:
    """Whether every angle up to the limit is a number; every logit is NaN where one is not."""
    try:
        angles = inverse_frequencies(rope) * rope.limit
    except ArithmeticError:
        return False
    return bool(angles.isfinite().all())


def _not_finite(rope: RopeConfig) -> ModelNotSupported:
    """The error that names the field without which angles were finite."""
    what = "rotary angles that are not finite numbers"
    plain = RopeConfig(dim=rope.dim, limit=rope.limit)
    for name in ("theta", "factor", "beta_fast", "beta_slow", "low_freq_factor"):
        if _is_finite(msgspec.structs.replace(rope, **{name: getattr(plain, name)})):
            field = "rope_theta" if name == "theta" else name
            why = f"{field} {getattr(rope, name)} gives {what}"
            return ModelNotSupported(f"rope type {rope.kind!r}: {why}", param=field)
    field = "factors" if rope.kind == "factors" else "rope_scaling"
    return ModelNotSupported(f"rope type {rope.kind!r}: {field} gives {what}", param=field)


def _scaled(
    plain: RopeConfig, kind: str, read: Fields, config: dict[str, Any], max_positions: int
) -> RopeConfig:
    replace = msgspec.structs.replace
    if kind == "default":
        return replace(plain, limit=max_positions)
    if kind == "factors":
        factors = read.numbers("factors", plain.dim // 2)
        return replace(plain, kind=kind, factors=factors, limit=max_positions)
    factor = read.number_or_none("factor")
    if kind == "dynamic":
        # Beyond max_position_embeddings its frequencies depend on the longest context so far,
        # so that K already cached would be wrong, and on the other rows of the batch. Up to
        # there it is the plain embedding, so that is the limit.
        return replace(plain, kind=kind, factor=factor or 1.0, limit=max_positions)
    original = read.size(
        "original_max_position_embeddings",
        Fields(config, "config").size("original_max_position_embeddings", max_positions),
    )
    if factor is None and kind == "yarn":
        factor = max_positions / original
    if factor is None:
        factor = read.number("factor")
    if kind == "yarn":
        return replace(
            plain,
            kind=kind,
            factor=factor,
            original=original,
            beta_fast=read.number("beta_fast", 32.0),
            beta_slow=read.number("beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(factor, read),
            truncate=read.flag("truncate", True),
            limit=max(max_positions, int(original * factor)),
        )
    if kind == "linear":
        return replace(
            plain, kind=kind, factor=factor, limit=max(max_positions, int(original * factor))
        )
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    if low >= high:
        raise ModelNotSupported(
            f"low_freq_factor {low} must be below high_freq_factor {high}", param="low_freq_factor"
        )
    return replace(
        plain,
        kind=kind,
        factor=factor,
        original=original,
        low_freq_factor=low,
        high_freq_factor=high,
        limit=max_positions,
    )


def _yarn_attention_factor(factor: float, read: Fields) -> float:
    stated = read.number_or_none("attention_factor")
    if stated is not None:
        return stated
    mscale, mscale_all = read.number_or_none("mscale"), read.number_or_none("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[dim / 2] fp32: radians a position, fastest first.

    In fp32 throughout, as models were trained: at position 100,000 a better rounded frequency is
    already another angle.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, between them a blend."""
    turns = rope.original / (2 * math.pi / plain)  # over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - kept) * plain / rope.factor + kept * plain
    slow = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blend)
    return torch.where(turns > rope.high_freq_factor, plain, slow)


def _yarn(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (Peng et al. 2023): dimensions that turn often are kept, slow ones stretched."""

    def dimension(turns: float) -> float:
        """The dimension pair that makes `turns` turns over the original context."""
        waves = rope.original / (turns * 2 * math.pi)
        return rope.dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001  # a step instead of a ramp
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)

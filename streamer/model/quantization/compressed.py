"""compressed-tensors' quantization_config: groups of targets -> the scheme of each module.

Reads no tensor; called by schemes.py. Names and classes are matched as the package does: a target
is a module's name, `re:` and a pattern for the beginning of its name, or its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamer.model.quantization.float4 import Mxfp4, Nvfp4
from streamer.model.quantization.interface import DENSE, Scheme
from streamer.model.quantization.reading import (
    MAX_PATTERNS,
    Pattern,
    Patterns,
    block,
    fields,
    group_size,
    names,
    refused,
)
from streamer.model.quantization.scaled import Grid, Numbers, Packed

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
)


def class_of(module: str) -> str:
    """torch's class of one of a decoder's matrices."""
    return "Embedding" if module.endswith("embed_tokens") else "Linear"


def parse_compressed(given: dict[str, Any]) -> Callable[[str], Scheme]:
    """The scheme of each module."""
    for name in ("sparsity_config", "transform_config"):
        if _changes_the_weights(given.get(name)):
            raise refused(name, given[name], "empty: sparse or rotated weights are not known")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused("config_groups", groups, "an object with a group")
    if len(groups) > MAX_PATTERNS:
        raise refused("config_groups", f"{len(groups)} groups", f"at most {MAX_PATTERNS}")
    whole = fields(given).text("format", "")
    patterns = Patterns()
    named: dict[str, Scheme] = {}  # by a module's name or its class
    matched: list[tuple[Pattern, Scheme]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise refused(f"config_groups.{name}", group, "an object")
        scheme = _scheme(group, f"config_groups.{name}", whole)
        texts = names(group.get("targets"), f"config_groups.{name}.targets")
        found, exact = _parted(texts, "targets", patterns)
        matched += [(pattern, scheme) for pattern in found]
        for text in exact:
            named.setdefault(text, scheme)
    ignored, ignored_names = _parted(names(given.get("ignore"), "ignore"), "ignore", patterns)

    def rule(module: str) -> Scheme:
        kind = class_of(module)
        if not ignored_names.isdisjoint((module, kind)) or any(p.matches(module) for p in ignored):
            return DENSE
        if module in named:  # a name comes before a pattern, a pattern before a class
            return named[module]
        of_class = named.get(kind, DENSE)
        return next((scheme for p, scheme in matched if p.matches(module)), of_class)

    return rule


def _changes_the_weights(config: Any) -> bool:
    if not isinstance(config, dict):
        return bool(config)
    if "config_groups" in config:  # of transforms
        return bool(config["config_groups"])
    return bool(config.get("format", "dense") != "dense")


def _parted(
    texts: list[str], field: str, patterns: Patterns
) -> tuple[list[Pattern], frozenset[str]]:
    """What strings of targets or ignore stand for: patterns, and names of modules and classes."""
    found = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
    exact = frozenset(text for text in texts if not text.startswith("re:"))
    return patterns.compiled(found, field), exact


def _scheme(group: dict[str, Any], where: str, whole: str) -> Scheme:
    """The scheme of a group whose format may be that of the whole checkpoint."""
    weights = group.get("weights")
    if weights is None:
        return DENSE
    if not isinstance(weights, dict):
        raise refused(f"{where}.weights", weights, "an object")
    form = group.get("format") or whole
    if form not in FORMATS:
        raise refused("format", form, f"one of {', '.join(FORMATS)}")
    read = fields(weights)
    bits, kind = read.size("num_bits", 8), read.text("type", "int").lower()
    is_symmetric = read.flag("symmetric", True)
    if weights.get("dynamic") not in (None, False):
        raise refused("weights.dynamic", weights["dynamic"], "false")
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        size = 16 if form.startswith("nv") else 32
        if (kind, bits, weights.get("group_size"), is_symmetric) != ("float", 4, size, True):
            raise refused("weights", weights, f"symmetric floats of 4 bits in groups of {size}")
        return Nvfp4(is_modelopt=False) if size == 16 else Mxfp4(has_blocks=False)
    if form == "dense":
        return DENSE
    grid = _grid(weights)
    if kind == "float":
        if bits != 8 or not is_symmetric or form in ("pack-quantized", "int-quantized"):
            raise refused("weights", weights, f"integers, or symmetric floats of 8 bits, in {form}")
        return Numbers("compressed-tensors FP8", True, (grid,))
    if kind != "int" or form in ("float-quantized", "mxfp8-quantized"):
        raise refused("weights.type", kind, f"one that {form} has")
    if not 2 <= bits <= 8:
        raise refused("weights.num_bits", bits, "2 to 8")
    if form != "pack-quantized":
        label = f"compressed-tensors, {bits} bits"
        return Numbers(label, False, (grid,), bits, has_zeros=not is_symmetric)
    if not is_symmetric and grid.rows != 1:
        raise refused("weights.symmetric", False, "true unless strategy is group or channel")
    has_order = weights.get("actorder") in ("group", "dynamic", True)
    return Packed(bits, grid, not is_symmetric, has_order)


def _grid(weights: dict[str, Any]) -> Grid:
    """What a scale is for, by strategy, or where that is absent by group_size."""
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return Grid(-1, -1)
    if strategy == "channel":
        return Grid(1, -1)
    if strategy == "group":
        return Grid(1, group_size(size))
    if strategy == "block":
        return block(weights.get("block_structure"), "weights.block_structure")
    raise refused("weights.strategy", strategy, "tensor, channel, group or block")

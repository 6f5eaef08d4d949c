"""compressed-tensors' quantization_config: groups of targets -> the scheme of each module.

Reads no tensor; called by schemes.py. Names and classes are matched as the package does: a target
is a module's name, `re:` and a pattern for the beginning of its name, or its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from streamer.model.quantization.float4 import Mxfp4, Nvfp4
from streamer.model.quantization.interface import DENSE, Scheme
from streamer.model.quantization.reading import Pattern, block, fields, group_size, names, refused
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


class Target(NamedTuple):
    """What a string of targets or ignore stands for: exactly one of the three, then its scheme."""

    rank: int  # a name comes before a pattern, a pattern before a class
    text: str
    pattern: Pattern | None

    def matches(self, module: str) -> bool:
        if self.pattern is not None:
            return self.pattern.matches(module)
        return self.text in (module, class_of(module))


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
    whole = fields(given).text("format", "")
    targets: list[tuple[Target, Scheme]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise refused(f"config_groups.{name}", group, "an object")
        scheme = _scheme(group, f"config_groups.{name}", whole)
        texts = names(group.get("targets"), f"config_groups.{name}.targets")
        targets += [(_target(text, "targets"), scheme) for text in texts]
    targets.sort(key=lambda target: target[0].rank)
    ignored = [_target(text, "ignore") for text in names(given.get("ignore"), "ignore")]

    def rule(module: str) -> Scheme:
        if any(target.matches(module) for target in ignored):
            return DENSE
        return next((scheme for target, scheme in targets if target.matches(module)), DENSE)

    return rule


def _changes_the_weights(config: Any) -> bool:
    if not isinstance(config, dict):
        return bool(config)
    if "config_groups" in config:  # of transforms
        return bool(config["config_groups"])
    return bool(config.get("format", "dense") != "dense")


def _target(text: str, field: str) -> Target:
    if text.startswith("re:"):
        return Target(1, text, Pattern(text.removeprefix("re:"), field))
    return Target(2 if text in ("Linear", "Embedding") else 0, text, None)


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

"""config.json's quantization_config -> the scheme of each matrix, refused by name where unknown.

Reads no tensor. `parse_quantization` is called by inspect.py, which refuses before anything is
read, and by build.py before weights are fetched. A matrix that is stored dense is dense, whatever
config.json says of it: writers differ in how they match the names that they skip.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import FLOATS, TensorEntry
from streamer.model.families import FAMILIES
from streamer.model.quantization.compressed import class_of, parse_compressed
from streamer.model.quantization.float4 import Bnb4, Bnb8, Mxfp4, Nvfp4
from streamer.model.quantization.gptq import ONES, Awq, Gptq
from streamer.model.quantization.interface import DENSE, Scheme
from streamer.model.quantization.reading import (
    Pattern,
    Patterns,
    begins,
    block,
    ends,
    fields,
    group_size,
    is_plain,
    names,
    refused,
)
from streamer.model.quantization.scaled import Grid, Numbers

Rule = Callable[[str], Scheme]
GPTQ_FIELDS = ("bits", "group_size", "sym", "desc_act")
WITHOUT_BLOCKS = (Grid(-1, -1), Grid(1, -1))  # of FP8; the shape of its scales tells


class Schemes(msgspec.Struct, frozen=True):
    """How the matrices of a checkpoint are stored.

    method  quant_method; "" for a dense checkpoint
    rule    the scheme that config.json gives to a module
    """

    method: str
    rule: Rule

    def of(self, module: str, found: Mapping[str, TensorEntry]) -> Scheme:
        """The scheme of a module whose tensors are `found`, by their names after the module's."""
        weight = found.get("weight")
        if weight is not None and weight.dtype in FLOATS:
            return DENSE
        scheme = self.rule(module)
        return scheme.seen(found) if isinstance(scheme, Numbers) else scheme


def parse_quantization(config: dict[str, Any]) -> Schemes:
    """The schemes of a checkpoint; ModelNotSupported names the field that can't be served."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return Schemes("", lambda module: DENSE)
    if not isinstance(given, dict):
        raise refused("quantization_config", given, "an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise refused("quant_method", method, f"one of {', '.join(METHODS)}")
    return Schemes(method, METHODS[method](given))


def refuse_quantized(config: dict[str, Any], architecture: str) -> None:
    """ModelNotSupported for a quantized checkpoint that transformers' code would run and does not
    make dense while it is loaded."""
    method = parse_quantization(config).method
    if method and (method, architecture) not in MADE_DENSE:
        raise ModelNotSupported(
            f"{architecture} quantized as {method} can't be served: quantized weights are read for "
            f"{', '.join(FAMILIES)}, others dense",
            param="quantization_config",
        )


def _gptq(given: dict[str, Any]) -> Rule:
    form = given.get("checkpoint_format") or given.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise refused("checkpoint_format", form, "gptq or gptq_v2")
    if given.get("pack_dtype") not in (None, "int32", "torch.int32"):
        raise refused("pack_dtype", given["pack_dtype"], "int32")
    base = _gptq_scheme(given, form == "gptq")
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise refused("dynamic", dynamic, "an object")
    texts = [text.removeprefix("-:").removeprefix("+:") for text in dynamic]
    patterns = Patterns().compiled(texts, "dynamic")
    own = {name: given[name] for name in GPTQ_FIELDS if name in given}
    rules: list[tuple[Pattern, Scheme]] = []
    for pattern, (text, change) in zip(patterns, dynamic.items(), strict=True):
        scheme: Scheme = DENSE
        if not text.startswith("-:") and change is not False:
            if not isinstance(change, dict):
                raise refused("dynamic", change, "an object or false for each pattern")
            scheme = _gptq_scheme({**own, **change}, form == "gptq")
        rules.append((pattern, scheme))
    field = "modules_in_block_to_quantize"
    chosen = frozenset(names(given.get(field), field))

    def rule(module: str) -> Scheme:
        if class_of(module) == "Embedding":
            return DENSE
        if chosen and chosen.isdisjoint(ends(module, ".")):
            return DENSE
        return next((scheme for p, scheme in rules if p.matches(module)), base)

    return rule


def _gptq_scheme(given: dict[str, Any], is_v1: bool) -> Gptq:
    read = fields(given)
    bits = read.size("bits")
    if bits not in ONES:
        raise refused("bits", bits, "2, 4 or 8")
    group = group_size(given.get("group_size", 128))
    return Gptq(bits, group, read.flag("sym", True), read.flag("desc_act", False), is_v1)


def _awq(given: dict[str, Any]) -> Rule:
    bits = given.get("bits", given.get("w_bit", 4))
    if bits != 4:
        raise refused("bits", bits, "4")
    version = given.get("version") or given.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise refused("version", version, "gemm")
    group = group_size(given.get("group_size", given.get("q_group_size", 128)))
    scheme = Awq(group, not fields(given).flag("zero_point", True))
    return _skipping(given, ("modules_to_not_convert",), scheme)


def _fp8(given: dict[str, Any]) -> Rule:
    read = fields(given)
    if read.text("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise refused("activation_scheme", given["activation_scheme"], "dynamic or static")
    if read.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise refused("fmt", given["fmt"], "e4m3")
    size = given.get("weight_block_size")
    grids = WITHOUT_BLOCKS if size is None else (block(size, "weight_block_size"),)
    scheme = Numbers("FP8", True, grids, scale_names=("weight_scale_inv", "weight_scale"))
    return _skipping(given, ("modules_to_not_convert", "ignored_layers"), scheme)


def _fbgemm(given: dict[str, Any]) -> Rule:
    scheme = Numbers("FBGEMM FP8", True, (Grid(1, -1),))
    return _skipping(given, ("modules_to_not_convert",), scheme)


def _mxfp4(given: dict[str, Any]) -> Rule:
    return _skipping(given, ("modules_to_not_convert",), Mxfp4(has_blocks=True))


def _bitsandbytes(given: dict[str, Any]) -> Rule:
    read = fields(given)
    scheme: Scheme = Bnb8()
    if read.flag("load_in_4bit", False) or read.flag("_load_in_4bit", False):
        kind = read.text("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise refused("bnb_4bit_quant_type", kind, "nf4 or fp4")
        if read.text("bnb_4bit_quant_storage", "uint8") != "uint8":
            raise refused("bnb_4bit_quant_storage", given["bnb_4bit_quant_storage"], "uint8")
        scheme = Bnb4(kind, read.flag("bnb_4bit_use_double_quant", False))
    elif not (read.flag("load_in_8bit", False) or read.flag("_load_in_8bit", False)):
        raise refused("load_in_8bit", False, "true, or load_in_4bit")
    return _skipping(given, ("llm_int8_skip_modules",), scheme)


def _modelopt(given: dict[str, Any]) -> Rule:
    schemes: dict[str, Scheme] = {
        "FP8": Numbers("ModelOpt FP8", True, WITHOUT_BLOCKS),
        "NVFP4": Nvfp4(is_modelopt=True),
    }
    scheme = schemes.get(str(given.get("quant_algo")).upper())
    if scheme is None:
        raise refused("quant_algo", given.get("quant_algo"), " or ".join(schemes))
    ignored = dict.fromkeys(names(given.get("ignore") or given.get("exclude_modules"), "ignore"))
    globs = [fnmatch.translate(text) for text in ignored if not is_plain(text)]
    patterns = Patterns().compiled(globs, "ignore")

    def rule(module: str) -> Scheme:
        if class_of(module) == "Embedding" or module in ignored:
            return DENSE
        return DENSE if any(p.matches(module) for p in patterns) else scheme

    return rule


def _skipping(given: dict[str, Any], lists: tuple[str, ...], scheme: Scheme) -> Rule:
    """The scheme for all but embeddings and the modules of the lists, matched as transformers does:
    a pattern for the beginning of a name up to a dot, or its end."""
    texts = dict.fromkeys(text for name in lists for text in names(given.get(name), name))
    plain = {text for text in texts if is_plain(text)}
    wanted = [rf"(?:{text})(?:(?<=\.)|(?=\.|$))" for text in texts if text not in plain]
    patterns = Patterns().compiled(wanted, lists[0])

    def rule(module: str) -> Scheme:
        skip = not plain.isdisjoint(begins(module)) or not texts.keys().isdisjoint(ends(module))
        skip = skip or any(p.matches(module) for p in patterns)
        return DENSE if skip or class_of(module) == "Embedding" else scheme

    return rule


# By transformers, while it loads them: expert matrices stacked in one tensor of blocks.
MADE_DENSE = {("mxfp4", "GptOssForCausalLM")}

METHODS: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": parse_compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}

"""GGUF files for the tests, written by the `gguf` package from checkpoints of tests/checkpoints.py.

`write_gguf` converts as llama.cpp's converter does (its names, its order of rotated rows), and puts
into the checkpoint's folder the weights that the file really holds, as the package dequantizes
them: transformers' model of that folder is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

Kind = gguf.GGMLQuantizationType


def quantized(dense: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix in a format; where the package has no quantizer, random blocks."""
    try:
        return gguf.quants.quantize(dense, kind)
    except NotImplementedError:
        return random_blocks(dense.shape, kind, rng)


def random_blocks(shape: Sequence[int], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random codes, with scales that make weights of about the size of trained ones."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // weights, num_bytes), dtype=np.uint8)
    halves = {
        Kind.Q2_K: {80: 0.01, 82: 0.01},
        Kind.Q3_K: {108: 0.004},
        Kind.Q4_K: {0: 0.0008, 2: 0.006},
        Kind.Q5_K: {0: 0.0004, 2: 0.006},
        Kind.Q6_K: {208: 0.0002},
        Kind.IQ4_NL: {0: 0.003},
    }[kind]
    for at, scale in halves.items():
        values = (rng.uniform(0.5, 1.5, raw.shape[:2]) * scale).astype(np.float16)
        raw[..., at : at + 2] = values[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def rounded(dense: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix in a format, rounded to nearest where the package has no quantizer for it;
    ours, and far from llama.cpp's search, but its files' layout."""
    if kind in (Kind.Q4_K, Kind.Q5_K):
        return _rounded_with_minima(dense, 4 if kind is Kind.Q4_K else 5)
    if kind is Kind.Q6_K:
        return _rounded_q6(dense)
    if kind is Kind.Q2_K:
        return _rounded_q2(dense)
    if kind is Kind.Q3_K:
        return _rounded_q3(dense)
    if kind is Kind.IQ4_NL:
        parts = dense.reshape(dense.shape[0], -1, 32)
        values = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
        scales = (np.abs(parts).max(-1, keepdims=True) / 113).astype(np.float16)
        unit = np.maximum(scales.astype(np.float32), 1e-12)
        codes = np.abs((parts / unit)[..., None] - values).argmin(-1).astype(np.uint8)
        packed = codes[..., :16] | codes[..., 16:] << 4
        return np.concatenate((scales.view(np.uint8), packed), -1).reshape(dense.shape[0], -1)
    return quantized(dense, kind, rng)


def _minima(
    parts: np.ndarray, top: int, unit_top: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Codes up to `top` of parts [N, blocks, parts, weights], rounded to nearest: two float16 of a
    block, scales and minima of its parts as multiples of these up to `unit_top`, codes."""
    low = np.minimum(parts.min(-1), 0)
    spread = (np.maximum(parts.max(-1), 0) - low) / top
    units = [np.maximum(x.max(-1, keepdims=True) / unit_top, 1e-7) for x in (spread, -low)]
    halves = [x.astype(np.float16) for x in units]
    d, dmin = (x.astype(np.float32) for x in halves)
    scale = np.clip(np.rint(spread / d), 1, unit_top).astype(np.uint8)
    least = np.clip(np.rint(-low / dmin), 0, unit_top).astype(np.uint8)
    codes = (parts + (dmin * least)[..., None]) / (d * scale)[..., None]
    return halves, scale, least, np.clip(np.rint(codes), 0, top).astype(np.uint8)


def _rounded_with_minima(dense: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K: 8 parts of 32, each with 6 bits of a scale and of a minimum."""
    n, top = dense.shape[0], (1 << bits) - 1
    parts = dense.reshape(n, -1, 8, 32)
    halves, scale, least, codes = _minima(parts, top, 63)
    six = np.concatenate(
        (
            scale[..., :4] | scale[..., 4:] >> 4 << 6,
            least[..., :4] | least[..., 4:] >> 4 << 6,
            scale[..., 4:] & 15 | (least[..., 4:] & 15) << 4,
        ),
        -1,
    )
    pairs = codes.reshape(n, -1, 4, 2, 32)
    low_bits = (pairs[..., 0, :] & 15 | (pairs[..., 1, :] & 15) << 4).reshape(*six.shape[:2], -1)
    fields = [x.view(np.uint8) for x in halves] + [six]
    if bits == 5:
        fields.append(
            ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
        )
    return np.concatenate([*fields, low_bits], -1).reshape(n, -1)


def _rounded_q2(dense: np.ndarray) -> np.ndarray:
    """16 parts of 16, each with 4 bits of a scale and of a minimum."""
    n = dense.shape[0]
    parts = dense.reshape(n, -1, 16, 16)
    halves, scale, least, codes = _minima(parts, 3, 15)
    low_bits = _pairs_of_bits(codes)
    fields = [scale | least << 4, low_bits, *(x.view(np.uint8) for x in halves)]
    return np.concatenate(fields, -1).reshape(n, -1)


def _rounded_q3(dense: np.ndarray) -> np.ndarray:
    """16 parts of 16, each with 6 bits of a scale; the third bits of all codes come first."""
    n = dense.shape[0]
    parts = dense.reshape(n, -1, 16, 16)
    spread = np.abs(parts).max(-1) / 3.5
    d = np.maximum(spread.max(-1, keepdims=True) / 31, 1e-7).astype(np.float16)
    scale = np.clip(np.rint(spread / d.astype(np.float32)), 1, 31)
    codes = np.rint(parts / (d.astype(np.float32) * scale)[..., None])
    codes = (np.clip(codes, -4, 3) + 4).astype(np.uint8)
    high = (codes >> 2).reshape(n, -1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    six = scale.astype(np.uint8) + 32
    top = (six >> 4).reshape(n, -1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    scales = [six[..., :8] & 15 | (six[..., 8:] & 15) << 4, top.sum(2, dtype=np.uint8)]
    fields = [high.sum(2, dtype=np.uint8), _pairs_of_bits(codes & 3), *scales, d.view(np.uint8)]
    return np.concatenate(fields, -1).reshape(n, -1)


def _pairs_of_bits(codes: np.ndarray) -> np.ndarray:
    """Codes of 2 bits [N, blocks, 16, 16] -> bytes [N, blocks, 64], each of 4 that are 32 apart."""
    rows = codes.reshape(*codes.shape[:2], 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return rows.sum(3, dtype=np.uint8).reshape(*codes.shape[:2], 64)


def _rounded_q6(dense: np.ndarray) -> np.ndarray:
    """16 parts of 16, each with 8 bits of a scale."""
    n = dense.shape[0]
    parts = dense.reshape(n, -1, 16, 16)
    spread = np.abs(parts).max(-1) / 31
    d = np.maximum(spread.max(-1, keepdims=True) / 127, 1e-7).astype(np.float16)
    scale = np.clip(np.rint(spread / d.astype(np.float32)), 1, 127).astype(np.int8)
    codes = np.rint(parts / (d.astype(np.float32) * scale)[..., None])
    rows = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(n, -1, 2, 4, 32)
    low = rows & 15
    ql = np.concatenate(
        (low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4), -1
    )
    qh = ((rows >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(3, dtype=np.uint8)
    blocks = [x.reshape(n, parts.shape[1], -1) for x in (ql, qh)]
    fields = [*blocks, scale.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(fields, -1).reshape(n, -1)


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection as llama.cpp rotates them: halves of a head become pairs."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    file: Path,
    kind_of: Callable[[str], Kind] = lambda name: Kind.Q8_0,
    *,
    architecture: str = "llama",
    seed: int = 0,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split_max_tensors: int = 0,
    quantize: Callable[[np.ndarray, Kind, np.random.Generator], np.ndarray] = quantized,
) -> Path:
    """The folder's model as a GGUF file; kind_of gives a matrix's format by its usual name."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), architecture, split_max_tensors=split_max_tensors)
    add_config(writer, config)
    add(writer)
    if "tokenizer.ggml.tokens" not in writer.kv_data[0]:
        add_bytes(writer, config["vocab_size"])
    rng = np.random.default_rng(seed)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense = tensor.float().numpy()
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        heads = None
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            of = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            heads = config[of]
        if dense.ndim == 1:
            writer.add_tensor(target, dense if heads is None else paired(dense, heads))
            held[name] = tensor
            continue
        kind = kind_of(name)
        raw = quantize(dense, kind, rng)
        back = gguf.quants.dequantize(raw, kind).reshape(dense.shape)
        held[name] = torch.from_numpy(np.ascontiguousarray(back))
        if heads is not None:  # a permutation of rows is one of rows of blocks
            raw = paired(raw, heads)
        writer.add_tensor(target, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return file


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def add_bytes(writer: gguf.GGUFWriter, vocab_size: int = 256) -> None:
    """A vocabulary of single bytes, and one merge in place of a byte that no text has."""
    tokens = [*gguf_alphabet()[:255], "He", *(f"<unused{i}>" for i in range(vocab_size - 256))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:vocab_size])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["H e"])
    writer.add_eos_token_id(2)


def gguf_alphabet() -> list[str]:
    """GPT-2's characters, by byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(hidden)) for b in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The byte-level tokenizer of a checkpoint folder, with its chat template."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in described["added_tokens"]}
    vocabulary = described["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocabulary[settings["bos_token"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])

"""Writes a Llama checkpoint as GGUF in bfloat16, for llama.cpp: `python to_gguf.py FOLDER FILE`.

Covers compare's own checkpoints: the Llama architecture in one safetensors file and a byte-level
BPE. Weights keep their bits; norms become float32, and the rows of queries and keys are put in the
order in which llama.cpp rotates them. Needs the `gguf` package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ALIGNED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMAL, CONTROL = 1, 3  # kinds of tokens


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{ALIGNED[part]}.weight"


def rotated(rows: Any, num_heads: int) -> Any:
    """Rows of a projection from halves beside each other to pairs, head by head."""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def tensors(file: Path) -> Any:
    """(name, bits as uint16) of every bfloat16 tensor of a safetensors file."""
    import numpy as np

    data = np.memmap(file, dtype=np.uint8, mode="r")
    size = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    for name, about in header.items():
        if name != "__metadata__":
            first, last = (8 + size + at for at in about["data_offsets"])
            yield name, data[first:last].view("<u2").reshape(about["shape"])


def add_tokenizer(writer: Any, folder: Path) -> None:
    """The vocabulary and merges of tokenizer.json."""
    about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = dict(about["model"]["vocab"])
    added = {token["content"]: token for token in about["added_tokens"]}
    vocabulary.update({content: token["id"] for content, token in added.items()})
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    is_control = {content for content, token in added.items() if token["special"]}
    merges = about["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if t in is_control else NORMAL for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


def convert(folder: Path, target: Path) -> None:
    """Write `target`, renamed to its final name only when complete."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    part = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    add_tokenizer(writer, folder)
    for name, bits in tensors(folder / "model.safetensors"):
        if bits.ndim == 1:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(gguf_name(name), wide)
            continue
        if "q_proj" in name or "k_proj" in name:
            bits = rotated(bits, heads if "q_proj" in name else kv_heads)
        raw = np.ascontiguousarray(bits).view(np.uint8)
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

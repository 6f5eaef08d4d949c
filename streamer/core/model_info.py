"""ModelInfo: what everybody else may know of a loaded model.

Made by whoever loads (model/runner/cpu.py, fake/model.py), read by engine, server and cli; a value
without behaviour or torch types.
"""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known once a model is loaded.

    name                 the served name
    dtype                "float32" or "bfloat16", as computed
    eos_token_ids        tokens that end an answer
    block_bytes          bytes of one KV block, all layers, K and V
    generation_defaults  sampling settings of the checkpoint's generation_config.json
    """

    name: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    num_parameters: int
    generation_defaults: dict[str, float]
    device: str

"""The fake model: torch-free, with unbounded context, and output that counts and so can be checked.

Loaded by build.py for "fake" and names such as "fake:tokens_per_s=50"; benchmarks and the tests of
the streaming layers run on it. The output and how to check it: fake/tokenizer.py. It ends at
max_tokens or, where the prompt (of a chat: the last user message) asks to "count to N", with an end
token after the number N. A script (fake/script.py) gives other answers. fake/runner.py checks every
plan.
"""

from __future__ import annotations

import math

import msgspec

from streamer.config import Config
from streamer.core.sizes import ModelInfo
from streamer.errors import ConfigError
from streamer.fake.runner import FakeRunner
from streamer.fake.script import read_script
from streamer.fake.tokenizer import (
    END,
    MAX_LENGTH,
    VOCAB_SIZE,
    expected_text,
    expected_tokens,
    fake_tokenizer,
    load_fake_tokenizer,
)

__all__ = [
    "FakeOptions",
    "FakeRunner",
    "expected_text",
    "expected_tokens",
    "fake_tokenizer",
    "is_fake",
    "load_fake",
    "load_fake_tokenizer",
    "parse_name",
]

NUM_BLOCKS = 8192
BYTES_PER_TOKEN = 1 << 14  # of an imaginary KV cache; makes 1024 host blocks by default


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's name may say: "fake:tokens_per_s=100,depth=1".

    tokens_per_s  steps a second, hence tokens a second of each stream; 0: as fast as it goes
    depth         plans launched ahead, as on CUDA (0 or 1)
    length        output tokens after which it ends if the prompt names no N; 0: never
    """

    tokens_per_s: float = 0.0
    depth: int = 0
    length: int = 0


def is_fake(model: str | None) -> bool:
    """Whether a model's name means the fake model."""
    return model is not None and model.partition(":")[0] == "fake"


def parse_name(model: str) -> FakeOptions:
    """The options in a name such as "fake:tokens_per_s=100"; ConfigError says which is wrong."""
    text = model.partition(":")[2]
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        options = msgspec.convert(given, FakeOptions, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"model {model}: {e}", param="model") from None
    is_rate = 0 <= options.tokens_per_s < math.inf
    if not is_rate or options.depth not in (0, 1) or options.length < 0:
        raise ConfigError(
            f"model {model}: tokens_per_s and length must be 0 or more, depth 0 or 1", param="model"
        )
    return options


def load_fake(
    config: Config,
    options: FakeOptions | None = None,
    *,
    tokens_per_s: float | None = None,
    depth: int | None = None,
) -> tuple[FakeRunner, ModelInfo]:
    """The runner and its ModelInfo.

    options  those of the model's name if absent; `tokens_per_s` and `depth` override them
    """
    if options is None:
        options = parse_name(config.model or "fake")
    block_bytes = config.block_size * BYTES_PER_TOKEN
    info = ModelInfo(
        name=config.served_model_name or "fake",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or MAX_LENGTH,
        eos_token_ids=(END,),
        num_blocks=config.num_gpu_blocks_override or NUM_BLOCKS,
        num_host_blocks=int(config.swap_space * (1 << 30)) // block_bytes,
        block_size=config.block_size,
        block_bytes=block_bytes,
        num_parameters=0,
        generation_defaults={},
        device="cpu",
    )
    runner = FakeRunner(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        depth=options.depth if depth is None else depth,
        tokens_per_s=options.tokens_per_s if tokens_per_s is None else tokens_per_s,
        length=options.length,
    )
    if config.script is not None:
        runner.script = read_script(config.script)
    return runner, info

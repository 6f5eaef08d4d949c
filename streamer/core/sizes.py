"""ModelInfo, SchedulerConfig, check_fits: a loaded model's sizes, the scheduler's, and what fits.

Frozen values and pure functions. The loader makes a ModelInfo, which engine, server and cli read;
the loop checks what fits before anything is queued, and the scheduler again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamer.config import Config
from streamer.core.plan import Drawn
from streamer.core.speculation.index import LONGEST
from streamer.core.speculation.values import SpeculationSizes
from streamer.errors import ConfigError, ContextLengthExceeded, InvalidRequest

# Each scored or provisional token is a row of logits beside those of the rows that draw: 256 are
# 128 MiB in fp32 at a vocabulary of 128k. A longer prompt is computed in more steps.
MAX_SCORED = 256

# Beside a prompt of 2,048 tokens, `streamer bench paper --only chunks` (a 20 M model, two cores,
# 2026-11-22) had gaps in streams of 495 ms (p99) with prompts whole, of 149 ms at 512 and 75 ms at
# 256, at the same tokens a second. A GPU gets larger chunks.
BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 512


# Tokens in the indexes of speculation, at about 130 bytes; fewer where the KV pool holds fewer.
MAX_INDEXED = 1 << 20


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Names and sizes of a loaded model.

    name                 the served name
    dtype                "float32" or "bfloat16", as computed
    eos_token_ids        tokens that end an answer
    block_bytes          bytes of one KV block, all layers, K and V
    quantization         how weights are quantized, most of them first, "; " between; "" if none are
    stored_bytes, weight_bytes  of the weights, in the checkpoint's files and in memory
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
    stored_bytes: int = 0
    weight_bytes: int = 0
    quantization: str = ""
    generation_defaults: dict[str, float]
    device: str


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes the scheduler works within. Token counts, blocks, and bytes of one block.

    is_paced    prompts beside running answers are cut by measured time, within the budget
    max_scored_tokens  maximum of prompt tokens that a step scores and provisional ones it verifies
    token_bytes  token id -> its bytes in the text (special tokens: empty), for stop strings
    speculation  what is proposed before it is drawn; None: nothing
    """

    block_size: int
    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    is_paced: bool = False
    max_scored_tokens: int = MAX_SCORED
    enable_prefix_caching: bool = True
    token_bytes: tuple[bytes, ...] = ()
    speculation: SpeculationSizes | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes each step",
                param="max_num_batched_tokens",
            )


def batched_tokens(config: Config, device: str) -> int:
    """The setting's token budget of a step, or the default for this type of device."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(CPU_BATCHED_TOKENS if device == "cpu" else BATCHED_TOKENS, config.max_num_seqs)


def sizes_of(config: Config, info: ModelInfo, token_bytes: tuple[bytes, ...]) -> SchedulerConfig:
    """The sizes of a loaded model under these settings."""
    return SchedulerConfig(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, info.device),
        is_paced=config.max_num_batched_tokens is None,
        max_model_len=info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        token_bytes=token_bytes,
        speculation=_speculation(config, info),
    )


def _speculation(config: Config, info: ModelInfo) -> SpeculationSizes | None:
    method, asked = config.speculation_method, config.speculative_config
    if method == "none":
        return None
    compared = asked.prompt_lookup_max or LONGEST
    return SpeculationSizes(
        max_proposed=asked.num_speculative_tokens,
        has_texts=method != "draft_model",
        has_recent=method == "suffix",
        has_draft=config.draft_model is not None,
        min_match=min(asked.prompt_lookup_min or compared, compared) if method == "ngram" else 0,
        max_match=compared,
        max_indexed=min(MAX_INDEXED, info.num_blocks * info.block_size),
    )


def check_fits(num_prompt: int, n: int, max_tokens: int | None, config: SchedulerConfig) -> int:
    """The output tokens each choice may have, an absent maximum clamped to what fits.

    Raises ContextLengthExceeded with the numbers if the request can never run.
    """
    by_context = config.max_model_len - num_prompt
    context = config.max_model_len
    if by_context < 1:
        what = f"it has {num_prompt}, which leaves no room for an answer"
        raise ContextLengthExceeded.of_prompt(context, what)
    if max_tokens is not None and max_tokens > by_context:
        # OpenAI's words here too
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens, but "
            f"{num_prompt + max_tokens} were requested: {num_prompt} of the prompt and "
            f"{max_tokens} of output",
            param="max_tokens",
        )
    by_pool = config.num_blocks // n * config.block_size - num_prompt
    if by_pool < 1 or (max_tokens is not None and max_tokens > by_pool):
        raise ContextLengthExceeded(
            f"n={n} choices of {num_prompt} prompt and {max_tokens or 1} output tokens need "
            f"{n * -(-(num_prompt + (max_tokens or 1)) // config.block_size)} blocks of "
            f"{config.block_size} tokens; the KV pool has {config.num_blocks}",
            param="max_tokens",
        )
    return min(by_context, by_pool) if max_tokens is None else max_tokens


def check_outputs(outputs: Sequence[Drawn], n: int, max_tokens: int) -> None:
    """Raise InvalidRequest if a request's choices can't have drawn this before."""
    if len(outputs) != n:
        raise InvalidRequest(f"{len(outputs)} outputs of {n} choices", param="outputs")
    longest = max(len(drawn.tokens) for drawn in outputs)
    if longest > max_tokens:
        raise InvalidRequest(
            f"{longest} output tokens of a choice are more than its {max_tokens}", param="outputs"
        )

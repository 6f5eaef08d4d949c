"""The workloads of compare: models, prompts and lengths. No clock, no engine.

Prompts are random token ids, new in every round so that no prefix cache helps, and the same for
every engine of a round. Answers are greedy and have the requested lengths.
"""

from __future__ import annotations

import random

import msgspec

PROMPT_TOKENS = 128
FIRST_ID = 100  # below are special tokens and single bytes
MAX_LEN = 1024
MAX_SEQS = 64
KV_BYTES = 2 << 30
BF16 = 2  # bytes


class Model(msgspec.Struct, frozen=True):
    """The shape of a Llama; `vocabulary` 0 marks a model without weights."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Parameters of the matrix from hidden states to logits."""
        return self.vocabulary * self.hidden

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads, in bfloat16: all but the embedding's other rows."""
        return BF16 * (self.layer_parameters + self.head_parameters)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values, in 16 bits."""
        return BF16 * 2 * self.layers * self.kv_heads * self.head_dim


class Work(msgspec.Struct, frozen=True):
    """Prompts of `prompt_tokens` each, answered with `lengths` tokens.

    waves  for streams: how many requests each client makes, one after the other; `lengths` are
           those of one wave, a client each. 0: all at once
    """

    name: str
    says: str
    lengths: tuple[int, ...]
    waves: int = 0
    prompt_tokens: int = PROMPT_TOKENS

    @property
    def is_stream(self) -> bool:
        return self.waves > 0

    @property
    def num_prompts(self) -> int:
        return len(self.lengths) * max(1, self.waves)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(self.lengths) * max(1, self.waves)

    @property
    def rated_tokens(self) -> int:
        """The tokens of its rate: output, but those of the prompts where an answer is one token."""
        is_prefill = max(self.lengths) == 1
        return self.num_prompts * self.prompt_tokens if is_prefill else self.num_tokens


MODELS = {
    model.name: model
    for model in (
        Model("small", 16000, 512, 8, 8, 4, 64, 1536),
        Model("half", 32000, 1024, 24, 16, 8, 128, 3072),
        Model("fake", 0, 0, 0, 0, 0, 0, 0),  # this engine without a model, to test compare itself
    )
}
WORKS = {
    work.name: work
    for work in (
        Work("eq", "32 requests of 128 tokens", (128,) * 32),
        Work("mix", "32 requests of 32 to 256 tokens", (32, 128, 64, 256) * 8),
        Work("one", "1 request of 256 tokens", (256,)),
        Work("prompt", "8 prompts of 512 tokens, their tokens", (1,) * 8, prompt_tokens=512),
        Work("stream", "16 streaming clients, 128 tokens", (128,) * 16, waves=2),
    )
}
FAKE_VOCABULARY = 1000


def prompts(
    model: Model, count: int, seed: str, num_tokens: int = PROMPT_TOKENS
) -> list[list[int]]:
    """`count` random prompts; the same arguments give the same on every machine."""
    source = random.Random(f"{model.name} {seed}")
    last = model.vocabulary or FAKE_VOCABULARY
    return [[source.randrange(FIRST_ID, last) for _ in range(num_tokens)] for _ in range(count)]

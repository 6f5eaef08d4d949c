"""The fake model's tokenizer, made in memory: bytes, and a token for each number up to 9999.

A real byte-level tokenizer of the tokenizers library with a chat template, so that everything
above the model runs as with any checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.tokenizer import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 2
NUM_NUMBERS = 10_000
FIRST_NUMBER = len(SPECIALS) + 256
VOCAB_SIZE = FIRST_NUMBER + NUM_NUMBERS
SPACE = "\u0120"  # how byte-level vocabularies write a space

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load_fake_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """The tokenizer; `chat_template` is the text of another template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from streamer.tokenizer import Tokenizer as StreamerTokenizer

    tokens = [
        *SPECIALS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"{SPACE}{number}" for number in range(NUM_NUMBERS)),
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    settings = {
        "eos_token": SPECIALS[END_ID],
        "pad_token": SPECIALS[0],
        "chat_template": chat_template or CHAT_TEMPLATE,
    }
    return StreamerTokenizer(backend, settings)

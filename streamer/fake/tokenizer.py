"""The fake model's vocabulary: token ids that count, and the tokenizer that spells them, in memory.

Arithmetic on the index of an output token, for the fake runner and for checks of its text. The
tokenizer is a real one with a chat template: all above the model runs as with any other model.

Every output is " 1 2 3 4 ...". The first 99,999 output tokens are one number each: output token k
(from 0) spells a space and k + 1. Beyond that a number takes two tokens, the thousands (" 100") and
three digits ("000"). So the index among the output tokens alone determines the token, at any
length, and any slice can be checked. Prompts are encoded as one token a byte.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.tokenizer.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, SYSTEM, USER, ASSISTANT, END = range(256, 261)
SINGLES = 99_999  # numbers that are one token
FIRST_NUMBER = END + 1  # the token " 1"
FIRST_DIGITS = FIRST_NUMBER + SINGLES  # the token "000"
VOCAB_SIZE = FIRST_DIGITS + 1000
MAX_LENGTH = 1 << 24  # tokens of context by default

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + (message.content or '') + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# With a script: tools, calls and reasoning in the form of Qwen's templates.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ eos_token }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def token_at(index: int) -> int:
    """The output token at an index from 0, without an upper bound."""
    if index < SINGLES:
        return FIRST_NUMBER + index
    above, is_second = divmod(index - SINGLES, 2)
    thousands, rest = divmod(SINGLES + 1 + above, 1000)
    return FIRST_DIGITS + rest if is_second else FIRST_NUMBER + thousands - 1


def num_tokens_to(number: int) -> int:
    """Output tokens that spell 1 up to this number."""
    return number if number <= SINGLES else SINGLES + 2 * (number - SINGLES)


def expected_tokens(start: int, count: int) -> list[int]:
    """Output tokens `start` to `start + count` of every choice that has not ended."""
    return [token_at(i) for i in range(start, start + count)]


def expected_text(count: int) -> str:
    """The text of the first `count` output tokens."""
    return "".join(_spell(token_at(i)) for i in range(count))


def _spell(token: int) -> str:
    if token >= FIRST_DIGITS:
        return f"{token - FIRST_DIGITS:03d}"
    return f" {token - FIRST_NUMBER + 1}"


def fake_tokenizer() -> Tokenizer:
    """The tokenizer: one token a byte for prompts, numbers for output."""
    return load_fake_tokenizer()


@cache  # its vocabulary takes half a second; engines share it
def load_fake_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """fake_tokenizer, with the text of another chat template if given."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from streamer.tokenizer.token_bytes import byte_alphabet
    from streamer.tokenizer.tokenizer import Tokenizer

    written = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {char: byte for byte, char in written.items()}
    # Without merges `encode` never finds the numbers: any text is bytes, and decodes to itself.
    space = written[ord(" ")]  # digits are written as they are
    vocab |= {_spell(t).replace(" ", space): t for t in range(FIRST_NUMBER, VOCAB_SIZE)}
    vocab |= {token: BOS + i for i, token in enumerate(SPECIAL_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    settings = {
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[-1],
        "chat_template": CHAT_TEMPLATE if chat_template is None else chat_template,
    }
    return Tokenizer(backend, settings)

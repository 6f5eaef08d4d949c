"""The token-to-bytes table: what every token contributes to the text, as bytes.

Pure functions over a vocabulary and the description of its decoder; streamer.tokenizer is the only
caller. Stop strings are matched and text is made from this table, so that loop and scheduler agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamer.errors import ModelNotSupported

SPACE_MARK = "\u2581"  # SentencePiece writes a space so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def token_bytes(
    vocabulary: Mapping[str, int], added: Mapping[int, bytes], decoder: Mapping[str, Any] | None
) -> tuple[bytes, ...]:
    """Bytes of each token id from 0 to the largest; unused ids have none.

    vocabulary  token as written in the vocabulary -> id, added tokens included
    added       id -> bytes of the tokens that are not spelt in the vocabulary's way: none for
                special tokens, their own text for others
    decoder     the "decoder" of tokenizer.json, or its "pre_tokenizer" where it has none

    Byte-level vocabularies and those of SentencePiece are known; ModelNotSupported for others,
    whose text depends on neighbouring tokens.
    """
    kinds = {part["type"] for part in _parts(decoder)}
    spell: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        spell = _ByteLevel()
    elif kinds & {"ByteFallback", "Metaspace"} or _replaces_mark(decoder):
        spell = _SentencePiece(has_byte_tokens="ByteFallback" in kinds)
    else:
        raise ModelNotSupported(
            f"a tokenizer with the decoder {sorted(kinds) or 'none'} can't stream: its text is not "
            "the concatenation of its tokens (byte-level and SentencePiece vocabularies are)",
            param="model",
        )
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = added[token_id] if token_id in added else spell(token)
    return tuple(table)


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder.get("decoders") or decoder.get("pretokenizers") or ():
            yield from _parts(part)
    else:
        yield decoder


def _replaces_mark(decoder: Mapping[str, Any] | None) -> bool:
    return any(
        part["type"] == "Replace" and part["pattern"].get("String") == SPACE_MARK
        for part in _parts(decoder)
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: each character of a token stands for one byte.

    Bytes that print stand for themselves; the others are written U+0100 and up, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


class _ByteLevel:
    def __init__(self) -> None:
        # As Latin-1, whose characters are the bytes; what is not in the alphabet leaves it.
        self._latin = dict.fromkeys(range(256), "\uffff")
        self._latin |= {ord(char): chr(byte) for char, byte in byte_alphabet().items()}

    def __call__(self, token: str) -> bytes:
        try:
            return token.translate(self._latin).encode("latin-1")
        except UnicodeEncodeError:  # a token that is written in plain text
            return token.encode()


class _SentencePiece:
    """U+2581 is a space; `<0x0A>` is a byte where the vocabulary falls back to bytes."""

    def __init__(self, has_byte_tokens: bool) -> None:
        self._has_byte_tokens = has_byte_tokens

    def __call__(self, token: str) -> bytes:
        match = _BYTE_TOKEN.match(token) if self._has_byte_tokens else None
        if match is not None:
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()

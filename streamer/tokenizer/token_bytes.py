"""The token-to-bytes table: what every token contributes to the text, as bytes.

Pure functions over a vocabulary and the description of its decoder; streamer.tokenizer.tokenizer is
the only caller. Stop strings are matched and text is made from this table, so that event loop
and scheduler agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamer.errors import ModelNotSupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def token_bytes(
    vocabulary: Mapping[str, int], added: Mapping[int, bytes], decoder: Mapping[str, Any] | None
) -> tuple[bytes, ...]:
    """Bytes of each token id from 0 to the largest; unused ids have none.

    vocabulary  token as written in the vocabulary -> id, added tokens included
    added       id -> bytes of the tokens that are not spelt in the vocabulary's way: none for
                special tokens, their own text for others
    decoder     the "decoder" of tokenizer.json

    ModelNotSupported names a decoder under which a token's text depends on its neighbours. A
    space that is dropped only at the beginning of a text stays: an answer follows its prompt.
    """
    steps = _steps(decoder)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = added[token_id] if token_id in added else _spell(token, steps)
    return tuple(table)


def decoder_of_pre_tokenizer(described: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The decoder that undoes a "pre_tokenizer", for a tokenizer that has no decoder."""
    kept = [part for part in _parts(described) if part["type"] in ("ByteLevel", "Metaspace")]
    return {"type": "Sequence", "decoders": kept} if kept else None


# A token's text, or its bytes once a step has made them -> the same after one more step.
_Piece = str | bytes
_Step = Callable[[_Piece], _Piece]


def _spell(token: str, steps: list[_Step]) -> bytes:
    piece: _Piece = token
    for step in steps:
        piece = step(piece)
    return piece.encode() if isinstance(piece, str) else piece


def _steps(decoder: Mapping[str, Any] | None) -> list[_Step]:
    """What a decoder does to each token, in order; tokens are one text from Fuse on."""
    parts = list(_parts(decoder))
    if not parts:
        raise _cannot_stream("none", "does not say how tokens become text")
    steps: list[_Step] = []
    is_fused = has_bytes = False
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            steps.append(_on_text(_ByteLevel()))
            is_fused = True
        elif kind == "ByteFallback":
            steps.append(_on_text(_byte_of))
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Metaspace":
            if is_fused and part.get("prepend_scheme", "always") != "never":
                raise _cannot_stream(kind, "after Fuse takes away every space")
            steps.append(_replace(part["replacement"], " "))
        elif kind == "Replace":
            pattern = part["pattern"].get("String")
            if not pattern:
                raise _cannot_stream(
                    kind, f"has the pattern {part['pattern']}, which is not a string"
                )
            if is_fused and len(pattern) > 1:
                raise _cannot_stream(kind, f"of {pattern!r} after Fuse is found across tokens")
            steps.append(_replace(pattern, part["content"]))
        elif kind == "Strip":
            if (is_fused and part["stop"]) or (has_bytes and not is_fused):
                raise _cannot_stream(kind, "depends on the tokens beside it")
            if not is_fused:
                steps.append(_strip(part["content"], part["start"], part["stop"]))
        else:
            raise _cannot_stream(kind, "makes a token's text depend on its neighbours")
    return steps


def _cannot_stream(kind: str, why: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"a tokenizer with the decoder {kind} can't stream: it {why}", param="model"
    )


def _on_text(change: Callable[[str], _Piece]) -> _Step:
    return lambda piece: change(piece) if isinstance(piece, str) else piece


def _replace(pattern: str, content: str) -> _Step:
    old, new = pattern.encode(), content.encode()

    def step(piece: _Piece) -> _Piece:
        if isinstance(piece, str):
            return piece.replace(pattern, content)
        return piece.replace(old, new)

    return step


def _strip(content: str, start: int, stop: int) -> _Step:
    def change(piece: str) -> str:
        first = min(start, len(piece) - len(piece.lstrip(content)))
        last = min(stop, len(piece) - len(piece.rstrip(content)))
        return piece[first : max(first, len(piece) - last)]

    return _on_text(change)


def _byte_of(token: str) -> _Piece:
    """`<0x0A>` is a byte."""
    match = _BYTE_TOKEN.match(token)
    return token if match is None else bytes([int(match[1], 16)])


def _parts(described: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if described is None:
        return
    if described["type"] == "Sequence":
        for part in described.get("decoders") or described.get("pretokenizers") or ():
            yield from _parts(part)
    else:
        yield described


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: each character of a token stands for one byte.

    Bytes that print stand for themselves; the others are written U+0100 and up, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


class _ByteLevel:
    def __init__(self) -> None:
        # As Latin-1, whose characters are the bytes; others become one that it does not have.
        self._latin = dict.fromkeys(range(256), "\uffff")
        self._latin |= {ord(char): chr(byte) for char, byte in byte_alphabet().items()}

    def __call__(self, token: str) -> bytes:
        try:
            return token.translate(self._latin).encode("latin-1")
        except UnicodeEncodeError:  # a token that is written in plain text
            return token.encode()

"""Growth: how much the parts of a tokenizer.json may make of a text, bounded before any is encoded.

Thirty replacements of "a" by "aa" are a short file and take all memory for one letter. Pure; called
by tokenizer.py with the parts as tokenizer.json has them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, Final

from streamer.errors import ConfigError

# Characters made of one. XLM-RoBERTa's, the most of known models: 33 by its table, and two steps.
MAX_GROWTH: Final = 256
MAX_TEMPLATE: Final = 4096  # ids that are put around a text
NESTED: Final = ("normalizers", "pretokenizers", "decoders", "processors")


def require_bounded(parts: Mapping[str, Mapping[str, Any] | None]) -> None:
    """ConfigError names the part ("normalizer", ...) that makes too much of a text."""
    for name, part in parts.items():
        if part is None:
            continue
        if (found := growth(part)) > MAX_GROWTH:
            raise ConfigError(
                f"the tokenizer's {name} makes up to {found} characters of one; the maximum is "
                f"{MAX_GROWTH}",
                param="model",
            )


def growth(part: Mapping[str, Any]) -> int:
    """Characters that a part makes of one, at most; for a processor, sequences of ids."""
    total = 1
    for each in _steps(part):
        match each.get("type"):
            case "Replace":
                total *= _replaced(each["pattern"], each.get("content", ""))
            case "Prepend":
                total *= 1 + len(each.get("prepend", ""))
            case "ByteLevel":  # a byte is written as a character of two
                total *= 2
            case "Precompiled":
                total *= _mapped(each.get("precompiled_charsmap") or "")
            case "TemplateProcessing":
                total *= _templated(each)
            case _:
                pass
        if total > MAX_GROWTH:  # and before the number itself is too long
            return total
    return total


def _steps(part: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """A part, or all that its sequences have."""
    waiting = [part]
    while waiting:
        each = waiting.pop()
        inner = [step for key in NESTED for step in each.get(key) or ()]
        if not inner:
            yield each
        waiting += reversed(inner)


def _replaced(pattern: Mapping[str, str], content: str) -> int:
    text = pattern.get("String")
    if not text:  # an expression may match the empty text, between any two characters
        return 1 + len(content)
    return max(1, -(-len(content) // len(text)))


def _mapped(charsmap: str) -> int:
    """SentencePiece's table: the length of a trie, the trie, then its texts, each ended by 0."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # which the library refuses
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, max(map(len, texts.split(b"\0"))))


def _templated(part: Mapping[str, Any]) -> int:
    """Times that a text stands in the template; too many ids around it count as too much."""
    single, tokens = part.get("single") or [], part.get("special_tokens") or {}
    names = [piece["SpecialToken"]["id"] for piece in single if "SpecialToken" in piece]
    num_ids = sum(len((tokens.get(name) or {}).get("ids", ())) for name in names)
    if num_ids + len(single) > MAX_TEMPLATE:
        return MAX_GROWTH + num_ids
    return max(1, len(single) - len(names))

"""SpecialText: keeps special tokens that a caller wrote in a message from becoming tokens.

A template's special tokens steer the model, so a user must not be able to write them. Owned by
streamer.tokenizer.tokenizer; called in the thread pool. Other texts encode as before.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import tokenizers


class Disguise:
    """For one conversation: each special token in the caller's strings becomes a random word.

    Called with a string, it returns the string for the template, equal for equal strings: the rest
    stays, so that a template can trim, split and search it. `hidden` maps each replaced text to its
    number; it is empty if nothing was replaced.
    """

    def __init__(self, find: re.Pattern[str] | None, prefixes: frozenset[str]) -> None:
        self._find = find
        self._prefixes = prefixes
        self._longest = max(map(len, prefixes), default=0)
        self._nonce = f"x{secrets.token_hex(16)}x"  # no caller can have written it
        self.hidden: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        if self._find is None:
            return text
        text = self._find.sub(lambda match: self._hide(match[0]), text)
        # The beginning of a special token, which the template may join to its end.
        body = text.rstrip()
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._prefixes:
                start = len(body) - length
                return body[:start] + self._hide(body[start:]) + text[len(body) :]
        return text

    def reveal(self, text: str) -> str:
        """The text as the caller wrote it."""
        written = list(self.hidden)
        return re.sub(f"{self._nonce}([0-9]+)x", lambda m: written[int(m[1])], text)

    def _hide(self, text: str) -> str:
        number = self.hidden.setdefault(text, len(self.hidden))
        return f"{self._nonce}{number}x"


class SpecialText:
    """The special tokens of a vocabulary as text.

    Besides the backend it keeps a copy in which special tokens are plain text and random stand-ins,
    unknown to callers, take their place.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        special = {i: token for i, token in added.items() if token.special and token.content}
        texts = sorted(token.content for token in special.values())
        self._find = re.compile(longest_of(texts)) if texts else None
        self._prefixes = frozenset(t[:end] for t in texts for end in range(1, len(t)))
        nonce = secrets.token_hex(16)
        self._stand_ins = {token.content: f"x{nonce}x{i}x" for i, token in special.items()}
        self._ids = {self._stand_ins[token.content]: i for i, token in special.items()}
        self._copy = tokenizers.Tokenizer.from_str(backend.to_str())
        self._copy.encode_special_tokens = True  # as text, in spite of the name
        self._copy.add_tokens(
            [
                tokenizers.AddedToken(
                    self._stand_ins[token.content],
                    special=False,
                    normalized=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                )
                for token in special.values()
            ]
        )

    def begins(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return self._find is not None and self._find.match(text) is not None

    def disguise(self) -> Disguise:
        """A new Disguise, for one conversation."""
        return Disguise(self._find, self._prefixes)

    def encode(self, text: str, disguise: Disguise) -> list[int]:
        """Ids of a rendered text: special tokens in it become ids, hidden ones are plain text."""
        if self._find is not None:
            text = self._find.sub(lambda match: self._stand_ins[match[0]], text)
        text = disguise.reveal(text)
        # encode_batch releases the GIL, encode holds it.
        (found,) = self._copy.encode_batch([text], add_special_tokens=False)
        # A stand-in's text may include spaces that it swallowed.
        ids = self._ids
        return [ids.get(t.strip(), i) for i, t in zip(found.ids, found.tokens, strict=True)]


def change_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_strings(key, change): change_strings(item, change) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [change_strings(item, change) for item in value]
    return value


def longest_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of these sorted texts that begins at a place.

    It is a tree: flat alternatives would all be tried at each place of a long text.
    """
    # A prefix of both the first and the last in order is a prefix of all.
    num_common = 0
    for one, other in zip(texts[0], texts[-1], strict=False):
        if one != other:
            break
        num_common += 1
    common, rests = texts[0][:num_common], [text[num_common:] for text in texts]
    by_first = [list(group) for _, group in groupby(filter(None, rests), key=lambda t: t[0])]
    branches = "|".join(longest_of(group) for group in by_first)
    if not branches:
        return re.escape(common)
    return f"{re.escape(common)}(?:{branches}){'' if all(rests) else '?'}"

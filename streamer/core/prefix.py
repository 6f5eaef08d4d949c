"""Chained block hashes: the names under which full blocks are shared.

A block's hash covers everything before it, the tenant's salt and a per-process secret, so that
equal hashes mean equal prefixes and nobody outside can make a collision. Pure; called by the loop
for prompts and by KVManager for blocks that fill later.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

DIGEST_SIZE = 16  # 128 bits


class BlockHasher:
    """Keyed BLAKE2b over (parent hash, tokens); `secret` is 16 to 64 random bytes a process.

    Commands carry hashes made under the secret: a log of them replays only under the same one.
    """

    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self.secret = secret
        self._pack = Struct(f"={block_size}q").pack

    def root(self, salt: bytes) -> bytes:
        """The parent of a sequence's first block."""
        return blake2b(salt, digest_size=DIGEST_SIZE, key=self.secret, person=b"root").digest()

    def next(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a full block after `parent`."""
        data = parent + self._pack(*tokens)
        return blake2b(data, digest_size=DIGEST_SIZE, key=self.secret).digest()

    def hash_blocks(self, tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """Hashes of all full blocks of `tokens`, first to last."""
        size = self.block_size
        parent = self.root(salt)
        hashes = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = self.next(parent, tokens[start : start + size])
            hashes.append(parent)
        return tuple(hashes)

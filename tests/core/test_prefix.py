"""Block hashes: chained, keyed and salted."""

from __future__ import annotations

from streamer.core.prefix import DIGEST_SIZE, BlockHasher

TOKENS = list(range(40))


def test_only_full_blocks_are_hashed_with_128_bits() -> None:
    hashes = BlockHasher(16, b"k" * 32).hash_blocks(TOKENS, b"")
    assert [len(h) for h in hashes] == [DIGEST_SIZE, DIGEST_SIZE] == [16, 16]
    assert BlockHasher(16, b"k" * 32).hash_blocks(TOKENS[:15], b"") == ()


def test_equal_prefixes_have_equal_hashes_and_an_early_token_changes_all_later_ones() -> None:
    hasher = BlockHasher(4, b"k" * 32)
    base = hasher.hash_blocks(TOKENS, b"")
    assert hasher.hash_blocks(TOKENS[:22], b"") == base[:5]
    changed = hasher.hash_blocks([9, *TOKENS[1:]], b"")
    assert not set(changed) & set(base)
    late = hasher.hash_blocks([*TOKENS[:-1], 99], b"")
    assert late[:-1] == base[:-1]
    assert late[-1] != base[-1]


def test_another_tenant_or_another_process_shares_nothing() -> None:
    base = BlockHasher(4, b"k" * 32).hash_blocks(TOKENS, b"")
    assert not set(BlockHasher(4, b"k" * 32).hash_blocks(TOKENS, b"tenant")) & set(base)
    assert not set(BlockHasher(4, b"q" * 32).hash_blocks(TOKENS, b"")) & set(base)


def test_next_continues_hash_blocks() -> None:
    hasher = BlockHasher(4, b"k" * 32)
    hashes = hasher.hash_blocks(TOKENS, b"salt")
    assert hasher.next(hasher.root(b"salt"), TOKENS[:4]) == hashes[0]
    assert hasher.next(hashes[4], TOKENS[20:24]) == hashes[5]

"""Blocks: their chained, keyed and salted hashes; states, sharing, eviction, and the check."""

from __future__ import annotations

import pytest

from streamer.core.blocks import DIGEST_SIZE, BlockHasher, BlockPool
from streamer.errors import InvariantViolated


def taken(pool: BlockPool, n: int) -> list[int]:
    blocks = pool.take(n)
    assert blocks is not None
    return blocks


def test_take_hands_out_each_block_once_and_then_none() -> None:
    pool = BlockPool(3, "device")
    assert sorted(taken(pool, 3)) == [0, 1, 2]
    assert pool.take(1) is None
    assert pool.num_free == 0


def test_a_take_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3, "device")
    assert pool.take(4) is None
    assert pool.num_free == 3
    pool.check([])


def test_a_shared_block_is_free_only_when_every_table_gave_it_back() -> None:
    pool = BlockPool(2, "device")
    (block,) = taken(pool, 1)
    pool.share([block])
    pool.give_back([block], 0)
    assert pool.ref_count(block) == 1
    assert pool.num_free == 1
    pool.give_back([block], 0)
    assert pool.num_free == 2


def test_a_block_cools_until_its_plan_is_retired() -> None:
    pool = BlockPool(1, "device")
    pool.give_back(taken(pool, 1), after_plan=5)
    pool.retire(4)
    assert (pool.num_free, pool.num_cooling) == (0, 1)
    pool.check([])
    pool.retire(5)
    assert (pool.num_free, pool.num_cooling) == (1, 0)


def test_a_cooling_block_can_be_shared_again_and_does_not_become_free_meanwhile() -> None:
    pool = BlockPool(1, "device")
    (block,) = taken(pool, 1)
    pool.publish(block, b"h", b"12")
    pool.give_back([block], after_plan=5)
    pool.share([block])
    pool.retire(9)
    assert pool.num_free == 0
    pool.check([[block]])
    pool.give_back([block], after_plan=9)
    assert pool.num_cached == 1


def test_blank_blocks_go_first_then_the_least_recently_given_back() -> None:
    pool = BlockPool(4, "device")
    a, b, c, d = taken(pool, 4)
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block, name, b"?")
    pool.give_back([b], 0)
    pool.give_back([a], 0)
    pool.give_back([d], 0)
    pool.give_back([c], 0)
    assert [taken(pool, 1)[0] for _ in range(4)] == [d, b, a, c]
    assert pool.find(b"b", bytes([b])) is None


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(3, "device")
    chain = taken(pool, 3)
    for i, block in enumerate(chain):
        pool.publish(block, bytes([i]), bytes([i]))
    pool.give_back(chain, 0)
    assert [taken(pool, 1)[0] for _ in range(3)] == chain[::-1]


def test_find_compares_the_tokens_so_a_collision_is_a_miss() -> None:
    pool = BlockPool(1, "device")
    (block,) = taken(pool, 1)
    assert pool.publish(block, b"h", b"12")
    assert pool.find(b"h", b"12") == block
    assert pool.find(b"h", b"13") is None


def test_the_first_block_with_a_hash_keeps_it() -> None:
    pool = BlockPool(2, "device")
    first, second = taken(pool, 2)
    assert pool.publish(first, b"h", b"1")
    assert not pool.publish(second, b"h", b"1")
    pool.withdraw(first)
    assert pool.find(b"h", b"1") is None
    assert pool.publish(second, b"h", b"1")


def test_invalid_calls_raise_and_name_the_block() -> None:
    pool = BlockPool(2, "device")
    (block,) = taken(pool, 1)
    pool.give_back([block], 0)
    with pytest.raises(InvariantViolated, match="given back without a reference"):
        pool.give_back([block], 0)
    pool = BlockPool(2, "device")
    with pytest.raises(InvariantViolated, match="blank: it can't be shared"):
        pool.share([0])


def test_check_sees_a_lost_reference_and_a_lost_block() -> None:
    pool = BlockPool(2, "device")
    (block,) = taken(pool, 1)
    pool.check([[block]])
    with pytest.raises(InvariantViolated, match="1 references, held by 0 tables"):
        pool.check([])
    pool._blank.pop()
    with pytest.raises(InvariantViolated, match="device pool of 2"):
        pool.check([[block]])


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
    assert hasher.next(hasher.root(b"salt"), hasher.pack(TOKENS[:4])) == hashes[0]
    assert hasher.next(hashes[4], hasher.pack(TOKENS[20:24])) == hashes[5]

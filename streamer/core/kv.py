"""KVManager: block tables over a device pool and a host pool.

Owns both BlockPools and every change of a sequence's block table: match, allocate (with
copy-on-write), fork, swap, publish, release. preemption.py decides which request gives way.
Moves and copies are returned or collected as block ids for the plan being built.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from streamer.core.blocks import BlockHasher, BlockPool
from streamer.core.plan import TableUpdate
from streamer.core.request import Request, Sequence
from streamer.core.sizes import SchedulerConfig
from streamer.errors import InvariantViolated

Moves = list[tuple[int, int]]


class Copy(NamedTuple):
    """A block to copy before its first write, and the request whose `num_tokens` are in it."""

    source: int
    request: Request
    num_tokens: int


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class KVManager:
    """Block tables of all sequences.

    plan     the number of the plan being built: what is given back while building it cools until
             it or its predecessor is retired
    copies   destination -> what is copied there, on first write, by the plan being built
    touched  sequence -> first logical block changed since the runner last got its table
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, hasher: BlockHasher, *, has_prefix_cache: bool
    ) -> None:
        self.device = device
        self.host = host
        self.hasher = hasher
        self.block_size = hasher.block_size
        self.has_prefix_cache = has_prefix_cache
        self.plan = 0
        self.copies: dict[int, Copy] = {}
        self.touched: dict[Sequence, int] = {}
        # Blocks a swap-out still reads although another sequence holds them: not writable yet.
        self._leaving: dict[int, int] = {}

    # ------------------------------------------------------------ the plan

    def retire(self, plan: int) -> None:
        """Every plan up to `plan` is collected and its copies are done."""
        self.device.retire(plan)
        self.host.retire(plan)

    def begin(self, plan: int) -> None:
        """Start building this plan."""
        self.plan = plan

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Take the plan's copies on write, as (source, destination)."""
        if not self.copies:
            return ()
        copies, self.copies = self.copies, {}
        for copy in copies.values():
            copy.request.copied_tokens += copy.num_tokens
        return tuple((copy.source, destination) for destination, copy in copies.items())

    def take_updates(self) -> tuple[TableUpdate, ...]:
        """Take the changes in the tables of joined rows since the runner last got them."""
        if not self.touched:
            return ()
        touched, self.touched = self.touched, {}
        updates = [
            TableUpdate(seq.row, start, tuple(seq.blocks[start:]))
            for seq, start in touched.items()
            if seq.joined
        ]
        return tuple(updates)

    def forget_updates(self, seq: Sequence) -> None:
        """Drop the sequence's updates: its join carries the whole table."""
        self.touched.pop(seq, None)

    # ------------------------------------------------------------ prefix cache

    def _hash_upto(self, seq: Sequence, num_blocks: int) -> None:
        """Extend seq.hashes to the first `num_blocks` blocks (their tokens are known)."""
        hashes = seq.hashes
        if not hashes:
            hashes.extend(seq.request.add.block_hashes[:num_blocks])
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self.hasher.root(seq.request.add.salt)
            hashes.append(self.hasher.next(parent, self._content(seq, len(hashes))))

    def _content(self, seq: Sequence, index: int) -> bytes:
        """What a full block of known tokens is hashed and compared by."""
        start = index * self.block_size
        return self.hasher.pack(seq.tokens[start : start + self.block_size])

    def _cached_blocks(self, seq: Sequence) -> list[int]:
        """The longest published prefix that leaves a token to compute, and all those to score.

        Kept in seq.found: a waiting sequence is matched in every step, and only new blocks are
        compared token by token (6,250 blocks take 0.5 ms a step instead of 2.2; one EPYC core,
        2026-11-21).
        """
        if not self.has_prefix_cache:
            return []
        size, found, hashes = self.block_size, seq.found, seq.hashes
        request, limit = seq.request, (len(seq.tokens) - 1) // size
        if request.is_scoring:
            limit = min(limit, request.num_scored // size)
        self._hash_upto(seq, limit)
        if (same := self.device.num_published(found, hashes)) < len(found):
            del found[same:]
        for i in range(len(found), limit):
            block = self.device.find(hashes[i], self._content(seq, i))
            if block is None:
                break
            found.append(block)
        return found

    def need(self, seq: Sequence) -> int:
        """Free blocks needed to hold all known tokens, beyond those that can be shared now."""
        shared = sum(1 for b in self._cached_blocks(seq) if self.device.ref_count(b) > 0)
        return num_blocks_for(seq.num_tokens, self.block_size) - shared

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens that `match` would find now."""
        return len(self._cached_blocks(seq)) * self.block_size

    def match(self, seq: Sequence) -> int:
        """Take references to the longest published prefix; returns the number of its tokens."""
        if seq.blocks:
            raise InvariantViolated(f"match on a sequence that holds {len(seq.blocks)} blocks")
        found = self._cached_blocks(seq)
        self.device.share(found)
        seq.blocks, seq.found = found, []
        seq.num_computed = len(found) * self.block_size
        seq.num_published = len(found)
        return seq.num_computed

    def publish(self, seq: Sequence) -> None:
        """Make full blocks of known tokens findable, as far as they are computed or scheduled."""
        if not self.has_prefix_cache or not seq.blocks:
            return
        hashes, first = seq.hashes, seq.num_published
        full = min(seq.num_computed, len(seq.tokens)) // self.block_size
        if full <= first:
            return
        for i in range(first, full):
            content = self._content(seq, i)
            if 0 < i == len(hashes):
                hashes.append(self.hasher.next(hashes[-1], content))
            elif i >= len(hashes):
                self._hash_upto(seq, full)
            self.device.publish(seq.blocks[i], hashes[i], content)
        seq.num_published = full

    def withdraw(self, seq: Sequence) -> None:
        """Unpublish the blocks of a sequence whose step failed, on the device and the host."""
        for block_hash in seq.hashes:
            self.device.withdraw_hash(block_hash)
            self.host.withdraw_hash(block_hash)

    # ------------------------------------------------------------ tables

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Cover `num_tokens` tokens, ready to write from seq.num_computed on; False: no room.

        The block to be written is copied first if another table holds it or a swap-out reads it.
        """
        size, blocks = self.block_size, seq.blocks
        extra = max(0, -(-num_tokens // size) - len(blocks))
        first = seq.num_computed // size
        is_tail = seq.shares_tail and first < len(blocks)
        copy = is_tail and not self._is_writable(seq, first)
        new = self.device.take(extra + copy)
        if new is None:
            return False
        seq.shares_tail = False
        if copy:
            self._copy_block(seq, first, new.pop())
        elif is_tail:
            self.device.withdraw(blocks[first])
        if new:
            self._touch(seq, len(blocks))
            blocks.extend(new)
        return True

    def extend(self, seqs: Seq[Sequence]) -> bool:
        """A block more for each, whose last one is full; False: no room for all."""
        new = self.device.take(len(seqs))
        if new is None:
            return False
        for seq, block in zip(seqs, new, strict=True):
            self._touch(seq, len(seq.blocks))
            seq.blocks.append(block)
        return True

    def _is_writable(self, seq: Sequence, index: int) -> bool:
        block = seq.blocks[index]
        if self._leaving.get(block, 0) <= self.device.retired:
            self._leaving.pop(block, None)
        return self.device.ref_count(block) == 1 and block not in self._leaving

    def _copy_block(self, seq: Sequence, index: int, new: int) -> None:
        source = seq.blocks[index]
        # A source that is itself copied in this plan is read where its content is now.
        first = self.copies[source].source if source in self.copies else source
        self.copies[new] = Copy(first, seq.request, seq.num_computed - index * self.block_size)
        seq.blocks[index] = new
        self._touch(seq, index)
        self.device.give_back([source], self.plan)

    def _touch(self, seq: Sequence, index: int) -> None:
        if self.touched.get(seq, index) >= index:
            self.touched[seq] = index

    def fork(self, parent: Sequence, child: Sequence, at: int) -> bool:
        """Share the blocks of the parent's first `at` tokens with a child that holds none.

        Full blocks stay shared; the partial one is copied by the first sequence that writes it.
        False when the parent has computed fewer than `at` tokens.
        """
        if at > parent.num_computed or at > len(child.tokens):
            return False
        blocks = parent.blocks[: num_blocks_for(at, self.block_size)]
        self.device.share(blocks)
        child.blocks = list(blocks)
        child.num_computed = at
        child.num_published = min(parent.num_published, at // self.block_size)
        if at % self.block_size:
            child.shares_tail = parent.shares_tail = True
        return True

    def truncate(self, seq: Sequence, after_plan: int) -> None:
        """Give back the blocks beyond its tokens; plans after `after_plan` do not touch them.

        Provisional tokens were in them: no other table has them, and they are not published.
        """
        kept = len(seq.blocks) - self.num_beyond(seq)
        if kept < len(seq.blocks):
            self.device.give_back(seq.blocks[kept:], after_plan)
            del seq.blocks[kept:]
            self._touch(seq, kept)

    def step_back(self, seq: Sequence, after_plan: int) -> None:
        """Give back the blocks beyond its tokens, of which the last known one is computed again: in
        a block that may have been published, and taken by others, meanwhile."""
        self.truncate(seq, after_plan)
        kept = num_blocks_for(seq.num_computed, self.block_size)
        self.host.give_back(seq.host_blocks[kept:], after_plan)
        del seq.host_blocks[kept:]
        seq.num_published = min(seq.num_published, seq.num_computed // self.block_size)
        seq.shares_tail = bool(seq.blocks)

    def num_beyond(self, seq: Sequence) -> int:
        """Blocks it holds beyond its tokens, for provisional ones."""
        return max(0, len(seq.blocks) - num_blocks_for(seq.num_tokens, self.block_size))

    def adopt(self, parent: Sequence, child: Sequence, after_plan: int) -> None:
        """The child becomes what the parent is: its tokens and blocks, shared from the first
        different block on; its own are free when `after_plan` is over."""
        same = min(len(child.blocks), len(parent.blocks))
        # from the end: hypotheses differ in their last few blocks, and a block that both have was
        # computed after the same tokens
        while same and child.blocks[same - 1] != parent.blocks[same - 1]:
            same -= 1
        shared, old = parent.blocks[same:], child.blocks[same:]
        self.device.share(shared)
        self.device.give_back(old, after_plan)
        child.blocks[same:] = shared
        self._touch(child, same)
        child.tokens[same * self.block_size :] = parent.tokens[same * self.block_size :]
        child.num_tokens = parent.num_tokens
        hashed = min(same, len(child.hashes))
        child.hashes[hashed:] = parent.hashes[hashed:]
        child.num_computed, child.num_published = parent.num_computed, parent.num_published
        child.shares_tail = parent.shares_tail = parent.num_computed % self.block_size > 0

    def release(self, seq: Sequence, after_plan: int) -> None:
        """Give all blocks back to both pools; they are free when `after_plan` is over.

        A block that the plan being built reads, for a copy-on-write or a swap of another sequence
        that shared it, is free when that plan is over: this plan's copies run in any order and
        beside its swaps, so none may write what another reads.
        """
        for block in seq.blocks:
            self.copies.pop(block, None)
        sources = {copy.source for copy in self.copies.values()}
        read = {b for b in seq.blocks if b in sources or self._leaving.get(b) == self.plan}
        if read:
            for block in reversed(seq.blocks):
                self.device.give_back([block], self.plan if block in read else after_plan)
        else:
            self.device.give_back(seq.blocks, after_plan)
        self.host.give_back(seq.host_blocks, after_plan)
        seq.blocks, seq.host_blocks = [], []
        seq.num_computed = seq.num_published = 0
        seq.shares_tail = False
        self.touched.pop(seq, None)

    # ------------------------------------------------------------ swap

    def _host_copy(self, seq: Sequence, index: int) -> int | None:
        """A clean host copy of a full block, found by its hash."""
        size = self.block_size
        known = min(seq.num_computed, len(seq.tokens)) // size
        if not self.has_prefix_cache or index >= known:
            return None
        self._hash_upto(seq, index + 1)
        return self.host.find(seq.hashes[index], self._content(seq, index))

    def swap_cost(self, seqs: Iterable[Sequence]) -> tuple[int, int, bool]:
        """(blocks to copy out, distinct blocks to bring back, whether it can be done now).

        It can't when the host pool has no room, or when the plan being built copies one of their
        blocks: the swap runs before the copy, whose source another sequence may write.
        """
        fresh: set[int] = set()
        clean: set[int] = set()
        is_copying = False
        for seq in seqs:
            is_copying |= any(b in self.copies for b in seq.blocks)
            for i in range(num_blocks_for(seq.num_computed, self.block_size)):
                copy = self._host_copy(seq, i)
                if copy is None:
                    fresh.add(seq.blocks[i])
                else:
                    clean.add(copy)
        idle = sum(1 for b in clean if self.host.ref_count(b) == 0)
        has_room = len(fresh) + idle <= self.host.num_free
        return len(fresh), len(fresh) + len(clean), has_room and not is_copying

    def swap_out(self, seqs: Seq[Sequence]) -> Moves | None:
        """Move to the host: (device, host) copies, once per block; None: no room there.

        Every block of the victim goes, shared ones too, so that it depends on no other sequence.
        """
        if not self.swap_cost(seqs)[2]:
            return None
        moves: Moves = []
        copied: dict[int, int] = {}
        for seq in seqs:
            kept = num_blocks_for(seq.num_computed, self.block_size)
            computed = seq.num_computed
            host_blocks = [self._swap_block_out(seq, i, copied, moves) for i in range(kept)]
            self.release(seq, self.plan)
            seq.num_computed, seq.host_blocks = computed, host_blocks
        return moves

    def _swap_block_out(self, seq: Sequence, i: int, copied: dict[int, int], moves: Moves) -> int:
        block = seq.blocks[i]
        found = copied.get(block)
        if found is None:
            found = self._host_copy(seq, i)
        if found is not None:
            self.host.share([found])
            return found
        taken = self.host.take(1)
        if taken is None:
            raise InvariantViolated(f"host pool: {self.host.num_free} free, but none to take")
        moves.append((block, taken[0]))
        self._leaving[block] = self.plan
        copied[block] = taken[0]
        size = self.block_size
        if self.has_prefix_cache and (i + 1) * size <= min(seq.num_computed, len(seq.tokens)):
            self._hash_upto(seq, i + 1)
            self.host.publish(taken[0], seq.hashes[i], self._content(seq, i))
        return taken[0]

    def swap_in_need(self, seqs: Iterable[Sequence]) -> int:
        """Device blocks to hold all known tokens of swapped sequences, nothing shared."""
        return sum(num_blocks_for(s.num_tokens, self.block_size) for s in seqs)

    def swap_in(self, seqs: Seq[Sequence]) -> Moves | None:
        """Move back to the device: (host, device) copies; None: no room there.

        A device copy is taken where the hash is still found. Host blocks are given back: clean
        copies stay findable there. Device blocks are published again when the copies are done.
        The blocks of known tokens that are not computed yet are taken as well: if another request
        got them while the copies run, it would be preempted for them, and so on in turns.
        """
        if self.swap_in_need(seqs) > self.device.num_free:
            return None
        moves: Moves = []
        copied: dict[int, int] = {}
        for seq in seqs:
            blocks: list[int] = []
            for i, host_block in enumerate(seq.host_blocks):
                block = copied.get(host_block)
                if block is None:
                    block = self._device_copy(seq, i)
                if block is not None:
                    self.device.share([block])
                else:
                    block = self._take_one()
                    moves.append((host_block, block))
                    copied[host_block] = block
                blocks.append(block)
            self.host.give_back(seq.host_blocks, self.plan)
            seq.host_blocks, seq.blocks = [], blocks
            seq.num_published = 0
        for seq in seqs:
            partial = seq.num_computed % self.block_size and seq.blocks
            if partial and self.device.ref_count(seq.blocks[-1]) > 1:
                seq.shares_tail = True
        for seq in seqs:
            missing = num_blocks_for(seq.num_tokens, self.block_size) - len(seq.blocks)
            seq.blocks += [self._take_one() for _ in range(missing)]
        return moves

    def _device_copy(self, seq: Sequence, i: int) -> int | None:
        size = self.block_size
        known = min(seq.num_computed, len(seq.tokens)) // size
        if not self.has_prefix_cache or i >= known:
            return None
        self._hash_upto(seq, i + 1)
        return self.device.find(seq.hashes[i], self._content(seq, i))

    def _take_one(self) -> int:
        taken = self.device.take(1)
        if taken is None:
            raise InvariantViolated(f"device pool: {self.device.num_free} free, but none to take")
        return taken[0]

    # ------------------------------------------------------------ proof

    def check(self, requests: Iterable[Request]) -> None:
        """Check both pools against all block tables, and each table against its tokens."""
        seqs = [s for r in requests for s in r.sequences]
        self.device.check(s.blocks for s in seqs)
        self.host.check(s.host_blocks for s in seqs)
        for seq in seqs:
            table = seq.blocks or seq.host_blocks
            if len(table) * self.block_size < seq.num_computed:
                raise InvariantViolated(
                    f"request {seq.request.request_id}: {seq.num_computed} tokens computed, "
                    f"but {len(table)} blocks of {self.block_size}"
                )
            written = seq.num_tokens + max(0, len(seq.provisional) - 1)
            if len(seq.blocks) > num_blocks_for(written, self.block_size):
                raise InvariantViolated(
                    f"request {seq.request.request_id}: {len(seq.blocks)} blocks of "
                    f"{self.block_size} for {written} tokens"
                )
            if len(set(seq.blocks)) != len(seq.blocks):
                raise InvariantViolated(f"request {seq.request.request_id}: a block twice")


def new_kv(config: SchedulerConfig, hasher: BlockHasher) -> KVManager:
    """Tables over two empty pools."""
    return KVManager(
        BlockPool(config.num_blocks, "device"),
        BlockPool(config.num_host_blocks, "host"),
        hasher,
        has_prefix_cache=config.enable_prefix_caching,
    )

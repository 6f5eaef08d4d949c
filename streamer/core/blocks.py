"""Blocks: hashes of their content (BlockHasher), and the state of each in a pool (BlockPool).

A full block's hash covers everything before it, the tenant's salt and a per-process secret, so that
equal hashes mean equal prefixes and no collision can be made from outside; the loop hashes prompts,
KVManager blocks that fill later. A BlockPool owns ids, reference counts, the LRU free list and the
hash index of one pool (device or host), each operation O(1) a block, and is called by KVManager
alone. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct

from streamer.errors import InvariantViolated

DIGEST_SIZE = 16  # 128 bits


class BlockHasher:
    """BLAKE2b over (parent hash, tokens), from a root that `secret` keys: 16 to 64 random bytes a
    process, without which no parent is known.

    Commands carry hashes made under the secret: a log of them replays only under the same one.
    """

    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self.secret = secret
        self._struct = Struct(f"={block_size}I")

    def root(self, salt: bytes) -> bytes:
        """The parent of a sequence's first block."""
        return blake2b(salt, digest_size=DIGEST_SIZE, key=self.secret, person=b"root").digest()

    def pack(self, tokens: Sequence[int]) -> bytes:
        """A full block's tokens, as they are hashed and compared."""
        return self._struct.pack(*tokens)

    def next(self, parent: bytes, content: bytes) -> bytes:
        """The hash of a full block of these packed tokens after `parent`."""
        # For 16 tokens one of BLAKE2b's compressions, keyed as well three: 0.5 us a block, not
        # 1.0 (EPYC, 2026-11-22).
        return blake2b(parent + content, digest_size=DIGEST_SIZE).digest()

    def hash_blocks(self, tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """Hashes of all full blocks of `tokens`, first to last."""
        size = self.block_size
        parent = self.root(salt)
        hashes = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = self.next(parent, self.pack(tokens[start : start + size]))
            hashes.append(parent)
        return tuple(hashes)


# The values in `states`, one bit each.
FREE, CACHED, COOLING, PRIVATE, SHARED = 0, 1, 2, 4, 8
_STATE_OF_REFS = bytes([FREE, PRIVATE, *[SHARED] * 254])


class BlockPool:
    """A pool of `num_blocks` blocks, each in exactly one state.

    held     ref count above 0: the number of block tables it is in
    cooling  ref count 0, but a launched plan or copy may still touch it
    free     ref count 0; those with a published hash (cached) keep their content until taken, least
             recently given back first, after all blank ones

    A block is published at most once, and a hash names at most one block.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self.retired = 0
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cool_until: dict[int, int] = {}
        self._cool_queue: deque[tuple[int, int]] = deque()
        self._index: dict[bytes, int] = {}
        self._published: dict[int, tuple[bytes, bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be matched."""
        return len(self._cached)

    @property
    def num_cooling(self) -> int:
        """Blocks that become free when launched plans and copies end."""
        return len(self._cool_until)

    @property
    def num_cooling_cached(self) -> int:
        """Cooling blocks whose content can be matched."""
        return sum(block in self._published for block in self._cool_until)

    def ref_count(self, block: int) -> int:
        """Block tables that hold the block."""
        return self._refs[block]

    def states(self) -> bytes:
        """A byte a block: FREE, CACHED, COOLING, PRIVATE or SHARED."""
        try:
            refs = bytes(self._refs)
        except ValueError:  # a block in more than 255 tables
            refs = bytes(min(r, 255) for r in self._refs)
        states = bytearray(refs.translate(_STATE_OF_REFS))
        for block in self._cached:
            states[block] = CACHED
        for block in self._cool_until:
            states[block] = COOLING
        return bytes(states)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None when fewer are free."""
        blank, cached = self._blank, self._cached
        if n > len(blank) + len(cached):
            return None
        taken = []
        for _ in range(n):
            if blank:
                block = blank.pop()
            else:
                block, _ = cached.popitem(last=False)
                self.withdraw(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; a cached or cooling one is held again."""
        for block in blocks:
            if self._refs[block] == 0 and self._cool_until.pop(block, None) is None:
                if block not in self._cached:
                    raise InvariantViolated(
                        f"{self.name} block {block} is blank: it can't be shared"
                    )
                del self._cached[block]
            self._refs[block] += 1

    def give_back(self, blocks: Sequence[int], after_plan: int) -> None:
        """One reference less to each; unreferenced ones are free once `after_plan` is retired.

        Runs from the last to the first, so that a chain is evicted tail first.
        """
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise InvariantViolated(f"{self.name} block {block} given back without a reference")
            self._refs[block] = refs
            if refs == 0:
                if after_plan <= self.retired:
                    self._free(block)
                else:
                    self._cool_until[block] = after_plan
                    self._cool_queue.append((after_plan, block))

    def retire(self, plan: int) -> None:
        """Free what cooled for plans up to `plan`: they are collected, their copies done."""
        self.retired = max(self.retired, plan)
        queue = self._cool_queue
        while queue and queue[0][0] <= self.retired:
            after, block = queue.popleft()
            if self._cool_until.get(block) == after:
                del self._cool_until[block]
                self._free(block)

    def _free(self, block: int) -> None:
        if block in self._published:
            self._cached[block] = None
        else:
            self._blank.append(block)

    def publish(self, block: int, block_hash: bytes, content: bytes) -> bool:
        """Let `find` return the block of this content; False if another has that hash already."""
        if block_hash in self._index or block in self._published:
            return False
        if self._refs[block] == 0:
            raise InvariantViolated(
                f"{self.name} block {block} has no reference: it can't be published"
            )
        self._index[block_hash] = block
        self._published[block] = (block_hash, content)
        return True

    def withdraw(self, block: int) -> None:
        """Forget the block's hash; the tables that hold the block keep its content."""
        entry = self._published.pop(block, None)
        if entry is not None:
            del self._index[entry[0]]
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def withdraw_hash(self, block_hash: bytes) -> None:
        """Forget the block with that hash, if there is one."""
        block = self._index.get(block_hash)
        if block is not None:
            self.withdraw(block)

    def find(self, block_hash: bytes, content: bytes) -> int | None:
        """The block with that hash, if its content is this too (a collision is a miss)."""
        block = self._index.get(block_hash)
        if block is None or self._published[block][1] != content:
            return None
        return block

    def num_published(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """How many of `blocks`, from the first on, still have these hashes."""
        index = self._index
        for i, block in enumerate(blocks):
            if index.get(hashes[i]) != block:
                return i
        return len(blocks)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Prove conservation against the block tables of all owners, or raise InvariantViolated."""
        held: Counter[int] = Counter()
        for table in owners:
            held.update(table)
        if unknown := [b for b in held if not 0 <= b < self.num_blocks]:
            raise InvariantViolated(f"{self.name} pool of {self.num_blocks}: held are {unknown}")
        refs = self._refs  # of ten thousands of blocks, nearly all 0: tests look after each step
        if len(refs) - refs.count(0) != len(held) or any(refs[b] != n for b, n in held.items()):
            block = next(b for b, n in enumerate(refs) if n != held[b])
            raise InvariantViolated(
                f"{self.name} block {block}: {refs[block]} references, held by {held[block]} tables"
            )
        found = set(self._blank)
        is_blank_published = not found.isdisjoint(self._published)
        found.update(self._cached, self._cool_until, held)
        total = len(self._blank) + len(self._cached) + len(self._cool_until) + len(held)
        if total != self.num_blocks or len(found) != self.num_blocks:
            raise InvariantViolated(
                f"{self.name} pool of {self.num_blocks}: {len(self._blank)} blank + "
                f"{len(self._cached)} cached + {len(self._cool_until)} cooling + {len(held)} held "
                f"= {total}"
            )
        if {b: h for h, b in self._index.items()} != {
            b: h for b, (h, _) in self._published.items()
        }:
            raise InvariantViolated(f"{self.name}: hash index and published blocks disagree")
        if is_blank_published or self._cached.keys() - self._published.keys():
            raise InvariantViolated(f"{self.name}: published and blank, or cached and not")

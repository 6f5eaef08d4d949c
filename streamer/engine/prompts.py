"""Prompts: text and conversations to token ids, and prompts to block hashes, off the loop.

Owns the pool of threads and a few remembered hashes of long prompts. AsyncEngine is the only
caller; the GPU thread never runs any of this.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from streamer.core.blocks import BlockHasher
from streamer.engine.pool import PROMPT_TIMEOUT, Pool
from streamer.errors import EngineDead, InvalidRequest, PoolHung, RequestFailed

NUM_THREADS = 2
# Hashing costs about 0.1 us a token: up to here a submit holds the loop for less than 0.5 ms.
# Longer prompts are hashed in the pool, where they are encoded anyway.
INLINE_TOKENS = 4096
# Characters or tokens that take about 20 ms. Longer ones go one at a time, and tenants take turns:
# a short one always finds a thread (eight texts of 4 MiB kept both for 2.2 s). One that is given up
# keeps its turn until its thread is free: two grammars that took minutes had both.
LONG = 1 << 16
REMEMBERED = 8  # long prompts between their encoding and their submit; megabytes each

T = TypeVar("T")


class Prompts:
    """Encodes in a pool of NUM_THREADS threads; `hashes` is called on the loop.

    limit_s and on_hung are the pool's.

    hasher      None: no prefix is cached
    max_tokens  of a prompt; texts that must have more are refused without encoding them
    """

    def __init__(self, limit_s: float, on_hung: Callable[[PoolHung], None]) -> None:
        self.hasher: BlockHasher | None = None
        self.max_tokens: int | None = None
        self._pool = Pool(NUM_THREADS, limit_s, on_hung)
        self._long = asyncio.Semaphore(NUM_THREADS - 1)
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._hashed: OrderedDict[tuple[bytes, tuple[int, ...]], tuple[bytes, ...]] = OrderedDict()

    async def encode(
        self, make: Callable[[int | None], list[int]], size: int, salt: bytes, keep: int | None
    ) -> list[int]:
        """The token ids that `make` returns, given the most that a prompt may have.

        size  of the text, in characters;  keep  None: all ids; else the last ones, also of a text
              that is too long, whose number `make` does not limit then
        """

        def work() -> tuple[list[int], tuple[bytes, ...]]:
            ids = make(self.max_tokens) if keep is None else make(None)[-keep:]
            return ids, self._hash(ids, salt)

        return self._remember(*await self.run(work, size, salt), salt)

    def hashes(
        self, prompt: tuple[int, ...], salt: bytes, *, is_kept: bool = False
    ) -> tuple[bytes, ...]:
        """Block hashes of a prompt: remembered, or computed here; `is_kept`: for another call."""
        if self.hasher is None:
            return ()
        if len(prompt) > INLINE_TOKENS:
            key = salt, prompt
            known = self._hashed.get(key) if is_kept else self._hashed.pop(key, None)
            if known is not None:
                return known
        return self.hasher.hash_blocks(prompt, salt)

    @property
    def is_hung(self) -> bool:
        """Whether every thread hangs."""
        return self._pool.is_hung

    def close(self, error: EngineDead) -> None:
        """End the threads; waiting and later callers get the error."""
        self._pool.close(error)

    async def run(self, work: Callable[[], T], size: int = 0, salt: bytes = b"") -> T:
        """Other long work on a text, in the same threads.

        size  in characters or tokens;  salt  of the request: the part before a colon names its
              tenant, see LONG
        """
        if size <= LONG:
            return await self._pool.run(work)
        turn = self._turns.setdefault(salt.partition(b":")[0], asyncio.Lock())
        await turn.acquire()
        try:
            await self._long.acquire()
        except asyncio.CancelledError:
            turn.release()
            raise

        def free() -> None:
            self._long.release()
            turn.release()

        return await self._pool.run(work, free)

    async def compiled(self, work: Callable[[], T], field: str, size: int, salt: bytes) -> T:
        """Run work that compiles a grammar, in turns with other long work.

        Where it takes too long, what the request asks for is at fault, not the server's load: the
        time counts from when a thread took it. So that is an InvalidRequest.

        field  of the request, for the error;  size  of its text, in characters
        """
        try:
            return await self.run(work, LONG + size, salt)
        except RequestFailed as error:
            if error.code != PROMPT_TIMEOUT:
                raise
            reason = f"{field} can't be honoured: compiling it took too long"
            raise InvalidRequest(reason, param=field, code="unsupported_grammar") from None

    def _hash(self, ids: list[int], salt: bytes) -> tuple[bytes, ...]:
        if self.hasher is None or len(ids) <= INLINE_TOKENS:
            return ()
        return self.hasher.hash_blocks(ids, salt)

    def _remember(self, ids: list[int], hashes: tuple[bytes, ...], salt: bytes) -> list[int]:
        if hashes:
            self._hashed[salt, tuple(ids)] = hashes
            if len(self._hashed) > REMEMBERED:
                self._hashed.popitem(last=False)
        return ids

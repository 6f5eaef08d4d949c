"""Link: what an ingress knows of one replica, and its connection to it, made again when it is lost.

Owns no stream: cluster.py decides what goes where, and is called back with what comes. Links has
one for each replica of a directory. A replica that is silent for SILENT_S is given up, as one whose
process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec.structs import replace

from streamer.core.plan import StepOutput, StepStats
from streamer.core.sizes import ModelInfo
from streamer.engine.requests import Progress
from streamer.engine.stream import TokenStream
from streamer.errors import StreamerError
from streamer.replicas import messages
from streamer.replicas.connection import Connection
from streamer.replicas.messages import Member
from streamer.replicas.routing import Known

SILENT_S: Final = 4.0  # with CHECK_S and the way elsewhere, streams go on within 5 s
CHECK_S: Final = 0.5
POLL_S: Final = 1.0
CONNECT_S: Final = 5.0
# A replica that was lost may be back so soon with what it has: until then that is not unknown.
AWAY_S: Final = 60.0
MAX_KNOWN: Final = 1 << 18  # blocks, at about 150 bytes
MAX_GONE: Final = 256  # replicas
MAX_LOST: Final = 1 << 14  # requests of each of them

# An id is random digits, and the name of a replica: it may have moved since.
NAMED: Final = re.compile(r"[0-9a-f]{24}([A-Za-z]\w*)$")

Directory = Callable[[], Awaitable[Sequence[Member]]]
log = logging.getLogger(__name__)


class Placed:
    """A live request, and where it runs.

    link      None: it waits for a replica
    hashes    of its prompt's full blocks
    tried     replicas that refused it
    refusals  of these
    taken     set when a replica has taken it
    is_shared  another ingress reads it, and takes it to the same replica where this one is lost
    is_unwanted  it is cancelled, or left: where its replica is lost, it does not go on elsewhere
    num_moves  times that it lost its replica when it had `moved_at` output tokens
    """

    __slots__ = (
        "hashes",
        "is_moved",
        "is_shared",
        "is_unwanted",
        "link",
        "moved_at",
        "num_moves",
        "refusals",
        "stream",
        "taken",
        "tried",
    )

    def __init__(self, stream: TokenStream, hashes: tuple[bytes, ...]) -> None:
        self.stream = stream
        self.hashes = hashes
        self.link: Link | None = None
        self.is_moved = self.is_shared = self.is_unwanted = False
        self.num_moves = 0
        self.moved_at = -1
        self.tried: set[str] = set()
        self.refusals: list[StreamerError] = []
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_behind(self, progress: Progress | None) -> bool:
        """Whether another replica has come further with it, and none here reads it yet."""
        if progress is None or self.stream.num_readers:
            return False
        num_tokens = sum(len(drawn.tokens) for drawn in progress.outputs)
        is_ended = all(drawn.finish is not None for drawn in progress.outputs)
        return is_ended or num_tokens > self.stream.num_output_tokens


class Search:
    """Replicas that are asked for a request."""

    def __init__(self, request_id: str, links: Sequence[Link]) -> None:
        self._request_id = request_id
        self.num_asked = 0
        self.asked: set[str] = set()
        self.ask(links)
        self.found: asyncio.Future[TokenStream | None] = asyncio.get_running_loop().create_future()

    def ask(self, links: Sequence[Link]) -> None:
        """Ask these as well."""
        self.num_asked += len(links)
        for link in links:
            self.asked.add(link.name)
            link.send(messages.Attach(self._request_id))


class Owner(Protocol):
    """The cluster, as its links call it."""

    def on_welcome(self, link: Link, welcome: messages.Welcome) -> None: ...
    def on_message(self, link: Link, message: Any) -> None: ...
    def on_lost(self, link: Link) -> None: ...
    def give_up(self, link: Link) -> None: ...


class Link:
    """One replica.

    placed   what this ingress runs there
    stats    the replica's latest counts;  since  sequences that went there after them
    is_usable  it takes requests: it is connected, and does not drain
    """

    def __init__(self, member: Member, secret: bytes, owner: Owner) -> None:
        self.member = member
        self.placed: dict[str, Placed] = {}
        self.known = Known(MAX_KNOWN)
        self.stats = StepStats()
        self.since = 0
        self.max_num_seqs = 1
        self.is_usable = False
        self._secret = secret
        self._owner = owner
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._silent_s = 0.0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def busyness(self) -> float:
        """Rows that run or wait, and blocks in use, as shares of what it has."""
        stats = self.stats
        rows = stats.running + stats.waiting + stats.preempted + stats.swapped + self.since
        used = stats.blocks_total - stats.blocks_free
        return rows / self.max_num_seqs + used / max(1, stats.blocks_total)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def send(self, message: Any) -> None:
        """To the replica, if it is connected."""
        if self._connection is not None:
            self._connection.send(message)

    def finish(self) -> None:
        """Close the connection when what was sent has gone; it is made again."""
        if self._connection is not None:
            self._connection.finish()

    def close(self) -> None:
        """End the connection, or the attempt to make one."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    def check(self) -> None:
        """Connect if there is no connection; give up a replica that is silent.

        Silence is counted in checks, not by the clock: while this process stands still, or comes
        late to its checks, it hears nothing.
        """
        connection = self._connection
        if connection is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect())
        elif connection.is_heard:
            connection.is_heard, self._silent_s = False, 0.0
        elif connection.is_open:
            self._silent_s += CHECK_S
            if self._silent_s >= SILENT_S:
                log.error("replica %s is silent for %.1f s", self.name, self._silent_s)
                self.is_usable = False
                self._owner.give_up(self)

    async def _connect(self) -> None:
        host, _, port = self.member.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(self._make, host.strip("[]"), int(port))
        except (OSError, TimeoutError, ValueError) as error:
            log.debug("replica %s can't be reached: %s", self.name, error)
            self._connection = None  # uvloop makes a protocol before it has a socket
        finally:
            self._connecting = None

    def _make(self) -> Connection:
        self._connection = Connection(
            self._secret,
            messages.ToIngress,
            lambda connection: None,
            self._on_message,
            self._on_lost,
            listens=False,
        )
        return self._connection

    def _on_message(self, message: Any) -> None:
        if isinstance(message, messages.Welcome):
            info = message.info
            self.known = Known(min(MAX_KNOWN, info.num_blocks + info.num_host_blocks))
            self._owner.on_welcome(self, message)
        else:
            self._owner.on_message(self, message)

    def _on_lost(self) -> None:
        self._connection = None
        self.is_usable = False
        self._owner.on_lost(self)


class Links:
    """A link to each replica. Belongs to the loop that `start` is called on."""

    def __init__(self, directory: Directory, secret: bytes, owner: Owner) -> None:
        self._directory = directory
        self._secret = secret
        self._owner = owner
        self._links: dict[str, Link] = {}
        # What replicas ran, or had kept, that are not connected now: they may come back with it.
        self._lost: dict[str, dict[str, None]] = {}
        self._lost_at: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> list[Link]:
        """Those that can be asked."""
        return [link for link in self._links.values() if link.is_connected]

    @property
    def usable(self) -> list[Link]:
        """Those that take requests."""
        return [link for link in self._links.values() if link.is_usable]

    def lose(self, link: Link, request_ids: Iterable[str]) -> None:
        """What a replica ran goes on elsewhere: it is to forget that when it comes back."""
        lost = self._lost.pop(link.name, {})
        self._lost[link.name] = lost
        _add(lost, request_ids)
        self._lost_at[link.name] = asyncio.get_running_loop().time()
        if len(self._lost) > MAX_GONE:
            oldest = next(iter(self._lost))
            del self._lost[oldest], self._lost_at[oldest]

    def is_away(self, request_id: str) -> bool:
        """Whether the replica that the id names was lost lately, and is not back."""
        lost_at = self._lost_at.get(name_in(request_id))
        return lost_at is not None and asyncio.get_running_loop().time() - lost_at < AWAY_S

    def give_up(self, request_id: str) -> None:
        """Replicas that are not connected are to forget a request when they come back."""
        for lost in self._lost.values():
            _add(lost, [request_id])

    def taken_from(self, link: Link) -> Sequence[str]:
        """What a replica that is back is to forget."""
        self._lost_at.pop(link.name, None)
        return tuple(self._lost.pop(link.name, ()))

    def start(self) -> None:
        """Follow the directory, and connect."""
        self._tasks = [asyncio.create_task(work) for work in (self._poll(), self._check())]

    def close(self) -> None:
        """End every connection, and make no more."""
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()

    async def aclose(self) -> None:
        """The same, and wait until that is done."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self) -> None:
        while True:
            try:
                members = await self._directory()
            except Exception as error:  # whatever stands behind it: it may come back
                log.warning("the directory of replicas did not answer: %s", error)
            else:
                self._see(members)
            await asyncio.sleep(POLL_S)

    def _see(self, members: Sequence[Member]) -> None:
        for member in members:
            link = self._links.get(member.name)
            if link is None:
                link = self._links[member.name] = Link(member, self._secret, self._owner)
                link.check()
            link.member = member
        names = {member.name for member in members}
        for link in list(self._links.values()):
            if link.name not in names and not link.is_connected:
                del self._links[link.name]
                link.close()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for link in list(self._links.values()):
                link.check()


def name_in(request_id: str) -> str:
    """The replica that an id names; empty: none."""
    named = NAMED.search(request_id)
    return named[1] if named else ""


def _add(lost: dict[str, None], request_ids: Iterable[str]) -> None:
    lost |= dict.fromkeys(request_ids)
    while len(lost) > MAX_LOST:
        del lost[next(iter(lost))]


def only_of(placed: Mapping[str, Placed], output: StepOutput) -> StepOutput:
    """A replica's output without that of requests which run elsewhere, or have ended here."""
    named = {each.request_id for each in output.finishes}
    named |= {each.request_id for each in output.notices}
    if placed.keys() >= named.union(output.request_ids, output.prompt_logprobs):
        return output
    ids, choices, tokens = output.request_ids, output.choices, output.tokens
    kept = [i for i, each in enumerate(ids) if each in placed]
    return replace(
        output,
        request_ids=tuple(ids[i] for i in kept),
        choices=tuple(choices[i] for i in kept),
        tokens=tuple(tokens[i] for i in kept),
        logprobs={n: output.logprobs[i] for n, i in enumerate(kept) if i in output.logprobs},
        prompt_logprobs={k: v for k, v in output.prompt_logprobs.items() if k in placed},
        finishes=tuple(each for each in output.finishes if each.request_id in placed),
        notices=tuple(each for each in output.notices if each.request_id in placed),
    )


def is_same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether two replicas give the same answers to what fits both."""
    names = ("name", "dtype", "vocab_size", "max_model_len", "block_size", "quantization")
    return all(getattr(one, name) == getattr(other, name) for name in names)

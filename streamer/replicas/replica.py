"""ReplicaServer: one whole engine, and the ingresses that use it over the network.

Owns the engine, the listening socket, and who follows which request. The engine is the one of
`streamer serve`: its journal, retention, deadlines and flow control are at work here, and an
ingress is a reader of each stream that it follows. Belongs to the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from streamer.engine.base import within
from streamer.engine.engine import AsyncEngine
from streamer.engine.refusals import CLOSE_S
from streamer.replicas import messages
from streamer.replicas.connection import Connection
from streamer.replicas.following import Ingress

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.engine.stream import TokenStream

BEAT_S: Final = 1.0

log = logging.getLogger(__name__)


class Load(msgspec.Struct, frozen=True):
    """How much a replica has to do.

    queued_tokens  of prompts that have not begun to run
    rows, rows_total  that run or wait for it, and that can run at once
    kv_use  share of the KV blocks in use
    """

    queued_tokens: int
    rows: int
    rows_total: int
    kv_use: float


class OpaqueContexts:
    """Contexts of requests, which only an ingress reads (engine/journal/writer.py)."""

    def encode(self, context: object) -> bytes:
        """The bytes that came."""
        if not isinstance(context, bytes):
            raise TypeError(f"{type(context).__name__} came from no ingress")
        return context

    def decode(self, data: bytes) -> object:
        """The bytes, to be sent."""
        return data

    def restored(self, stream: TokenStream) -> None:
        """Nothing: the ingress that asks for it counts it."""


class ReplicaServer:
    """One replica. `address` is known once it is started; `journal` is a folder of its own."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        journal = None if config.journal is None else str(Path(config.journal, name))
        self.name = name
        self.address = ""
        self.engine = AsyncEngine.from_config(replace(config, journal=journal))
        self.engine.contexts = OpaqueContexts()
        self.followers: defaultdict[str, set[Ingress]] = defaultdict(set)
        self._secret = secret
        self._host, self._port = host, port
        self._ingresses: set[Ingress] = set()
        self._listener: asyncio.Server | None = None
        self._beat: asyncio.TimerHandle | None = None

    @property
    def is_dead(self) -> bool:
        """Whether its engine died: the process is of no use any more."""
        return self.engine.is_dead

    @property
    def load(self) -> Load:
        """What it has to do now."""
        engine = self.engine
        stats, waiting = engine.stats, [s for s in engine.live() if not s.is_started]
        rows = stats.running + stats.preempted + stats.swapped
        used = stats.blocks_total - stats.blocks_free
        return Load(
            sum(s.num_prompt_tokens for s in waiting),
            rows + sum(s.params.num_sequences for s in waiting),
            engine.config.max_num_seqs,
            used / max(1, stats.blocks_total),
        )

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model, restore what the journal has, and listen; raises what prevents that."""
        loop = asyncio.get_running_loop()
        await self.engine.start()
        self._listener = await loop.create_server(self._accept, self._host, self._port)
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        self._beat = loop.call_later(BEAT_S, self._on_beat)

    async def drain(self, deadline_s: float) -> None:
        """Take no requests, and let ingresses take theirs elsewhere; then wait for the rest."""
        self.engine.is_draining = True
        for ingress in list(self._ingresses):
            ingress.send(messages.Draining())
        await within(deadline_s, self.engine.idle())
        for ingress in list(self._ingresses):
            ingress.finish()
        await self.engine.drain(0.0)

    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """End it: ingresses take what they follow elsewhere."""
        if self._beat is not None:
            self._beat.cancel()
        if self._listener is not None:
            self._listener.close()
        self._close_connections()
        await self.engine.aclose(deadline_s)

    def _close_connections(self) -> None:
        for ingress in list(self._ingresses):
            ingress.close()

    # ------------------------------------------------------------ ingresses

    def _accept(self) -> Connection:
        ingress = Ingress(self)

        def opened(connection: Connection) -> None:
            self._ingresses.add(ingress)
            engine = self.engine
            ingress.send(messages.Welcome(self.name, engine.info, engine.is_draining))

        def lost() -> None:
            self._ingresses.discard(ingress)
            ingress.lost()

        ingress.connection = Connection(
            self._secret, messages.ToReplica, opened, ingress.on_message, lost, listens=True
        )
        ingress.connection.on_drained = ingress.drained
        return ingress.connection

    def forget(self, request_id: str, *, asked_by: Ingress) -> None:
        """Keep nothing of a request, here and at the other ingresses."""
        self.engine.forget(request_id)
        for ingress in self._ingresses - {asked_by}:
            ingress.send(messages.Forget(request_id))

    def update_hold(self, request_id: str) -> None:
        """Pause a request whose readers lag at every ingress that follows it."""
        stream, followers = self.engine.get(request_id), self.followers.get(request_id)
        if stream is not None:
            held = [request_id in ingress.held for ingress in followers or ()]
            stream.hold(bool(held) and all(held))

    def _on_beat(self) -> None:
        if self.engine.is_dead:
            self._close_connections()
        for ingress in list(self._ingresses):
            ingress.send_news()
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._on_beat)

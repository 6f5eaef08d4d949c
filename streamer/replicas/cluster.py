"""Cluster: an engine whose model runs in replicas, which other processes are.

Has the streams of an ingress as any engine has them, and decides where each request runs. One whose
replica is lost goes on in another from the tokens that are here, the same. Knows nothing that other
ingresses must know: what they submitted is found by asking the replicas.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec.structs import replace

from streamer.config import Config
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, Finish, FinishReason, StepOutput, StepStats
from streamer.core.view import ViewQuery
from streamer.engine.base import Engine, within
from streamer.engine.core import Tokenizer
from streamer.engine.refusals import (
    CLOSE_S,
    SHUTDOWN,
    cut_off,
    ended_error,
    fresh_copy,
    restarting,
)
from streamer.engine.requests import GenerateRequest, QueueNeeds, limits_of, with_end
from streamer.engine.stats import total
from streamer.engine.stream import TokenStream
from streamer.errors import (
    ConfigError,
    EngineDead,
    Overloaded,
    RequestFailed,
    StreamerError,
)
from streamer.replicas import messages
from streamer.replicas.link import Directory, Link, Links, Placed, Search, is_same, name_in, only_of
from streamer.replicas.routing import choose, choose_alike

FIND_S: Final = 3.0
SETTLE_S: Final = 10.0
CANCEL_S: Final = 2.0
# A request waits for so long where no replica is left to run it.
ORPHAN_S: Final = 60.0
# A request that ends its replica would end one after another.
MAX_MOVES: Final = 5  # without a token in between
ATTACH_S: Final = 5.0  # that a stream which was found waits for its reader at least
NO_REPLICA_RETRY_S: Final = 2.0
log = logging.getLogger(__name__)


class _Readers:
    """What a stream's readers do here (engine/flow.py): the replica may have others elsewhere."""

    def __init__(self) -> None:
        self.cluster: Cluster

    def cancel(self, request_id: str) -> None:
        """They are gone for good."""
        self.cluster.leave(request_id)

    def hold(self, request_id: str, is_held: bool) -> None:
        """They lag, or do so no longer."""
        self.cluster.hold(request_id, is_held)


class Cluster(Engine):
    """The replicas of one model.

    directory  returns the replicas that there are; asked once a second. One that it leaves out is
               not gone for that: only its connection says so
    secret     which all replicas and ingresses share
    """

    def __init__(self, config: Config, directory: Directory, secret: bytes) -> None:
        readers = _Readers()
        super().__init__(config, readers)
        readers.cluster = self
        self._secret = secret
        self._links = Links(directory, secret, self)
        self._placed: dict[str, Placed] = {}
        self._orphans: dict[str, asyncio.TimerHandle] = {}
        self._searches: dict[str, Search] = {}
        self._queries: deque[ViewQuery] = deque()
        self._viewed: Link | None = None
        self._settling: dict[int, set[str]] = {}
        self._settled = asyncio.Event()
        self._num_settles = 0
        self._is_started = asyncio.Event()
        self._loaded: Tokenizer | None = None

    # ------------------------------------------------------------ life

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes requests."""
        return self._state == "ready" and bool(self._links.usable)

    @property
    def counts(self) -> Mapping[str, StepStats]:
        """The latest counts of each replica."""
        return {link.name: link.stats for link in self._links.connected}

    @property
    def stats(self) -> StepStats:
        """The sums of all replicas' counts."""
        return total(self.counts.values())

    @property
    def epoch(self) -> str:
        """The same at every ingress: any of them finds what another one submitted."""
        return blake2b(self._secret, digest_size=8, person=b"epoch").hexdigest()

    def unavailable(self) -> StreamerError:
        """Why no request is taken."""
        if self._state != "ready":
            return super().unavailable()
        return Overloaded(
            "no replica takes requests now", retry_after_s=NO_REPLICA_RETRY_S, code="no_replica"
        )

    async def start(self) -> None:
        """Load the tokenizer, and return when the first replica takes requests."""
        from streamer.build import loaders

        if self._state == "new":
            self._state = "loading"
            self._loaded = await asyncio.to_thread(loaders(self.config)[1])
            self._links.start()
        await self._is_started.wait()
        if self._state != "ready":
            raise ended_error(self.death)

    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """Leave the replicas: what can be resumed runs on there until its time is up."""
        if self._state not in ("dead", "closed"):
            self._close(None)
        await self._links.aclose()

    async def drain(self, deadline_s: float) -> None:
        """Take no requests; let live ones finish for `deadline_s`.

        What another ingress can resume ends here with RESTART then, and the rest as in AsyncEngine.
        """
        self.is_draining = True
        if await within(deadline_s, self._streams.wait_idle()):
            return
        self._put_off()
        for stream in self._streams.live():
            stream.cut_off_by = SHUTDOWN
            self.cancel(stream.request_id)
        if not await within(CANCEL_S, self._streams.wait_idle()):
            self._streams.fail_all(cut_off())

    def _put_off(self) -> None:
        for stream in self._streams.live():
            placed = self._placed.get(stream.request_id)
            if stream.is_durable and placed is not None and placed.link is not None:
                self._end(placed, restarting())

    def _close(self, cause: BaseException | None) -> None:
        super()._close(cause)
        self._is_started.set()

    def _die(self, cause: Exception) -> None:
        self._close(cause)
        self._links.close()

    # ------------------------------------------------------------ requests

    def require_room(self, needs: QueueNeeds) -> None:
        """See Engine; by what this ingress has submitted: each replica looks at all it has."""
        num = max(1, len(self._links.usable))
        if self._sizes is not None:
            rows = num * self._sizes.max_num_seqs
            self._streams.require_room(needs, num * self.config.max_queue, rows)

    def cancel(self, request_id: str) -> None:
        """See Engine."""
        placed = self._placed.get(request_id)
        if placed is not None:
            self._unwant(placed, messages.Cancel(request_id, placed.stream.cut_off_by))

    def leave(self, request_id: str) -> None:
        """The readers here are gone: it ends, unless it has others elsewhere."""
        placed = self._placed.get(request_id)
        if placed is not None:
            self._unwant(placed, messages.Leave(request_id))

    def hold(self, request_id: str, is_held: bool) -> None:
        """See Engine."""
        self._streams.hold(request_id, is_held)
        placed = self._placed.get(request_id)
        if placed is not None and placed.link is not None:
            placed.link.send(messages.Hold(request_id, is_held))

    def forget(self, request_id: str) -> None:
        """See Engine: here, in every replica, and at every other ingress."""
        self._streams.forget(request_id)
        self._links.give_up(request_id)
        for link in self._links.connected:
            link.send(messages.Forget(request_id))
        if (placed := self._placed.get(request_id)) is not None:
            self._unwant(placed)

    async def recorded(self, stream: TokenStream | None = None) -> None:
        """Wait until a replica has taken `stream`, or has done all that was asked before."""
        if stream is not None:
            placed = self._placed.get(stream.request_id)
            if placed is not None:
                await asyncio.shield(placed.taken)
            elif stream.error is not None:
                raise fresh_copy(stream.error)
            return
        self._num_settles += 1
        number = self._num_settles
        self._settling[number] = {link.name for link in self._links.connected}
        for link in self._links.connected:
            link.send(messages.Settle(number))
        try:
            async with asyncio.timeout(SETTLE_S):
                while self._settling[number]:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("a replica did not answer within %g s", SETTLE_S)
        finally:
            del self._settling[number]

    def named(self, request_id: str, prompt: Sequence[int], cache_salt: str) -> str:
        """The id, and the name of the replica that is the best for the prompt now."""
        hashes = self._prompts.hashes(tuple(prompt), cache_salt.encode(), is_kept=True)
        link = choose(self._links.usable, hashes)
        return request_id if link is None else request_id + link.name

    async def find(self, request_id: str) -> TokenStream | None:
        """The stream of a request, which any ingress may have submitted.

        Overloaded where a replica that may have it does not say so.
        """
        stream = self.get(request_id)
        if stream is not None:
            return stream
        search = self._searches.get(request_id)
        if search is None:
            named = self._link_in(request_id)
            links = self._links.connected if named is None else [named]
            if not links:
                raise self.unavailable()
            search = self._searches[request_id] = Search(request_id, links)
        if await within(FIND_S, asyncio.shield(search.found)):
            stream = search.found.result()
            if stream is not None or not self._links.is_away(request_id):
                return stream
        self._searches.pop(request_id, None)
        if (stream := self.get(request_id)) is not None:
            return stream
        text = "a replica that may have it does not answer now"
        raise Overloaded(text, retry_after_s=NO_REPLICA_RETRY_S, code="no_replica")

    # ------------------------------------------------------------ where it runs

    def _begin(self, stream: TokenStream, request: GenerateRequest, add: Add) -> None:
        placed = self._placed[stream.request_id] = Placed(stream, add.block_hashes)
        self._place(placed, request)

    def _place(self, placed: Placed, request: GenerateRequest | None = None) -> bool:
        """Send a request to a replica; False: there is none for it.

        request  where it is new; without it goes on from what its stream has
        """
        untried = [each for each in self._links.usable if each.name not in placed.tried]
        if placed.is_shared:
            link = choose_alike(untried, placed.stream.request_id)
        else:
            parent = self._placed.get(placed.stream.request.share_with or "")
            link = None if parent is None else parent.link
            if parent is None and not placed.is_moved:
                link = self._link_in(placed.stream.request_id)
            if link not in untried:
                link = choose(untried, placed.hashes)
        if link is None:
            return False
        stream, context = placed.stream, None
        if request is None:
            request = replace(stream.request, progress=stream.progress)
        if request.context is not None and self.contexts is not None:
            context = self.contexts.encode(request.context)
        placed.link = link
        link.placed[stream.request_id] = placed
        link.since += stream.params.num_sequences
        link.known.add(placed.hashes)
        link.send(messages.Submit(replace(request, context=None), context))
        if stream.is_paused:
            link.send(messages.Hold(stream.request_id, True))
        return True

    def _link_in(self, request_id: str) -> Link | None:
        """The replica that an id names."""
        name = name_in(request_id)
        found = [link for link in self._links.connected if link.name == name]
        return found[0] if found else None

    def _move(self, placed: Placed) -> None:
        """Let a request go on in another replica, as soon as there is one."""
        request_id, num_tokens = placed.stream.request_id, placed.stream.num_output_tokens
        placed.link, placed.is_moved = None, True
        placed.tried.clear()
        if placed.is_unwanted or placed.stream.is_finished:
            self._end_cancelled(placed)
            return
        placed.num_moves = placed.num_moves + 1 if num_tokens == placed.moved_at else 1
        placed.moved_at = num_tokens
        if placed.num_moves > MAX_MOVES:
            text = f"{MAX_MOVES} replicas were lost before the answer had its next token"
            self._end(placed, RequestFailed(text))
            return
        if not self._place(placed) and request_id not in self._orphans:
            self._orphans[request_id] = asyncio.get_running_loop().call_later(
                ORPHAN_S, lambda: self._end(placed, self.unavailable())
            )

    def _unwant(self, placed: Placed, message: Any = None) -> None:
        """Let its replica end a request; where that is lost, it does not go on elsewhere."""
        placed.is_unwanted = True
        if placed.link is None:
            self._end_cancelled(placed)
        elif message is not None:
            placed.link.send(message)

    def _end_cancelled(self, placed: Placed) -> None:
        """Cancel a request that runs nowhere."""
        stream = placed.stream
        finishes = tuple(
            Finish(stream.request_id, choice, FinishReason.CANCELLED, len(stream.token_ids(choice)))
            for choice, finish in enumerate(stream.finishes)
            if finish is None
        )
        self._streams.distribute(StepOutput(0, finishes=finishes, stats=self.stats))
        self._drop(placed)

    def _end(self, placed: Placed, error: StreamerError) -> None:
        """End a request with an error: nothing more comes of it."""
        if not placed.taken.done():
            placed.taken.set_exception(error)
            placed.taken.exception()  # seen, in case no caller waits for it
        self._drop(placed)
        if not placed.stream.is_finished:
            self._streams.fail(placed.stream, error, has_ended=True)

    def _drop(self, placed: Placed) -> None:
        """A request is over here."""
        request_id = placed.stream.request_id
        self._placed.pop(request_id, None)
        self._streams.left(request_id)
        if placed.link is not None:
            placed.link.placed.pop(request_id, None)
        if (timer := self._orphans.pop(request_id, None)) is not None:
            timer.cancel()
        if not placed.taken.done():
            placed.taken.set_result(None)

    # ------------------------------------------------------------ called by links

    def on_welcome(self, link: Link, welcome: messages.Welcome) -> None:
        """A replica is there, perhaps again."""
        info = welcome.info
        if self._loaded is None or welcome.name != link.name:  # or another one at its address
            link.close()
            return
        if self._info is None:
            info = with_end(info, self._loaded.eos_token_id)
            self._use(self._loaded, info, BlockHasher(info.block_size, secrets.token_bytes(32)))
        elif not is_same(self._info, info):
            error = ConfigError(f"replica {link.name} serves another model: {info.name}")
            log.error("%s", error.message)
            link.close()
            return
        link.max_num_seqs = self.config.max_num_seqs
        taken = self._links.taken_from(link)
        link.send(messages.Begin([each for each in taken if each not in self._orphans]))
        link.is_usable = not welcome.is_draining
        if not link.is_usable:
            return
        if self._state == "loading":
            self._state = "ready"
            self._is_started.set()
        for request_id in list(self._orphans):
            if self._place(self._placed[request_id]):
                self._orphans.pop(request_id).cancel()
        self._ask_again()

    def on_message(self, link: Link, message: Any) -> None:
        """What a replica says."""
        match message:
            case messages.News():
                self._on_news(link, message)
            case messages.Answer():
                self._on_answer(link, message)
            case messages.Found():
                self._on_found(link, message)
            case messages.Left(request_id):
                if (placed := link.placed.get(request_id)) is not None:
                    placed.stream.is_kept = False
                    self._end(placed, restarting())
            case messages.Shared(request_id):
                if (placed := link.placed.get(request_id)) is not None:
                    placed.is_shared = True
            case messages.Settled(number):
                self._on_settled(link, number)
            case messages.Seen(view):
                if link is self._viewed and self._queries:
                    self._queries.popleft()
                    self.view_feed.on_view(view)
            case messages.Draining():
                self._on_draining(link)
            case messages.Forget(request_id):
                self._streams.forget(request_id)
                if (placed := self._placed.get(request_id)) is not None:
                    self._unwant(placed)

    def on_lost(self, link: Link) -> None:
        """A replica is gone, or can't be heard: what it ran goes on elsewhere."""
        if self._state in ("dead", "closed"):
            return
        link.known.clear()
        placed, link.placed = link.placed, {}
        self._links.lose(link, placed)
        if placed:
            log.warning("%d requests of replica %s go on elsewhere", len(placed), link.name)
        for each in placed.values():
            self._move(each)
        for number in list(self._settling):
            self._on_settled(link, number)
        for request_id in list(self._searches):
            self._on_found(link, messages.Found(request_id))
        if link is self._viewed:
            self._viewed = None
            self._ask_again()

    def give_up(self, link: Link) -> None:
        """Let all that a connected replica runs go on elsewhere; it drops that when it hears so."""
        names = list(link.placed)
        self.on_lost(link)
        link.send(messages.Taken([name for name in names if name not in self._orphans]))
        link.finish()

    # ------------------------------------------------------------ what comes

    def _on_news(self, link: Link, news: messages.News) -> None:
        output = only_of(link.placed, news.output)
        link.stats, link.since = output.stats, 0
        if output.request_ids or output.finishes or output.notices or output.prompt_logprobs:
            self._streams.distribute(output)
        for finish in output.finishes:
            placed = link.placed.get(finish.request_id)
            if placed is not None and placed.stream.is_finished:
                self._learn(link, placed.stream, placed.hashes)
                self._drop(placed)
        for request_id, problem in news.errors.items():
            if (placed := link.placed.get(request_id)) is not None:
                self._end(placed, problem.error)

    def _learn(self, link: Link, stream: TokenStream, hashes: tuple[bytes, ...]) -> None:
        """The replica has the blocks of an answer, with which the next turn's prompt begins."""
        hasher = self._prompts.hasher
        if hasher is None or stream.params.n > 1:
            return
        size, begin = hasher.block_size, len(hashes) * hasher.block_size
        tokens = (*stream.prompt[begin:], *stream.token_ids(0))
        parent = hashes[-1] if hashes else hasher.root(stream.request.cache_salt.encode())
        found = []
        for start in range(0, len(tokens) - size, size):  # the last token is never computed
            parent = hasher.next(parent, hasher.pack(tokens[start : start + size]))
            found.append(parent)
        link.known.add((*hashes, *found))

    def _on_answer(self, link: Link, answer: messages.Answer) -> None:
        placed = link.placed.get(answer.request_id)
        if placed is None:
            return
        if answer.problem is None:
            if not placed.taken.done():
                placed.taken.set_result(None)
            return
        error = answer.problem.error
        del link.placed[answer.request_id]
        placed.link = None
        placed.tried.add(link.name)
        placed.refusals.append(error)
        if placed.is_unwanted:
            self._end_cancelled(placed)
            return
        can_try = isinstance(error, (Overloaded, EngineDead))
        if can_try and (self._place(placed, None if placed.is_moved else placed.stream.request)):
            return
        if can_try and placed.is_moved:
            self._move(placed)
            return
        placed.stream.is_kept = False
        self._end(placed, min(placed.refusals, key=_retry_s))

    def _on_found(self, link: Link, found: messages.Found) -> None:
        search, request_id = self._searches.get(found.request_id), found.request_id
        if found.request is not None:
            self._adopt(link, found, found.request)
        if search is None or link.name not in search.asked:
            return  # it took too long to say so: it counts as a reader there
        search.asked.discard(link.name)
        stream = self.get(request_id)
        is_ended = stream is not None and stream.is_finished
        if not is_ended and not search.asked and search.num_asked == 1:
            # It may have moved, and have been begun again by a replica that is back.
            search.ask([each for each in self._links.connected if each is not link])
        if is_ended or not search.asked:
            del self._searches[request_id]
            search.found.set_result(stream)

    def _adopt(self, link: Link, found: messages.Found, request: GenerateRequest) -> None:
        """Take up a request that another ingress submitted."""
        if self._sizes is None:
            return
        request_id, placed = request.request_id, self._placed.get(request.request_id)
        if placed is not None and placed.link is not link:  # it runs twice
            is_behind = placed.is_behind(request.progress)
            older = placed.link if is_behind else link
            if older is not None:
                older.send(messages.Taken([request_id]))
            if is_behind:
                placed.stream.is_kept = False
                self._end(placed, restarting())
        if self._streams.is_taken(request_id):
            return
        context: object = None
        if found.context is not None and self.contexts is not None:
            context = self.contexts.decode(found.context)
        if request.detach_s is not None:
            request = replace(request, detach_s=max(ATTACH_S, request.detach_s))
        request = replace(request, context=context)
        limits = limits_of(request, self.config)
        stream = TokenStream(request, limits, self._control, self._sizes.token_bytes, self._special)
        if found.error is not None:
            stream.fail(found.error.error)
        hashes = self._prompts.hashes(request.prompt, request.cache_salt.encode())
        self._learn(link, stream, hashes)
        if stream.is_finished:
            age_s = time.time() - stream.created - (stream.timing.total_s or 0.0)
            self._streams.retain(stream, request.tenant, max(0.0, age_s))
            return
        placed = self._placed[stream.request_id] = Placed(stream, hashes)
        placed.link, placed.is_moved, placed.is_shared = link, True, True
        placed.taken.set_result(None)
        link.placed[stream.request_id] = placed
        self._streams.add(stream, request.queue_needs)
        stream.miss()  # its reader comes next, or never

    def _on_draining(self, link: Link) -> None:
        """A replica is to end: take what it runs elsewhere, if there is another one."""
        link.is_usable = False
        if self._links.usable:
            self.give_up(link)

    def _on_settled(self, link: Link, number: int) -> None:
        if number in self._settling:
            self._settling[number].discard(link.name)
            self._settled.set()

    # ------------------------------------------------------------ views

    def _query(self, query: ViewQuery) -> None:
        """Ask the first replica: a page shows one scheduler."""
        if self._state in ("new", "loading"):
            raise self.unavailable()
        self._queries.append(query)
        if self._viewed is not None:
            self._viewed.send(messages.View(query))
        else:
            self._ask_again()

    def _ask_again(self) -> None:
        if self._viewed is None:
            self._viewed = min(self._links.usable, key=lambda link: link.name, default=None)
            if self._viewed is not None:
                for query in self._queries:
                    self._viewed.send(messages.View(query))


def _retry_s(error: StreamerError) -> float:
    return error.retry_after_s if isinstance(error, Overloaded) else float("inf")

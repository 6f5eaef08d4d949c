"""Tickets: how a browser, which can't set the headers of a handshake, proves its key.

POST /v1/tickets answers a secret; offered as the subprotocol `streamer.ticket.SECRET` it opens one
socket for the key that asked for it, within TICKET_S. Only its digest is kept. app.py
issues tickets and the guard redeems them, both on the loop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from starlette.types import Scope

from streamer.errors import NotAuthenticated, Overloaded, RateLimited
from streamer.server.admission import digest
from streamer.server.openai.fields import Reader

PREFIX: Final = "streamer.ticket."
TICKET_S: Final = 30
MAX_PER_KEY: Final = 64  # unused
MAX_TICKETS: Final = 1024  # of all keys


class TicketRequest(msgspec.Struct):
    """An empty object."""


class TicketAnswer(msgspec.Struct, frozen=True):
    """A ticket: offered as the subprotocol `streamer.ticket.TICKET`, it opens one WebSocket."""

    ticket: str
    expires_in_s: int = TICKET_S


READER: Final = Reader({TicketRequest: {}})


class _Kept(NamedTuple):
    tenant: str
    end: float  # on the clock


class Tickets:
    """The tickets that were issued and not used yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, _Kept] = {}  # by digest, the oldest first: all have the same lifetime

    def issue(self, tenant: str) -> str:
        """A new secret for this key; where no keys are required, one that is never checked.

        RateLimited when the key has too many unused, Overloaded when all keys together do.
        """
        secret = secrets.token_urlsafe(32)
        if not tenant:
            return secret
        now = self._clock()
        self._forget(now)
        ends = [kept.end for kept in self._kept.values() if kept.tenant == tenant]
        if len(ends) >= MAX_PER_KEY:
            raise RateLimited(
                f"{MAX_PER_KEY} tickets of this key wait to be used", retry_after_s=ends[0] - now
            )
        if len(self._kept) >= MAX_TICKETS:
            first = next(iter(self._kept.values()))
            raise Overloaded(
                f"{MAX_TICKETS} tickets wait to be used", retry_after_s=first.end - now
            )
        self._kept[digest(secret)] = _Kept(tenant, now + TICKET_S)
        return secret

    def redeem(self, secret: str) -> str:
        """The tenant it was issued to, once; NotAuthenticated if it is used, expired or unknown.

        The look-up is by digest: how long it takes says nothing about the secrets that exist.
        """
        self._forget(self._clock())
        kept = self._kept.pop(digest(secret), None)
        if kept is None:
            raise NotAuthenticated(
                f"the ticket is not known here: one opens one socket, within {TICKET_S} s"
            )
        return kept.tenant

    def _forget(self, now: float) -> None:
        while self._kept:
            first = next(iter(self._kept))
            if self._kept[first].end > now:
                return
            del self._kept[first]


def take_tickets(scope: Scope) -> list[str]:
    """The secrets that a handshake offers, removed from its scope: no route sees them."""
    offered: list[str] = scope.get("subprotocols") or []
    tickets = [p.removeprefix(PREFIX) for p in offered if p.startswith(PREFIX)]
    if tickets:
        scope["subprotocols"] = [p for p in offered if not p.startswith(PREFIX)]
        scope["headers"] = [h for h in scope["headers"] if h[0] != b"sec-websocket-protocol"]
    return tickets

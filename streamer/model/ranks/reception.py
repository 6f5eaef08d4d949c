"""Reception: where the other ranks connect while a set starts, among whoever else reaches the port.

Each connection proves itself within seconds and in its own time, so that a slow or silent stranger
holds up none. What a stranger sends is bounded and never decoded. Called by leader.py.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Iterator

import msgspec

from streamer import handshake

log = logging.getLogger(__name__)

PROVE_S = 5.0
MAX_GUESTS = 128  # connections that have not proved themselves; beyond it the oldest is closed


class _Guest(msgspec.Struct, kw_only=True):
    """A connection that has not proved itself."""

    connection: socket.socket
    challenge: bytes
    until: float
    data: bytes = b""


class Reception:
    """Listens at an address until it is closed.

    port  where, if it was 0
    """

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        """OSError where the address is not this machine's, or the port is taken."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[int, _Guest] = {}  # the oldest first
        self._has_warned = False

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *error: object) -> None:
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        self._selector.close()
        self._listener.close()

    def arrivals(self, wait_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Indices and connections of ranks that have proved themselves, within about `wait_s`."""
        for key, _ in self._selector.select(wait_s):
            guest = self._guests.get(key.fd)
            if guest is None:
                self._let_in()
            elif (index := self._hear(guest)) is not None:
                yield index, guest.connection
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.until < now]:
            self._dismiss(guest)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            until = time.monotonic() + PROVE_S
            guest = _Guest(connection=connection, challenge=handshake.challenge(), until=until)
            if len(self._guests) >= MAX_GUESTS:
                self._dismiss(next(iter(self._guests.values())))
            self._guests[connection.fileno()] = guest
            self._selector.register(connection, selectors.EVENT_READ)
            connection.setblocking(False)
            try:
                connection.sendall(guest.challenge)
            except OSError:
                self._dismiss(guest)

    def _hear(self, guest: _Guest) -> int | None:
        """The guest's index, when it has proved itself."""
        size = handshake.HELLO.size
        try:
            data = guest.connection.recv(size - len(guest.data))
            guest.data += data
            if data and len(guest.data) < size:
                return None
            found = (
                handshake.check_hello(self._secret, guest.challenge, guest.data) if data else None
            )
            if found is not None:
                guest.connection.sendall(found[1])
                self._forget(guest)
                return found[0]
        except OSError:
            data = b""
        if data and not self._has_warned:
            self._has_warned = True
            log.warning("refused a connection to the ranks: it has another secret")
        self._dismiss(guest)
        return None

    def _dismiss(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection.fileno()]

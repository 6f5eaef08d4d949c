"""Directory: which replicas there are, under which names and at which addresses.

A replica claims the first free name, so that one that starts again takes the place of a dead one,
its journal included, and renews its lease. Pure: time is an argument. under_ray.py keeps one for a
whole cluster.
"""

from __future__ import annotations

import itertools
from typing import Final

import msgspec

RENEW_S: Final = 1.0
# Longer than an ingress waits for a replica that is silent (link.py: SILENT_S): by then its streams
# are elsewhere.
LEASE_S: Final = 5.0


class Lease(msgspec.Struct):
    """A name, while `holder` renews it; no address: the model still loads."""

    holder: str
    until: float
    address: str = ""


class Directory:
    """Names and addresses.

    is_restarted  one was lost: the replicas that live have names which are not known yet
    """

    def __init__(self, now: float, *, is_restarted: bool = False) -> None:
        self._leases: dict[str, Lease] = {}
        self._open_at = now + LEASE_S if is_restarted else now

    def claim(self, holder: str, now: float) -> str | None:
        """A free name, for LEASE_S; None: ask again later, not all names are known."""
        if now < self._open_at:
            return None
        self._expire(now)
        name = next(n for n in map("r{}".format, itertools.count()) if n not in self._leases)
        self._leases[name] = Lease(holder, now + LEASE_S)
        return name

    def renew(self, name: str, holder: str, address: str, now: float) -> bool:
        """Hold a name for LEASE_S more; False: another has it, this replica must end."""
        self._expire(now)
        lease = self._leases.setdefault(name, Lease(holder, now))
        if lease.holder != holder:
            return False
        lease.until, lease.address = now + LEASE_S, address
        return True

    def release(self, name: str, holder: str) -> None:
        """Give a name back."""
        lease = self._leases.get(name)
        if lease is not None and lease.holder == holder:
            del self._leases[name]

    def members(self, now: float) -> dict[str, str]:
        """Addresses of the replicas that take requests, by name."""
        self._expire(now)
        return {name: lease.address for name, lease in self._leases.items() if lease.address}

    def _expire(self, now: float) -> None:
        ended = [name for name, lease in self._leases.items() if lease.until < now]
        for name in ended:
            del self._leases[name]

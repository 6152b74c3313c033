"""The claims that this host has in the remote store: other hosts wait for what it computes.

Owns: which keys are claimed, and when a claim is withdrawn. Does not own the claims of clients (`claims`), nor for how
long another host waits (`fetches`).

    taken ─ written to the store → ends by itself: the entry is there
          └ given up by the last client, or stored but not to be written → withdrawn, so that nobody waits in vain

Limits: a claim of a daemon that was killed ends by itself. A key that is claimed again while its claim is being
withdrawn may lose the new claim: another host may compute it too.
"""

from __future__ import annotations

from typing import Final

from ..core.effects import WithdrawClaim
from ..core.outbox import StoreOutbox
from .link import RemoteLink

HELD_MAX: Final = 4096
"""Claims that are known at once. The oldest is forgotten, and ends by itself."""


class HostClaims:
    """The claims of this host in one store."""

    def __init__(self, link: RemoteLink, outbox: StoreOutbox) -> None:
        self._link = link
        self._outbox = outbox
        self._held: dict[bytes, None] = {}

    def taken(self, key: bytes) -> None:
        """The store has given this host the claim on the key."""
        self._held.pop(key, None)
        self._held[key] = None
        if len(self._held) > HELD_MAX:
            del self._held[next(iter(self._held))]

    def written(self, key: bytes) -> None:
        """The store has the key's entry."""
        self._held.pop(key, None)

    def given_up(self, key: bytes) -> None:
        """No entry of the key comes to the store. Withdraws the claim, if this host has it."""
        if key in self._held:
            del self._held[key]
            if self._link.breaker.closed:
                self._outbox.add(WithdrawClaim(key))

    def withdrawn(self, withdrawn: bool | None) -> None:
        """A claim was withdrawn, or could not be: it ends by itself then."""
        if withdrawn:
            self._outbox.counters.remote["withdrawn"] += 1

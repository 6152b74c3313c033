"""What fetches and writes share: the breaker of the remote store, its speed, and what entries cost to compute.

Owns: what an error says about the store, and the announcements when a breaker opens or closes.

    error                       what follows
    of one object               nothing
    TierFull, TierReadOnly      `taking` opens at once: the store is read, and writes are tried from time to time
    TierRefused                 `breaker` opens at once: the store is left alone
    others                      `breaker` opens after a few in a row; at the daemon's start at once
"""

from __future__ import annotations

from ...errors import TensordError, TierFull, TierReadOnly, TierRefused, TierTooLarge
from ..core.effects import RemoteTurned
from ..core.limits import StoreLimits
from ..core.outbox import StoreOutbox
from .breaker import Breaker
from .speed import ComputeCosts, RemoteSpeed


class RemoteLink:
    """The daemon's knowledge of one remote store, and the limits in force."""

    def __init__(self, outbox: StoreOutbox, limits: StoreLimits) -> None:
        self.limits = limits
        self.breaker = Breaker()
        self.taking = Breaker()
        """Open while the store takes no writes. Its probes are writes and, unless it is full, removals."""
        self.full = False
        """Whether `taking` was opened because the store has no room."""
        self._reached = False
        self.speed = RemoteSpeed()
        self.costs = ComputeCosts()
        self._outbox = outbox

    def succeeded(self) -> None:
        """The store has answered."""
        first, self._reached = not self._reached, True
        if self.breaker.succeeded():
            self._outbox.add(RemoteTurned("", first=first))

    def failed(self, error: TensordError, now: float, *, probe: bool = False, tries: bool = False) -> None:
        """A request of the store has ended with an error. `probe`: one of `breaker`; `tries`: one of `taking`."""
        if isinstance(error, TierFull | TierReadOnly):
            self.succeeded()
            if not isinstance(error, TierTooLarge):
                self._takes_none(error, now, tries=tries)
                return
        elif self.breaker.failed(str(error), now, refused=isinstance(error, TierRefused), probe=probe):
            self._outbox.add(RemoteTurned(str(error)))
        if tries:
            self.taking.showed_nothing(now)

    def connected(self, error: TensordError | None, now: float) -> None:
        """The store was asked for the first time."""
        if error is None:
            self.succeeded()
        elif self.breaker.failed(str(error), now, refused=not self._reached, probe=False):
            self._outbox.add(RemoteTurned(str(error)))

    def wrote(self, now: float, *, shows: bool) -> None:
        """A probe of `taking` has succeeded. `shows`: the store has taken a write, so it takes others."""
        if not shows:
            self.taking.showed_nothing(now)
        elif self.taking.succeeded():
            self._outbox.add(RemoteTurned("", "writes"))

    def _takes_none(self, error: TensordError, now: float, *, tries: bool) -> None:
        full = isinstance(error, TierFull)
        opened = self.taking.failed(str(error), now, refused=True, probe=tries)
        if opened or full != self.full:
            self.full, self.taking.why = full, str(error)
            self._outbox.add(RemoteTurned(str(error), "writes"))

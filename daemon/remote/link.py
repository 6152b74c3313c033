"""What fetches and writes share: the breaker of the remote store, its speed, and what entries cost to compute.

Owns: what an error says about the store, and the announcements when a breaker opens or closes.

    error                       what follows
    of one object               nothing
    TierFull, TierReadOnly      `taking` opens at once: the store is read, and a write is tried from time to time
    TierRefused                 `breaker` opens at once: the store is left alone
    others                      `breaker` opens after a few in a row; if the store was never reached, at once
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
        """Open while the store takes no writes."""
        self.full = False
        """Whether `taking` was opened because the store has no room."""
        self.reached = False
        """Whether the store has ever answered."""
        self.speed = RemoteSpeed()
        self.costs = ComputeCosts()
        self._outbox = outbox

    def succeeded(self) -> None:
        """The store has answered."""
        first, self.reached = not self.reached, True
        if self.breaker.succeeded():
            self._outbox.add(RemoteTurned("", first=first))

    def failed(self, error: TensordError, now: float) -> None:
        """A request of the store has ended with an error."""
        if not isinstance(error, TierFull | TierReadOnly):
            refused = isinstance(error, TierRefused) or not self.reached
            if self.breaker.failed(str(error), now, refused=refused):
                self._outbox.add(RemoteTurned(str(error)))
            return
        self.succeeded()
        if isinstance(error, TierTooLarge):
            return
        full = isinstance(error, TierFull)
        opened = self.taking.failed(str(error), now, refused=True)
        if opened or full != self.full:
            self.full, self.taking.why = full, str(error)
            self._outbox.add(RemoteTurned(str(error), "writes"))

    def changed(self) -> None:
        """The store has taken a write, or a removal although it was not full: it takes others."""
        if self.taking.succeeded():
            self._outbox.add(RemoteTurned("", "writes"))

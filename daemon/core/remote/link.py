"""What fetches and writes share: the breaker of the remote store, its speed, and what entries cost to compute.

Owns: what an error says about the store, and the announcement when the breaker opens or closes.
"""

from __future__ import annotations

from ....errors import TensordError, TierFull, TierRefused
from ..effects import RemoteTurned
from ..outbox import StoreOutbox
from .breaker import Breaker
from .speed import ComputeCosts, RemoteSpeed


class RemoteLink:
    """The daemon's knowledge of one remote store."""

    def __init__(self, outbox: StoreOutbox) -> None:
        self.breaker = Breaker()
        self.speed = RemoteSpeed()
        self.costs = ComputeCosts()
        self._outbox = outbox

    def succeeded(self) -> None:
        """The store has answered."""
        if self.breaker.succeeded():
            self._outbox.add(RemoteTurned(""))

    def failed(self, error: TensordError, now: float, *, probe: bool) -> None:
        """A request of the store has ended with an error. A full store serves reads, so it is no failure."""
        if isinstance(error, TierFull):
            self.succeeded()
        elif self.breaker.failed(str(error), now, refused=isinstance(error, TierRefused), probe=probe):
            self._outbox.add(RemoteTurned(str(error)))

"""How fast one uid's clients may send requests while other uids have clients: a token bucket for each uid.

A request over the rate is not refused, it waits: its connection is not read meanwhile, so its sender waits too. Owns
the times until which each uid has used its rate up (generic cell rate algorithm, ITU-T I.371), and which uids have
clients.

Invariant: in any stretch of t seconds a uid's requests that waited as told cost no more than rate * (t + BURST_S) + 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

BURST_S: Final = 1.0
"""What a uid that was quiet may send at once: as much as in so many seconds."""


class Rates:
    """`per_s_max`: requests a second; `own_uid`: the daemon's, which like root's is not limited."""

    def __init__(self, per_s_max: float, own_uid: int) -> None:
        self._per_s_max = per_s_max
        self._exempt = frozenset({0, own_uid})
        self._clients: Counter[int] = Counter()
        self._used_until: dict[int, float] = {}
        self.delayed = 0
        """Requests that had to wait."""

    def change_limits(self, per_s_max: float) -> None:
        """For requests from now on."""
        self._per_s_max = per_s_max

    def joined(self, uid: int) -> None:
        """A client of the uid is here."""
        self._clients[uid] += 1

    def left(self, uid: int) -> None:
        """A client of the uid has left. What its uid has used up is forgotten with the last, once it has run out."""
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]

    def limits(self, uid: int) -> bool:
        """Whether requests of the uid count: not those of root and of the daemon's own uid, nor while it is alone."""
        return uid not in self._exempt and len(self._clients) >= 2

    def delay_s(self, uid: int, now: float, cost: float = 1.0) -> float:
        """How long a request of the uid, which counts for `cost` of them, has to wait. It counts from now on."""
        if not self.limits(uid):
            return 0.0
        until = max(self._used_until.get(uid, now), now)
        self._used_until[uid] = until + cost / self._per_s_max
        if len(self._used_until) > 2 * len(self._clients) + 16:
            self._used_until = {each: time for each, time in self._used_until.items() if time > now}
        waits_s = max(0.0, until - now - BURST_S)
        self.delayed += waits_s > 0
        return waits_s

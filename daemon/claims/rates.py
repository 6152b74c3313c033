"""Limits the rate of requests of one uid while other uids have clients: a token bucket for each uid.

A request over the rate is not refused, it waits: its connection is not read meanwhile, so its sender waits too. Owns
the time until which each uid has used up its rate (generic cell rate algorithm, ITU-T I.371), and which uids have
clients. Does not own connections.

Invariant: in any stretch of t seconds, the requests of one uid that waited as required cost at most rate * (t +
BURST_S) + 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

BURST_S: Final = 1.0
"""A uid that was quiet may send the requests of this number of seconds at once."""


class Rates:
    """`per_s_max`: requests a second. `own_uid`: the daemon's uid, which is not limited, and neither is root."""

    def __init__(self, per_s_max: float, own_uid: int) -> None:
        self._per_s_max = per_s_max
        self._exempt = frozenset({0, own_uid})
        self._clients: Counter[int] = Counter()
        self._used_until: dict[int, float] = {}
        self.delayed = 0
        """The number of requests that had to wait."""

    def change_limits(self, per_s_max: float) -> None:
        """Applies to later requests."""
        self._per_s_max = per_s_max

    def joined(self, uid: int) -> None:
        """A client of the uid has connected."""
        self._clients[uid] += 1

    def left(self, uid: int) -> None:
        """A client of the uid has disconnected. The uid's used-up time is kept until it has passed, then forgotten."""
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]

    def limits(self, uid: int) -> bool:
        """Whether requests of the uid are limited: not those of root or of the daemon's own uid, and none while one uid
        is alone."""
        return uid not in self._exempt and len(self._clients) >= 2

    def delay_s(self, uid: int, now: float, cost: float = 1.0) -> float:
        """How long a request of the uid at this cost must wait, in seconds. The request counts from now on."""
        if not self.limits(uid):
            return 0.0
        until = max(self._used_until.get(uid, now), now)
        self._used_until[uid] = until + cost / self._per_s_max
        if len(self._used_until) > 2 * len(self._clients) + 16:
            self._used_until = {each: time for each, time in self._used_until.items() if time > now}
        waits_s = max(0.0, until - now - BURST_S)
        self.delayed += waits_s > 0
        return waits_s

"""Hit ratios over the last minute and over the last ring's worth of puts, compared with those of LRU.

Owns sums over the last minute and over the last puts of as many bytes as the ring has, the sample of reuse distances
(`distances`), and the curve of hit ratios by size. Does not own the counters of lanes.

A lookup is one that a lane counted, of any key. A request is a use or a put of an entry. The keys of requests are
known, so only requests can be compared with another policy. They come in batches of rows. A request whose key is not
in the sample costs its share of one test over the column of digests.

Invariant: a sum covers its stretch with an error of at most one part in SLOTS of the stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..store.table import RowTable
from .distances import ReuseDistances, keys_for
from .hit_curve import HitCurve
from .removal_history import MADE_ROOM

MINUTE_S: Final = 60.0
SLOTS: Final = 16
"""Parts of a stretch; sums drop one part at a time."""
SAMPLED_PER_S_MAX: Final = 1_000
"""Sampled requests in a second, of some 10 µs each. With more, the sample is halved."""

Array = np.ndarray[Any, Any]


class Recent:
    """Sums of amounts over the last `stretch` of a rising quantity: seconds, or bytes put.

    The error is at most one part in SLOTS of the stretch.
    """

    def __init__(self, stretch: float, width: int) -> None:
        """`width`: the number of amounts added together."""
        self._slot = stretch / SLOTS
        self._width = width
        self._sums: deque[tuple[int, list[int]]] = deque(maxlen=SLOTS)

    def __len__(self) -> int:
        """The number of parts kept, at most SLOTS."""
        return len(self._sums)

    def add(self, at: float, amounts: Sequence[int]) -> None:
        """Adds amounts at position `at`, which never decreases."""
        now = int(at / self._slot)
        if not self._sums or self._sums[-1][0] < now:
            self._sums.append((now, [0] * self._width))
        last = self._sums[-1][1]
        for place, amount in enumerate(amounts):
            last[place] += amount

    def sums(self, at: float) -> list[int]:
        """The sums, as of `at`."""
        now = int(at / self._slot)
        lately = [amounts for slot, amounts in self._sums if slot > now - SLOTS]
        return [sum(amounts[place] for amounts in lately) for place in range(self._width)]


class Hits:
    """Lookups and requests of one store. `capacity_bytes()`: the bytes that entries may take now."""

    def __init__(self, table: RowTable, ring_bytes: int, capacity_bytes: Callable[[], int]) -> None:
        self._table = table
        self._digests, self._sizes = table.column("digests"), table.column("sizes")
        self._capacity_bytes = capacity_bytes
        self._distances = ReuseDistances(keys_for(ring_bytes))
        # Requests of the sample, scaled to all requests; those for stored keys; those that LRU would have stored.
        self._counts = np.zeros(3, np.int64)
        self._curve = HitCurve()
        # Lookups that hit, all lookups, and the counts of requests.
        self._minute, self._ring = Recent(MINUTE_S, 5), Recent(ring_bytes, 5)
        self._put_bytes = 0
        self._paced_at, self._sampled_since = 0.0, 0

    def looked_up(self, hits: int, misses: int, now: float) -> None:
        """Counts lookups from the lanes' counters."""
        self._add((hits, hits + misses, 0, 0, 0), now)

    def used(self, rows: Array, now: float) -> None:
        """Counts requests for stored entries, in their order."""
        self._count(rows, now, here=True)

    def stored(self, rows: Array, now: float) -> None:
        """Counts requests for keys that were missing and are stored now."""
        self._put_bytes += int(self._sizes[rows].sum())
        self._count(rows, now, here=False)

    def recovered(self, rows: Array) -> None:
        """Takes entries that a restarted daemon found, in the order of their last use, for recently used ones."""
        self._distances.hold(self._digests[rows], self._sizes[rows], self._capacity_bytes())

    def ended(self, rows: Array, reasons: Sequence[str]) -> None:
        """Records the ends of entries. One that was evicted for room stays in LRU's order."""
        for at in self._distances.chosen(self._digests[rows]).tolist():
            if reasons[at] not in MADE_ROOM:
                self._distances.ended(self._table.digests[rows[at]])

    def as_dict(self, now: float) -> dict[str, Any]:
        """For status. `minute` and `ring` have `hits`: lookups that hit; `lookups`; `requests`: sampled and scaled up;
        `here`: requests for stored keys; `lru`: requests that would have hit under LRU. `since_start`: the last three
        since the daemon started. `sampled`: one in this number of keys is sampled. `sampled_keys`: the keys that are
        held for it."""
        names = ("hits", "lookups", "requests", "here", "lru")
        return {
            "minute": dict(zip(names, self._minute.sums(now), strict=True)),
            "ring": dict(zip(names, self._ring.sums(self._put_bytes), strict=True)),
            "since_start": dict(zip(names[2:], self._counts.tolist(), strict=True)),
            "sampled": self._distances.factor,
            "sampled_keys": len(self._distances),
        }

    def curve(self) -> dict[str, Any]:
        """As `HitCurve.as_dict`, with `here`: the store's own hit ratio of the same requests since it started."""
        requests, stored, _ = self._counts.tolist()
        here = stored / requests if requests else 0.0
        return {"here": here, **self._curve.as_dict(self._capacity_bytes(), self._distances.factor)}

    def _count(self, rows: Array, now: float, *, here: bool) -> None:
        self._curve.asked(len(rows), here=here)
        chosen = self._distances.chosen(self._digests[rows])
        if not len(chosen):
            return
        before, capacity_bytes = self._counts.copy(), self._capacity_bytes()
        for row in rows[chosen].tolist():
            self._sampled(row, capacity_bytes, here=here)
        self._pace(len(chosen), now)
        self._add((0, 0, *(self._counts - before).tolist()), now)

    def _pace(self, sampled: int, now: float) -> None:
        """Halves the sample while it takes too much time."""
        if now >= self._paced_at + 1:
            self._paced_at, self._sampled_since = now, 0
        self._sampled_since += sampled
        if self._sampled_since > SAMPLED_PER_S_MAX:
            self._sampled_since = 0
            self._distances.thin()

    def _sampled(self, row: int, capacity_bytes: int, *, here: bool) -> None:
        number = self._table.digests[row]
        distance_bytes = self._distances.asked(number, self._table.sizes[row], capacity_bytes)
        if distance_bytes is None:
            # The sample was halved since the row was chosen.
            return
        factor = self._distances.factor
        self._counts += (factor, here * factor, (distance_bytes <= capacity_bytes) * factor)
        self._curve.sampled(number, distance_bytes, factor, here=here)

    def _add(self, amounts: Sequence[int], now: float) -> None:
        self._minute.add(now, amounts)
        self._ring.add(self._put_bytes, amounts)

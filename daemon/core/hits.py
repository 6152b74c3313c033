"""Hit ratios over the last minute and over the last ring's worth of puts, compared with those of LRU.

Owns sums over the last minute and over the last puts of as many bytes as the ring has, and the shadow cache
(`policy.shadow`). Does not own the counters of lanes.

A lookup is one that a lane counted, of any key. A request is a use or a put of an entry. The keys of requests are
known, so only requests can be compared with another policy.

Invariant: a sum covers its stretch with an error of at most one part in SLOTS of the stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..policy.shadow import Shadow, keys_for
from .entries import SpanEntry
from .removal_history import MADE_ROOM

MINUTE_S: Final = 60.0
SLOTS: Final = 16
"""Parts of a stretch; sums drop one part at a time."""


class Recent:
    """Sums of amounts over the last `stretch` of a rising quantity: seconds, or bytes put.

    The error is at most one part in SLOTS of the stretch.
    """

    def __init__(self, stretch: float, width: int) -> None:
        """`width`: the number of amounts added together."""
        self._slot = stretch / SLOTS
        self._width = width
        self._sums: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        """The number of parts kept, at most SLOTS."""
        return len(self._sums)

    def add(self, at: float, amounts: Sequence[int]) -> None:
        """Adds amounts at position `at`, which never decreases."""
        now = int(at / self._slot)
        if not self._sums or self._sums[-1][0] < now:
            self._sums.append((now, [0] * self._width))
            self._drop(now)
        last = self._sums[-1][1]
        for place, amount in enumerate(amounts):
            last[place] += amount

    def sums(self, at: float) -> list[int]:
        """The sums, as of `at`."""
        now = int(at / self._slot)
        lately = [amounts for slot, amounts in self._sums if slot > now - SLOTS]
        return [sum(amounts[place] for amounts in lately) for place in range(self._width)]

    def _drop(self, now: int) -> None:
        while self._sums[0][0] <= now - SLOTS:
            self._sums.popleft()


class Hits:
    """Lookups and requests. `capacity_bytes`: the bytes that entries may take now."""

    def __init__(self, ring_bytes: int) -> None:
        self._shadow = Shadow(keys_for(ring_bytes))
        # Lookups that hit, all lookups, and the shadow's counts.
        self._minute, self._ring = Recent(MINUTE_S, 5), Recent(ring_bytes, 5)
        self._put_bytes = 0

    def looked_up(self, hits: int, misses: int, now: float) -> None:
        """Counts lookups from the lanes' counters."""
        self._add((hits, hits + misses, 0, 0, 0), now)

    def used(self, entries: Iterable[SpanEntry], capacity_bytes: int, now: float) -> None:
        """Counts requests for stored entries."""
        before = self._shadow.counts.as_tuple()
        for entry in entries:
            self._shadow.asked(entry.key, entry.span_bytes, capacity_bytes, here=True)
        self._add_requests(before, now)

    def stored(self, entry: SpanEntry, capacity_bytes: int, now: float) -> None:
        """Counts a request for a key that was missing and is stored now."""
        self._put_bytes += entry.span_bytes
        before = self._shadow.counts.as_tuple()
        self._shadow.asked(entry.key, entry.span_bytes, capacity_bytes, here=False)
        self._add_requests(before, now)

    def recovered(self, entry: SpanEntry, capacity_bytes: int) -> None:
        """Gives an entry that a restarted daemon found to the shadow cache too."""
        self._shadow.hold(entry.key, entry.span_bytes, capacity_bytes)

    def removed(self, entry: SpanEntry, reason: str) -> None:
        """Records the end of an entry."""
        if reason not in MADE_ROOM:
            self._shadow.ended(entry.key)

    def as_dict(self, now: float) -> dict[str, Any]:
        """For status. `minute` and `ring` have `hits`: lookups that hit; `lookups`; `requests`: sampled and scaled up;
        `here`: requests for stored keys; `lru`: requests that would have hit under LRU. `since_start`: the last three
        since the daemon started. `sampled`: one in this number of keys is sampled. `shadow_keys`: the keys in the
        shadow cache."""
        names = ("hits", "lookups", "requests", "here", "lru")
        return {
            "minute": dict(zip(names, self._minute.sums(now), strict=True)),
            "ring": dict(zip(names, self._ring.sums(self._put_bytes), strict=True)),
            "since_start": dict(zip(names[2:], self._shadow.counts.as_tuple(), strict=True)),
            "sampled": self._shadow.factor,
            "shadow_keys": len(self._shadow),
        }

    def _add_requests(self, before: tuple[int, ...], now: float) -> None:
        after = self._shadow.counts.as_tuple()
        if after != before:
            more = [later - earlier for later, earlier in zip(after, before, strict=True)]
            self._add((0, 0, *more), now)

    def _add(self, amounts: Sequence[int], now: float) -> None:
        self._minute.add(now, amounts)
        self._ring.add(self._put_bytes, amounts)

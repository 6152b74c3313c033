"""Hit ratios: of the last minute and of the last ring's worth of puts, beside those of least recently used.

Owns sums of the last minute and of the last stretch in which as many bytes were put as the ring has, and the shadow
cache (`policy.shadow`). Lookups are what lanes counted, of any key. A request is an entry that was used or stored: only
of these are the keys known, so only they can be compared with another policy.
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
"""Parts in which a stretch passes out of sight."""


class Recent:
    """Sums of amounts over the last `stretch` of something that only rises: seconds, or bytes put.

    Right to one part in SLOTS of the stretch.
    """

    def __init__(self, stretch: float, width: int) -> None:
        """`width`: how many amounts are added at a time."""
        self._slot = stretch / SLOTS
        self._width = width
        self._sums: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        """How many parts are kept: SLOTS at most."""
        return len(self._sums)

    def add(self, at: float, amounts: Sequence[int]) -> None:
        """Amounts that came at `at`, which is no less than before."""
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
    """Lookups and requests. `capacity_bytes` is what entries may take now."""

    def __init__(self, ring_bytes: int) -> None:
        self._shadow = Shadow(keys_for(ring_bytes))
        # Lookups that hit, all lookups, and the shadow's counts.
        self._minute, self._ring = Recent(MINUTE_S, 5), Recent(ring_bytes, 5)
        self._put_bytes = 0

    def looked_up(self, hits: int, misses: int, now: float) -> None:
        """Lookups that lanes counted."""
        self._add((hits, hits + misses, 0, 0, 0), now)

    def used(self, entries: Iterable[SpanEntry], capacity_bytes: int, now: float) -> None:
        """Requests for entries that were there."""
        before = self._shadow.counts.as_tuple()
        for entry in entries:
            self._shadow.asked(entry.key, entry.span_bytes, capacity_bytes, here=True)
        self._add_requests(before, now)

    def stored(self, entry: SpanEntry, capacity_bytes: int, now: float) -> None:
        """A request for what was not there, and is stored now."""
        self._put_bytes += entry.span_bytes
        before = self._shadow.counts.as_tuple()
        self._shadow.asked(entry.key, entry.span_bytes, capacity_bytes, here=False)
        self._add_requests(before, now)

    def recovered(self, entry: SpanEntry, capacity_bytes: int) -> None:
        """An entry of a former daemon, which any policy would begin with."""
        self._shadow.hold(entry.key, entry.span_bytes, capacity_bytes)

    def went(self, entry: SpanEntry, reason: str) -> None:
        """An entry went."""
        if reason not in MADE_ROOM:
            self._shadow.ended(entry.key)

    def as_dict(self, now: float) -> dict[str, Any]:
        """For status: `minute` and `ring` have the lookups, those that hit, and the requests (sampled, and scaled to
        all) with those that were here and those that least recently used would have had. `since_start`: these requests
        since the daemon began; `sampled`: one key in so many is followed.
        """
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

"""Hit ratios over the last minute and over the last ring's worth of puts, compared with those of LRU.

Owns sums over the last minute and over the last puts of as many bytes as the ring has, the sample of reuse distances
(`policy.distances`), and the curve of hit ratios by size. Does not own the counters of lanes.

A lookup is one that a lane counted, of any key. A request is a use or a put of an entry. The keys of requests are
known, so only requests can be compared with another policy.

Invariant: a sum covers its stretch with an error of at most one part in SLOTS of the stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

from ...shm.layout import NAMESPACE_TAG_BYTES
from ..reports.distances import ReuseDistances, keys_for
from ..reports.hit_curve import HitCurve
from ..reports.removal_history import MADE_ROOM
from .entries import SpanEntry

MINUTE_S: Final = 60.0
SLOTS: Final = 16
"""Parts of a stretch; sums drop one part at a time."""
REQUESTS: Final = "requests"
"""The event that lists requests for a recording."""
SAMPLED_PER_S_MAX: Final = 10_000
"""Sampled requests in a second, of some 4 µs each. With more, the sample is halved."""
ROWS_MAX: Final = 256
"""Requests of one event."""

Row = tuple[str, int, int, bool]
"""A request: key in hexadecimal digits, bytes of the payload, tokens, and whether the entry was stored already."""


def number_of(key: bytes) -> int:
    """A hash of the key. Its lower 32 bits choose the sample; the others tell keys apart whose lower bits are equal."""
    return crc32(key) | hash(key) >> 32 << 32


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


@dataclass(slots=True)
class _Counts:
    """Requests of the sample, scaled to all requests. `here`: those for stored keys. `lru`: those for keys that LRU
    would have stored."""

    requests: int = 0
    here: int = 0
    lru: int = 0

    def as_tuple(self) -> tuple[int, ...]:
        return self.requests, self.here, self.lru


class Hits:
    """Lookups and requests. `capacity_bytes`: the bytes that entries may take now."""

    def __init__(self, ring_bytes: int) -> None:
        self._distances = ReuseDistances(keys_for(ring_bytes))
        self._counts = _Counts()
        self._curve = HitCurve()
        # Lookups that hit, all lookups, and the counts of requests.
        self._minute, self._ring = Recent(MINUTE_S, 5), Recent(ring_bytes, 5)
        self._put_bytes = 0
        self.recording = False
        """Whether requests are kept for `take_rows`."""
        self._rows: list[Row] = []
        self._paced_at, self._sampled_since = 0.0, 0

    def looked_up(self, hits: int, misses: int, now: float) -> None:
        """Counts lookups from the lanes' counters."""
        self._add((hits, hits + misses, 0, 0, 0), now)

    def used(self, entries: Collection[SpanEntry], capacity_bytes: int, now: float) -> None:
        """Counts requests for stored entries."""
        self._requests(entries, capacity_bytes, now, here=True)

    def stored(self, entry: SpanEntry, capacity_bytes: int, now: float) -> None:
        """Counts a request for a key that was missing and is stored now."""
        self._put_bytes += entry.span_bytes
        self._requests([entry], capacity_bytes, now, here=False)

    def recovered(self, entry: SpanEntry, capacity_bytes: int) -> None:
        """Takes an entry that a restarted daemon found for a recently used one."""
        self._distances.hold(number_of(entry.key), entry.span_bytes, capacity_bytes)

    def removed(self, entry: SpanEntry, reason: str) -> None:
        """Records the end of an entry."""
        if reason not in MADE_ROOM:
            self._distances.ended(number_of(entry.key))

    def as_dict(self, now: float) -> dict[str, Any]:
        """For status. `minute` and `ring` have `hits`: lookups that hit; `lookups`; `requests`: sampled and scaled up;
        `here`: requests for stored keys; `lru`: requests that would have hit under LRU. `since_start`: the last three
        since the daemon started. `sampled`: one in this number of keys is sampled. `sampled_keys`: the keys that are
        held for it."""
        names = ("hits", "lookups", "requests", "here", "lru")
        return {
            "minute": dict(zip(names, self._minute.sums(now), strict=True)),
            "ring": dict(zip(names, self._ring.sums(self._put_bytes), strict=True)),
            "since_start": dict(zip(names[2:], self._counts.as_tuple(), strict=True)),
            "sampled": self._distances.factor,
            "sampled_keys": len(self._distances),
        }

    def take_rows(self) -> Iterator[list[Row]]:
        """The requests since the last call, up to ROWS_MAX at a time."""
        rows, self._rows = self._rows, []
        for at in range(0, len(rows), ROWS_MAX):
            yield rows[at : at + ROWS_MAX]

    def curve(self, capacity_bytes: int) -> dict[str, Any]:
        """As `HitCurve.as_dict`, with `here`: the store's own hit ratio of the same requests since it started."""
        counts = self._counts
        here = counts.here / counts.requests if counts.requests else 0.0
        return {"here": here, **self._curve.as_dict(capacity_bytes, self._distances.factor)}

    def _requests(self, entries: Collection[SpanEntry], capacity_bytes: int, now: float, *, here: bool) -> None:
        self._curve.asked(len(entries), here=here)
        if self.recording:
            self._rows += [(entry.key.hex(), entry.payload_bytes, entry.tokens, here) for entry in entries]
        mask = self._distances.factor - 1
        chosen = [entry for entry in entries if not crc32(entry.key) & mask]
        if not chosen:
            return
        before = self._counts.as_tuple()
        for entry in chosen:
            self._sampled(entry, capacity_bytes, here=here)
        self._pace(len(chosen), now)
        self._add_requests(before, now)

    def _pace(self, sampled: int, now: float) -> None:
        """Halves the sample while it takes too much time."""
        if now >= self._paced_at + 1:
            self._paced_at, self._sampled_since = now, 0
        self._sampled_since += sampled
        if self._sampled_since > SAMPLED_PER_S_MAX:
            self._sampled_since = 0
            self._distances.thin()

    def _sampled(self, entry: SpanEntry, capacity_bytes: int, *, here: bool) -> None:
        number = number_of(entry.key)
        distance_bytes = self._distances.asked(number, entry.span_bytes, capacity_bytes)
        if distance_bytes is None:
            return
        counts, factor = self._counts, self._distances.factor
        counts.requests += factor
        counts.here += here * factor
        counts.lru += (distance_bytes <= capacity_bytes) * factor
        self._curve.sampled(entry.key[:NAMESPACE_TAG_BYTES], number, distance_bytes, factor, here=here)

    def _add_requests(self, before: tuple[int, ...], now: float) -> None:
        after = self._counts.as_tuple()
        if after != before:
            more = [later - earlier for later, earlier in zip(after, before, strict=True)]
            self._add((0, 0, *more), now)

    def _add(self, amounts: Sequence[int], now: float) -> None:
        self._minute.add(now, amounts)
        self._ring.add(self._put_bytes, amounts)

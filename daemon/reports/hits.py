"""Hit ratios over the last minute and over the last ring's worth of puts, that of LRU beside the store's own, and those
that a ring of another size would give.

Owns sums over the last minute and over the last puts of as many bytes as the ring has, a sample of reuse distances,
and a histogram of these distances. Does not own the counters of lanes.

The reuse distance of a request is the size of all entries that were requested since the last request of the same key,
with the entry itself. A cache of that size, or a larger one, that evicts the least recently used entry (LRU) has the
entry. Keys are sampled by a hash, and distances are scaled by the same factor: the spatial sampling of SHARDS
(Waldspurger et al., FAST 2015). Entries count one by one: a block of a sequence counts although it is of no use without
the blocks before it.

A lookup is one that a lane counted, of any key. A request is a use or a put of an entry. The keys of requests are
known, so only requests can be compared with another policy.

A point of the curve is the share of requests whose distance is at most the size: the hit ratio of a cache of that size
that evicts the least recently used entry. The sample has too few or too many requests for the most popular keys. The
difference to all requests for stored keys counts as hits, since such keys have short distances (SHARDS-adj). Puts of
missing keys do not: the sample has too few or too many of them by chance, also where no key is ever used again.

Invariants: a sum covers its stretch with an error of at most one part in SLOTS of the stretch. The histogram is halved
every HALVE_AFTER sampled requests, so older requests count less and less.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ..store.table import RowTable
from .removal_history import MADE_ROOM

HALVE_AFTER: Final = 1 << 20
MULTIPLES: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
"""The sizes of a curve's points, as multiples of the present size."""
_STEP_BITS: Final = 4
"""A histogram has 2**_STEP_BITS columns for each doubling of the distance."""
_OCTAVES: Final = 48
_COLUMNS: Final = (_OCTAVES << _STEP_BITS) + 1
"""The last column counts distances of 2**_OCTAVES bytes and more."""

KEY_BYTES: Final = 512
"""The most bytes of the process's memory that one key takes."""
KEYS_MAX: Final = 8192
KEYS_MIN: Final = 64
MEMORY_SHARE: Final = 100
"""The keys may take 1/MEMORY_SHARE of the ring's bytes."""
REACH: Final = 8
"""Distances up to this multiple of the capacity are known."""
THINNED_MIN: Final = 512
"""With fewer keys `thin` does nothing: the sample would tell too little."""
FAR: Final = 1 << 62
"""The distance of a key that is not held: its first request, or one whose distance is beyond REACH."""

Array = np.ndarray[Any, Any]
MINUTE_S: Final = 60.0
SLOTS: Final = 16
"""Parts of a stretch; sums drop one part at a time."""
SAMPLED_PER_S_MAX: Final = 1_000
"""Sampled requests in a second, of some 10 µs each. With more, the sample is halved."""


def _column(distance_bytes: int) -> tuple[int, float]:
    """The column of a distance, and the share of the column that is below the distance."""
    octave = distance_bytes.bit_length() - 1
    if octave >= _OCTAVES:
        return _COLUMNS - 1, 0.0
    if octave < _STEP_BITS:
        return distance_bytes, 0.0
    width = 1 << (octave - _STEP_BITS)
    step, rest_bytes = divmod(distance_bytes, width)
    return (octave << _STEP_BITS) + step - (1 << _STEP_BITS), rest_bytes / width


class ReuseDistances:
    """The sampled keys, and their sizes in the order of their last requests.

    The sample is halved whenever more than `keys_max` keys are held, so its memory is bounded, and on request, so that
    its time is. The held keys, scaled, have at most REACH times the capacity's bytes.
    """

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._mask = 0
        # By key, least recently used first: the place of its size. Places before the end that no key has hold 0.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._sizes = np.zeros(2 * (keys_max + 1), np.int64)
        self._end = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def factor(self) -> int:
        """One key in `factor` keys is in the sample."""
        return self._mask + 1

    def chosen(self, digests: Array) -> Array:
        """Which of some keys are in the sample, as their indices in order. `digests`: (n,) uint64."""
        return np.flatnonzero((digests & np.uint64(self._mask)) == 0)

    def thin(self) -> None:
        """Halves the sample, unless few keys are held."""
        if len(self._held) >= THINNED_MIN:
            self._halve()

    def asked(self, number: int, size_bytes: int, capacity_bytes: int) -> int | None:
        """Records a request for a key's entry of `size_bytes`, in a store of `capacity_bytes`. `number`: the key's
        digest (`RowTable.digests`), of which the lowest 32 bits choose the sample. Returns the distance in bytes, or
        FAR. None if the key is not in the sample."""
        if number & self._mask:
            return None
        place, distance_bytes = self._held.get(number), FAR
        if place is not None:
            distance_bytes = (int(self._sizes[place + 1 : self._end].sum()) + size_bytes) * self.factor
        self._hold(number, size_bytes, capacity_bytes)
        return distance_bytes

    def hold(self, numbers: Array, sizes: Array, capacity_bytes: int) -> None:
        """Records that keys were used last, in this order, without requests. The sample shrinks first until they fit.
        Both arrays (n,) uint64."""
        while len(at := self.chosen(numbers)) > self._keys_max:
            self._halve()
        for number, size_bytes in zip(numbers[at].tolist(), sizes[at].tolist(), strict=True):
            self._hold(number, size_bytes, capacity_bytes)

    def ended(self, number: int) -> None:
        """Forgets a key. One whose entry was removed for another reason than room any cache would have lost."""
        place = self._held.pop(number, None)
        if place is not None:
            self._bytes -= int(self._sizes[place])
            self._sizes[place] = 0

    def check_invariants(self, capacity_bytes: int) -> None:
        places = list(self._held.values())
        assert len(places) <= self._keys_max and places == sorted(set(places))
        assert not any(number & self._mask for number in self._held)
        assert self._bytes == self._sizes[places].sum() == self._sizes[: self._end].sum()
        assert self._bytes * self.factor <= REACH * capacity_bytes

    def _hold(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        self.ended(number)
        if self._end == len(self._sizes):
            self._close_up()
        self._held[number] = self._end
        self._sizes[self._end] = size_bytes
        self._end += 1
        self._bytes += size_bytes
        while len(self._held) > self._keys_max:
            self._halve()
        while self._bytes * self.factor > REACH * capacity_bytes:
            self.ended(next(iter(self._held)))

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        for number in [number for number in self._held if number & self._mask]:
            self.ended(number)

    def _close_up(self) -> None:
        """Gives the keys the first places, in their order: after at least keys_max requests."""
        self._end = len(self._held)
        self._sizes[: self._end] = self._sizes[list(self._held.values())]
        self._held = OrderedDict(zip(self._held, range(self._end), strict=True))


class HitCurve:
    """The requests by distance, scaled to all requests: a count for each column."""

    def __init__(self) -> None:
        self._counts = np.zeros(_COLUMNS)
        self._sampled = 0
        self._asked = self._found = self._sampled_found = 0.0

    def asked(self, requests: int, *, here: bool) -> None:
        """Counts requests of any keys, sampled or not. `here`: for stored keys; else puts of missing ones."""
        self._asked += requests
        self._found += here * requests

    def sampled(self, distance_bytes: int, factor: int, *, here: bool) -> None:
        """Counts a sampled request. `factor`: the number of requests that it stands for."""
        self._sampled_found += here * factor
        self._counts[_column(distance_bytes)[0]] += factor
        self._sampled += 1
        if self._sampled >= HALVE_AFTER:
            self._counts *= 0.5
            self._asked *= 0.5
            self._found *= 0.5
            self._sampled_found *= 0.5
            self._sampled //= 2

    def as_dict(self, capacity_bytes: int) -> dict[str, Any]:
        """For the answer to an AdviseQuery. `here`: the store's own hit ratio of the same requests. `points`: size in
        bytes, and the hit ratio of a cache of that size."""
        sizes = [int(multiple * capacity_bytes) for multiple in MULTIPLES]
        return {
            "here": self._found / self._asked if self._asked else 0.0,
            "capacity_bytes": capacity_bytes,
            "sampled_requests": self._sampled,
            "requests": self._asked,
            "points": [[size, self._ratio(size)] for size in sizes],
        }

    def _ratio(self, size_bytes: int) -> float:
        column, below = _column(size_bytes)
        hits = float(self._counts[:column].sum() + below * self._counts[column])
        requests = float(self._counts.sum())
        if not requests:
            return 0.0
        # What the sample lacks of the requests for stored keys, or has too many of if it is below 0.
        unsampled = self._found - self._sampled_found
        return min(max((hits + unsampled) / max(requests + unsampled, 1.0), 0.0), 1.0)


class Recent:
    """Lookups that hit, and all lookups, over the last `stretch` of a rising quantity: seconds, or bytes put. Clients
    write the counters that are summed, of any size: they are Python's integers."""

    def __init__(self, stretch: float) -> None:
        self._slot = stretch / SLOTS
        self._sums: deque[tuple[int, int, int]] = deque(maxlen=SLOTS)

    def add(self, at: float, hits: int, lookups: int) -> None:
        """Adds lookups at position `at`, which never decreases."""
        now = int(at / self._slot)
        if self._sums and self._sums[-1][0] == now:
            _, hits_before, lookups_before = self._sums.pop()
            hits, lookups = hits + hits_before, lookups + lookups_before
        self._sums.append((now, hits, lookups))

    def sums(self, at: float) -> dict[str, int]:
        since = int(at / self._slot) - SLOTS
        recent = [each for each in self._sums if each[0] > since]
        return {"hits": sum(hits for _, hits, _ in recent), "lookups": sum(lookups for _, _, lookups in recent)}


class Hits:
    """Lookups and requests of one store. `capacity_bytes()`: the bytes that entries may take now."""

    def __init__(self, table: RowTable, ring_bytes: int, capacity_bytes: Callable[[], int]) -> None:
        self._table = table
        self._digests, self._sizes = table.column("digests"), table.column("sizes")
        self._capacity_bytes = capacity_bytes
        self._distances = ReuseDistances(max(KEYS_MIN, min(KEYS_MAX, ring_bytes // MEMORY_SHARE // KEY_BYTES)))
        # Requests of the sample, scaled to all requests; those for stored keys; those that LRU would have stored.
        self._counts = np.zeros(3, np.int64)
        self._curve = HitCurve()
        self._minute, self._ring = Recent(MINUTE_S), Recent(ring_bytes)
        self._put_bytes = 0
        self._paced_at, self._sampled_since = 0.0, 0

    def looked_up(self, hits: int, misses: int, now: float) -> None:
        self._minute.add(now, hits, hits + misses)
        self._ring.add(self._put_bytes, hits, hits + misses)

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
        """For status. `minute` and `ring` have `hits`: lookups that hit; and `lookups`. `since_start` has `requests`:
        sampled and scaled up; `here`: requests for stored keys; `lru`: requests that would have hit under LRU.
        `sampled`: one in this number of keys is sampled. `sampled_keys`: the keys that are held for it."""
        return {
            "minute": self._minute.sums(now),
            "ring": self._ring.sums(self._put_bytes),
            "since_start": dict(zip(("requests", "here", "lru"), self._counts.tolist(), strict=True)),
            "sampled": self._distances.factor,
            "sampled_keys": len(self._distances),
        }

    def curve(self) -> dict[str, Any]:
        return self._curve.as_dict(self._capacity_bytes())

    def _count(self, rows: Array, now: float, *, here: bool) -> None:
        self._curve.asked(len(rows), here=here)
        chosen = self._distances.chosen(self._digests[rows])
        if not len(chosen):
            return
        table, distances = self._table, self._distances
        capacity_bytes = self._capacity_bytes()
        for row in rows[chosen].tolist():
            number = table.digests[row]
            distance_bytes = distances.asked(number, table.sizes[row], capacity_bytes)
            if distance_bytes is not None:  # the sample may be halved since the row was chosen
                factor = distances.factor
                self._counts += (factor, here * factor, (distance_bytes <= capacity_bytes) * factor)
                self._curve.sampled(distance_bytes, factor, here=here)
        self._pace(len(chosen), now)

    def _pace(self, sampled: int, now: float) -> None:
        """Halves the sample while it takes too much time."""
        if now >= self._paced_at + 1:
            self._paced_at, self._sampled_since = now, 0
        self._sampled_since += sampled
        if self._sampled_since > SAMPLED_PER_S_MAX:
            self._sampled_since = 0
            self._distances.thin()

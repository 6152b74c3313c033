"""Reuse distances of a sample of the keys: the bytes of least-recently-used cache that would have kept each request.

The reuse distance of a request is the size of all entries that were requested since the last request of the same key,
with the entry itself. A cache of that size, or a larger one, that evicts the least recently used entry (LRU) has the
entry. Keys are sampled by a hash, and distances are scaled by the same factor: the spatial sampling of SHARDS
(Waldspurger et al., FAST 2015). The sample is halved whenever more than `keys_max` keys are held, so its memory is
bounded, and on request, so that its time is.

Owns: the order and the sizes of the sampled keys. Does not own the store's entries, nor the counts of hits. Entries
count one by one: a block of a sequence counts although it is of no use without the blocks before it.

Invariant: every held key is in the sample. The held keys, scaled, have at most REACH times the capacity's bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import numpy as np

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


def keys_for(ring_bytes: int) -> int:
    """The most keys for a ring."""
    return max(KEYS_MIN, min(KEYS_MAX, ring_bytes // MEMORY_SHARE // KEY_BYTES))


class ReuseDistances:
    """The sampled keys, and their sizes in the order of their last requests."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._mask = 0
        # By key, least recently used first: the place of its size. Places before the end that no key has hold 0.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._sizes = np.zeros(2 * (keys_max + 1), np.int64)
        self._end = 0
        self._bytes = 0

    def __len__(self) -> int:
        """The number of keys that are held."""
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
        """Records a request for a key's entry of `size_bytes`, in a store of `capacity_bytes`.

        Args:
            number: the key's digest (`RowTable.digests`), of which the lowest 32 bits choose the sample.

        Returns:
            The distance in bytes, or FAR. None if the key is not in the sample.
        """
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
        """Forgets a key whose entry was removed for another reason than room: any cache would have lost it."""
        if number in self._held:
            self._drop(number)

    def check_invariants(self, capacity_bytes: int) -> None:
        """Asserts the invariants of the module's docstring."""
        places = list(self._held.values())
        assert len(places) <= self._keys_max and places == sorted(set(places))
        assert not any(number & self._mask for number in self._held)
        assert self._bytes == self._sizes[places].sum() == self._sizes[: self._end].sum()
        assert self._bytes * self.factor <= REACH * capacity_bytes

    def _hold(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        """Makes the key the most recently used."""
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
            self._drop(next(iter(self._held)))

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        for number in [number for number in self._held if number & self._mask]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        place = self._held.pop(number)
        self._bytes -= int(self._sizes[place])
        self._sizes[place] = 0

    def _close_up(self) -> None:
        """Gives the keys the first places, in their order: after at least keys_max requests."""
        self._end = len(self._held)
        self._sizes[: self._end] = self._sizes[list(self._held.values())]
        self._held = OrderedDict(zip(self._held, range(self._end), strict=True))

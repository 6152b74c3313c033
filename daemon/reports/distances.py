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

from array import array
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
    """The most keys for a ring: a hundredth of the ring's bytes, from KEYS_MIN to KEYS_MAX keys."""
    return max(KEYS_MIN, min(KEYS_MAX, ring_bytes // MEMORY_SHARE // KEY_BYTES))


class ReuseDistances:
    """The sampled keys in the order of their last requests, and a Fenwick tree of their sizes in that order."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._mask = 0
        # By key, least recently used first: its position in the tree, and its size.
        self._held: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._positions = 2 * (keys_max + 1)
        self._tree = array("q", bytes(8 * (self._positions + 1)))
        self._last = 0
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
        held, factor = self._held.get(number), self._mask + 1
        if held is None:
            distance_bytes = FAR
        else:
            since_bytes = self._bytes - self._sum(held[0])
            distance_bytes = (since_bytes + size_bytes) * factor
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
        assert len(self._held) <= self._keys_max
        assert not any(number & self._mask for number in self._held)
        assert self._bytes == sum(size for _, size in self._held.values()) == self._sum(self._positions)
        assert self._bytes * self.factor <= REACH * capacity_bytes
        positions = [position for position, _ in self._held.values()]
        assert positions == sorted(set(positions))
        assert not positions or positions[-1] <= self._last <= self._positions

    def _hold(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        """Makes the key the most recently used."""
        if number in self._held:
            self._drop(number)
        if self._last == self._positions:
            self._renumber()
        self._last += 1
        self._held[number] = (self._last, size_bytes)
        self._add(self._last, size_bytes)
        self._bytes += size_bytes
        while len(self._held) > self._keys_max:
            self._halve()
        self._fit(capacity_bytes)

    def _halve(self) -> None:
        self._mask = 2 * self._mask + 1
        for number in [number for number in self._held if number & self._mask]:
            self._drop(number)

    def _fit(self, capacity_bytes: int) -> None:
        while self._bytes * self.factor > REACH * capacity_bytes:
            self._drop(next(iter(self._held)))

    def _drop(self, number: int) -> None:
        position, size_bytes = self._held.pop(number)
        self._add(position, -size_bytes)
        self._bytes -= size_bytes

    def _renumber(self) -> None:
        """Gives the keys the positions from 1 on, in their order. Takes keys_max steps, after as many requests."""
        sizes = [size for _, size in self._held.values()]
        self._held = OrderedDict(zip(self._held, enumerate(sizes, 1), strict=True))
        self._last = len(sizes)
        tree = array("q", [0, *sizes, *([0] * (self._positions - len(sizes)))])
        for position in range(1, self._positions + 1):
            parent = position + (position & -position)
            if parent <= self._positions:
                tree[parent] += tree[position]
        self._tree = tree

    def _add(self, position: int, size_bytes: int) -> None:
        tree, positions = self._tree, self._positions
        while position <= positions:
            tree[position] += size_bytes
            position += position & -position

    def _sum(self, position: int) -> int:
        """The sizes of the keys up to this position."""
        tree, total = self._tree, 0
        while position:
            total += tree[position]
            position &= position - 1
        return total

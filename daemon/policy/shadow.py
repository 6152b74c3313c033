"""A shadow cache: simulates the hits of least recently used (LRU) for the same requests, without payloads.

Only a sample of the keys is followed, chosen by a hash of the key. The shadow's capacity is smaller by the same factor:
the spatial sampling of SHARDS (Waldspurger et al., FAST 2015). The sample is halved whenever the shadow has more than
`keys_max` keys, so its memory is bounded.

Owns: the order and the sizes of the shadow's keys, and the counts. Does not own the store's entries. Entries count one
by one; the shadow ignores that a block of a sequence is of no use without the blocks before it.

Invariant: every key in the shadow is in the sample, and the shadow is at most as large as its part of the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from zlib import crc32

KEY_BYTES: Final = 256
"""The most bytes of the process's memory that one key takes."""
KEYS_MAX: Final = 2048
KEYS_MIN: Final = 64
MEMORY_SHARE: Final = 100
"""The shadow may take 1/MEMORY_SHARE of the ring's bytes."""

_HASH_BITS: Final = 32


def keys_for(ring_bytes: int) -> int:
    """The most keys in the shadow of a ring: a hundredth of the ring's bytes, from KEYS_MIN to KEYS_MAX keys."""
    return max(KEYS_MIN, min(KEYS_MAX, ring_bytes // MEMORY_SHARE // KEY_BYTES))


def _upper(key: bytes) -> int:
    """The upper bits of a key's number. They tell keys apart whose lower bits, used for sampling, are equal."""
    return hash(key) >> _HASH_BITS << _HASH_BITS


@dataclass(slots=True)
class Counts:
    """Requests of the sample, scaled to all requests. `here`: those for stored keys. `lru`: those for keys that LRU
    would have stored."""

    requests: int = 0
    here: int = 0
    lru: int = 0

    def as_tuple(self) -> tuple[int, ...]:
        """The counts in the order of the fields."""
        return self.requests, self.here, self.lru


class Shadow:
    """A sampled cache of keys that evicts the least recently used."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._mask = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self.counts = Counts()

    def __len__(self) -> int:
        """The number of keys in the shadow."""
        return len(self._sizes)

    @property
    def factor(self) -> int:
        """One key in `factor` keys is in the sample."""
        return self._mask + 1

    def asked(self, key: bytes, size_bytes: int, capacity_bytes: int, *, here: bool) -> None:
        """Counts a request for an entry of `size_bytes`, in a store of `capacity_bytes`. `here`: the entry was stored;
        otherwise it is stored now."""
        number = crc32(key)
        if number & self._mask:
            return
        counts, factor, sizes = self.counts, self._mask + 1, self._sizes
        number |= _upper(key)
        counts.requests += factor
        counts.here += here * factor
        counts.lru += (number in sizes) * factor
        self._hold(number, size_bytes, capacity_bytes)

    def hold(self, key: bytes, size_bytes: int, capacity_bytes: int) -> None:
        """Adds an entry that any policy would have stored. Counts nothing."""
        number = crc32(key)
        if not number & self._mask:
            self._hold(number | _upper(key), size_bytes, capacity_bytes)

    def ended(self, key: bytes) -> None:
        """Removes a key whose entry was removed for another reason than room. Any policy would have lost it."""
        number = crc32(key)
        if not number & self._mask:
            self._bytes -= self._sizes.pop(number | _upper(key), 0)

    def check_invariants(self, capacity_bytes: int) -> None:
        """Asserts the invariants of the module's docstring."""
        assert len(self._sizes) <= self._keys_max
        assert not any(number & self._mask for number in self._sizes)
        assert self._bytes == sum(self._sizes.values()) <= capacity_bytes // self.factor

    def _hold(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        """Makes the key the most recently used."""
        self._bytes += size_bytes - self._sizes.get(number, 0)
        self._sizes[number] = size_bytes
        self._sizes.move_to_end(number)
        self._fit(capacity_bytes)
        if len(self._sizes) > self._keys_max:
            self._halve(capacity_bytes)

    def _fit(self, capacity_bytes: int) -> None:
        while self._bytes * self.factor > capacity_bytes:
            self._bytes -= self._sizes.popitem(last=False)[1]

    def _halve(self, capacity_bytes: int) -> None:
        self._mask = 2 * self._mask + 1
        self._sizes = OrderedDict((number, size) for number, size in self._sizes.items() if not number & self._mask)
        self._bytes = sum(self._sizes.values())
        self._fit(capacity_bytes)

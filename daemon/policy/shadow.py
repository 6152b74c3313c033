"""What least recently used would have found of the same requests: a shadow cache that holds no payloads.

Only a sample of the keys is followed, chosen by a hash of the key, in a shadow that is smaller by the same factor: the
spatial sampling of SHARDS (Waldspurger et al., FAST 2015). The sample is halved whenever more than `keys_max` keys are
in the shadow, so its memory is bounded whatever is stored.

Owns: the shadow's order and sizes, and the counts. Entries are taken one by one: that a block of a sequence is of no
use without those before it is left out.

Invariant: what is in the shadow is in the sample, and takes no more than its part of the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from zlib import crc32

KEY_BYTES: Final = 256
"""What one key takes of the process's memory, at most."""
KEYS_MAX: Final = 2048
KEYS_MIN: Final = 64
MEMORY_SHARE: Final = 100
"""Of the ring's bytes, one in so many may be spent on the shadow."""

_HASH_BITS: Final = 32


def keys_for(ring_bytes: int) -> int:
    """How many keys the shadow of a ring may hold: a hundredth of the ring's memory, and KEYS_MAX."""
    return max(KEYS_MIN, min(KEYS_MAX, ring_bytes // MEMORY_SHARE // KEY_BYTES))


def _upper(key: bytes) -> int:
    """Upper bits, which tell keys apart whose lower ones, by which they are sampled, are equal."""
    return hash(key) >> _HASH_BITS << _HASH_BITS


@dataclass(slots=True)
class Counts:
    """Requests of the sample, each counted as often as the sample stands for others. `here`: those that the store had;
    `lru`: those that least recently used would have had."""

    requests: int = 0
    here: int = 0
    lru: int = 0

    def as_tuple(self) -> tuple[int, ...]:
        """In the order of the fields."""
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
        """How many keys are in the shadow."""
        return len(self._sizes)

    @property
    def factor(self) -> int:
        """One key in so many is followed."""
        return self._mask + 1

    def asked(self, key: bytes, size_bytes: int, capacity_bytes: int, *, here: bool) -> None:
        """A request for an entry of `size_bytes`, in a store that may hold `capacity_bytes`. `here`: the store had it;
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
        """The entry is stored, whatever the policy; nothing is counted."""
        number = crc32(key)
        if not number & self._mask:
            self._hold(number | _upper(key), size_bytes, capacity_bytes)

    def ended(self, key: bytes) -> None:
        """The key's entry ended for another reason than room: it would have ended under any policy."""
        number = crc32(key)
        if not number & self._mask:
            self._bytes -= self._sizes.pop(number | _upper(key), 0)

    def check_invariants(self, capacity_bytes: int) -> None:
        """Asserts what the module's docstring promises."""
        assert len(self._sizes) <= self._keys_max
        assert not any(number & self._mask for number in self._sizes)
        assert self._bytes == sum(self._sizes.values()) <= capacity_bytes // self.factor

    def _hold(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        """The key was used last."""
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

"""What an entry has besides its columns: its header in the ring, and the reuse word of its slot.

    ring: header │ payload        created, ttl, expires          index: slot │ reuse word       key; uses, last use

Owns: the reuse words' uses, and the expiry in headers after the put. Does not own: who uses entries (`lifetimes`), nor
the rest of headers, which `commit` writes. Nothing is kept here: each number is read where it lies.

Invariant: rows are those of entries, stored or about to be told as ended; headers and slots still describe them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...shm.index.index import (
    PLACE,
    REUSE_HOLDERS_MAX,
    REUSE_HOLDERS_SHIFT,
    REUSE_TICKS_MAX,
    REUSE_TICKS_PER_S,
    REUSE_USED_SHIFT,
    REUSE_USES_MAX,
    reuse_ticks,
)
from ...shm.ring.layout import SPAN_EXPIRES_AT, expiry_word
from .slots import Slots
from .table import Array, RowTable

_TTL_AT: Final = 64
_CREATED_AT: Final = 72
_COST_AT: Final = 88
_EXPIRY_CHECK: Final = (1 << 16) - 1
_HOLDERS: Final = REUSE_HOLDERS_MAX << REUSE_HOLDERS_SHIFT


class Details:
    """The headers and reuse words of one store's entries. `ring`: the ring's bytes, writable."""

    def __init__(self, table: RowTable, slots: Slots, ring: memoryview) -> None:
        whole = ring.cast("B")[: len(ring) & -8]
        self._times, self._words = whole.cast("d"), whole.cast("Q")
        self._all_times: Array = np.frombuffer(whole, np.float64)
        self._table = table
        self._slots = slots
        self._offsets, self._slot_of = table.column("offsets"), table.column("slots")

    # ---- headers

    def created(self, rows: Array, now: float) -> Array:
        """When the entries were put, (n,) float64; from 0 to `now`, whatever a damaged header has."""
        created = self._all_times[(self._offsets[rows] + _CREATED_AT) >> 3]
        found: Array = np.fmin(np.fmax(created, 0.0), now)
        return found

    def ttl(self, row: int) -> float:
        """The time to live after each touch, in seconds; 0 for none."""
        ttl: float = self._times[self._table.offsets[row] + _TTL_AT >> 3]
        return ttl

    def cost(self, row: int) -> float:
        """The milliseconds that computing the payload took, as its client said; 0 if not known."""
        cost: float = self._times[self._table.offsets[row] + _COST_AT >> 3]
        return cost

    def expires(self, row: int) -> float:
        """When the entry expires; 0.0 for never. It is up to one part in 2 ** 36 later than it was set."""
        word = self._words[self._table.offsets[row] + SPAN_EXPIRES_AT >> 3]
        expires: float = np.uint64(word & ~_EXPIRY_CHECK).view(np.float64).item()
        return expires

    def set_expires(self, row: int, when: float) -> None:
        """Writes when the entry expires, for clients and for the next daemon: one word, so that a reader sees the old
        time or the new one. The header's check leaves it out."""
        self._words[self._table.offsets[row] + SPAN_EXPIRES_AT >> 3] = expiry_word(when)

    # ---- the index

    def keys(self, rows: Array) -> Array:
        """The keys, as (n, 4) uint64."""
        return self._slots.key_words(self._slot_of[rows].astype(np.int64))

    def tree_bytes(self, row: int) -> int:
        """The length of the payload's tree."""
        place: int = self._slots.words[self._slots.at(self._table.slots[row]) + PLACE]
        return place >> 48

    def uses(self, rows: Array) -> tuple[Array, Array]:
        """How often the entries were used after their puts, at most REUSE_USES_MAX, and when last, rounded up to a
        tick, 0.0 for never; (n,) uint64 and float64."""
        return unpack_uses(self._slots.reuse[self._slot_of[rows]])

    def count_uses(self, rows: Array, now: float) -> None:
        """The entries were used until `now`, each once for each time that it is among the rows."""
        at, reuse = self._slot_of[rows], self._slots.reuse
        many = np.ones(len(at), np.uint64)
        if len(at) > 1:
            at = np.sort(at)
            first = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
            many = np.diff(np.append(first, len(at))).astype(np.uint64)
            at = at[first]
        words = reuse[at]
        uses = np.minimum((words & REUSE_USES_MAX) + many, REUSE_USES_MAX)
        reuse[at] = words & _HOLDERS | reuse_ticks(now) << REUSE_USED_SHIFT | uses

    def show_holders(self, rows: Array, holders: Array) -> None:
        """Stores how many clients hold each entry now, for readers; (n,) uint64."""
        at, reuse = self._slot_of[rows], self._slots.reuse
        reuse[at] = reuse[at] & ~np.uint64(_HOLDERS) | np.minimum(holders, REUSE_HOLDERS_MAX) << REUSE_HOLDERS_SHIFT


def unpack_uses(words: Array) -> tuple[Array, Array]:
    """The numbers of uses in reuse words, and the times of the last ones, 0.0 for never."""
    return words & REUSE_USES_MAX, (words >> REUSE_USED_SHIFT & REUSE_TICKS_MAX) / REUSE_TICKS_PER_S

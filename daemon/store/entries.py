"""The state of one store's entries: what the packages of the store share, and change in turn.

Owns: which part of this package refers to which. Does not own any behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import shake_256
from itertools import count
from typing import Final

from ...shm.index.index import IndexWriter
from ...shm.ring.layout import IndexGeometry
from ..replacement import POLICIES, Facts
from .families import Families
from .grants import Grants
from .holes import Holes
from .slots import Details, Slots
from .spans import Spans
from .table import ROW_BITS_MAX, RowTable
from .tenants import AgentNumbers, Tenants

ROW_BITS_MIN: Final = 12


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The shared memory of a store. `index_bytes`: the whole index segment; `ring`: the whole ring, writable;
    `ready_bytes`: how many of its first bytes may be used."""

    index: IndexWriter
    index_bytes: memoryview
    geometry: IndexGeometry
    ring: memoryview
    ready_bytes: int


class Entries:
    """The entries of one ring, by their rows. `seed`: 128 random bits that nobody else knows."""

    def __init__(self, memory: StoreMemory, policy: str, epoch: int, seed: int) -> None:
        self.memory = memory
        self.ring = memory.ring
        # Rows for entries, and as many for grants, for their pieces, and for spans that wait for a scan.
        row_bits = min(max((2 * memory.geometry.slot_count).bit_length() - 1, ROW_BITS_MIN), ROW_BITS_MAX)
        self.table = table = RowTable(row_bits, epoch)
        self.holes = Holes(table, memory.ready_bytes)
        self.slots = Slots(memory.index_bytes, memory.geometry)
        self.tenants = Tenants()
        self.agents = AgentNumbers()
        self.families = Families(table)
        self.details = Details(table, self.slots, memory.ring)
        self.grants = Grants(table, self.holes, self.slots, self.tenants, _random_bytes(seed))
        self.policy = POLICIES[policy](Facts.of(table.column))
        self.spans = Spans(table, self.slots, self.grants, self.tenants, self.families, self.policy)


class OverEntries:
    """Works on the entries of one store: has what they consist of as its own."""

    def __init__(self, entries: Entries) -> None:
        self._table = entries.table
        self._holes = entries.holes
        self._slots = entries.slots
        self._tenants = entries.tenants
        self._families = entries.families
        self._details = entries.details
        self._grants = entries.grants
        self._policy = entries.policy
        self._spans = entries.spans
        self._ring = entries.ring


def _random_bytes(seed: int) -> Callable[[int], bytes]:
    """Makes bytes that nobody can guess who does not know the seed: for the slots of grants."""
    secret, numbers = seed.to_bytes(16, "little"), count()
    return lambda size: shake_256(secret + next(numbers).to_bytes(8, "little")).digest(size)

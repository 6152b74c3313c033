"""The parts of one store's core, created and connected here.

Owns the limits in force, and which part refers to which. Does not own any behaviour. Invariant: a part receives the
parts that it uses when it is created, so no two refer to each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ...shm.index import IndexWriter
from ...shm.layout import IndexGeometry
from ..claims.claims import NOBODY, ClaimTable
from ..claims.unstorable import Unstorable
from ..prefix.blocks import SequenceBlocks
from ..prefix.matching import Matching
from ..remote.remote import Remote
from ..replacement import POLICIES, Facts
from ..store.agents import Agents
from ..store.commit import CommitLimits, Commits, Submitter
from ..store.families import Families
from ..store.grants import Grants
from ..store.holes import Holes
from ..store.slots import Slots
from ..store.spans import Spans
from ..store.table import ROW_BITS_MAX, RowTable
from ..store.tenants import Tenants
from .budget import RingBudget
from .counters import StoreCounters
from .limits import StoreLimits
from .outbox import StoreOutbox
from .quotas import Quotas

ROW_BITS_MIN = 12
ROWS_PER_ENTRY = 2
"""Rows for entries, and as many for grants, pieces of them, and spans that wait for a scan."""


@dataclass(frozen=True, slots=True)
class RingMemory:
    """The shared memory of a store. `index_bytes`: the whole index segment; `ring`: the ring's bytes, writable;
    `ready_bytes`: how many of them may be used."""

    index: IndexWriter
    index_bytes: memoryview
    geometry: IndexGeometry
    ring: memoryview
    ready_bytes: int

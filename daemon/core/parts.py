"""The parts of one store's core, created and connected here.

Owns the limits in force, and which part refers to which. Does not own any behaviour. Invariant: a part receives the
parts that it uses when it is created, so no two refer to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import shake_256
from itertools import count
from typing import Final

from ...ipc.messages import control as messages
from ...shm.index.index import IndexWriter
from ...shm.ring.layout import IndexGeometry
from ..claims.claims import NOBODY, ClaimTable
from ..claims.quotas import Quotas
from ..claims.unstorable import Unstorable
from ..forms.limits import RingBudget, StoreLimits
from ..forms.outbox import StoreOutbox
from ..host_memory.host_memory import HostMemory
from ..lifetimes.lifetimes import Lifetimes
from ..prefix.blocks import SequenceBlocks
from ..prefix.matching import Matching
from ..remote.remote import Remote
from ..replacement import POLICIES, Facts
from ..reports.counters import StoreCounters
from ..reports.hits import Hits
from ..reports.removal_history import RemovalHistory
from ..room.lending import Lending
from ..room.runway import Runway
from ..room.shares import OwnerShares
from ..store.agents import AgentNumbers
from ..store.commit import CommitLimits, Commits, Submitter
from ..store.details import Details
from ..store.families import Families
from ..store.grants import Grants
from ..store.holes import Holes
from ..store.slots import Slots
from ..store.spans import Spans
from ..store.table import ROW_BITS_MAX, RowTable
from ..store.tenants import Tenants
from .reports import Reports

ROW_BITS_MIN: Final = 12
NO_TOKENS_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The shared memory of a store. `index_bytes`: the whole index segment; `ring`: the whole ring, writable;
    `ready_bytes`: how many of its first bytes may be used."""

    index: IndexWriter
    index_bytes: memoryview
    geometry: IndexGeometry
    ring: memoryview
    ready_bytes: int


class Parts:
    """All parts of one store. A reload of the configuration replaces `limits`, and no part."""

    def __init__(
        self, memory: StoreMemory, policy: str, limits: StoreLimits, quotas: Quotas, epoch: int, seed: int
    ) -> None:
        self.memory = memory
        self.limits = limits
        self.quotas = quotas
        self.index = memory.index
        self.generations = memory.index.generations
        self.counters = StoreCounters()
        self.outbox = outbox = StoreOutbox(self.counters)
        self.budget = RingBudget(limits.max_entries, limits.max_bytes, limits.max_tokens)
        # Rows for entries, and as many for grants, for their pieces, and for spans that wait for a scan.
        row_bits = min(max((2 * memory.geometry.slot_count).bit_length() - 1, ROW_BITS_MIN), ROW_BITS_MAX)
        self.table = table = RowTable(row_bits, epoch)
        self.holes = holes = Holes(table, memory.ready_bytes)
        self.slots = slots = Slots(memory.index_bytes, memory.geometry)
        self.tenants = tenants = Tenants()
        self.agents = AgentNumbers()
        self.families = families = Families(table)
        self.grants = grants = Grants(table, holes, slots, tenants, _random_bytes(seed))
        self.policy = POLICIES[policy](Facts.of(table.column))
        self.blocks = SequenceBlocks(table, slots, memory.ring, seed, limits.prefix_tokens_max)
        self.spans = spans = Spans(table, slots, grants, tenants, families, self.policy, self.blocks)
        self.claims = claims = ClaimTable(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max, epoch)
        self.unstorable = Unstorable(self.counters.claims_unstorable)
        self.commit_limits = CommitLimits(NO_TOKENS_MAX)
        self.commits = Commits(
            table,
            holes,
            slots,
            grants,
            self.policy,
            tenants,
            families,
            self.agents,
            memory.ring,
            self.commit_limits,
            claims.by_key,
            self.is_past,
            spans.recall,
            self.blocks.take,
            spans.hidden,
            spans.replaced,
        )
        self.apply_commit_limits()
        self.details = Details(table, slots, memory.ring)
        self.removal_history = RemovalHistory(limits.max_entries)
        self.hits = Hits(table, limits.ring_bytes, lambda: self.budget.put_bytes_max)
        self.lifetimes = Lifetimes(
            table,
            self.details,
            tenants,
            families,
            spans,
            self.policy,
            self.generations,
            self.removal_history,
            self.hits,
            quotas,
            outbox,
            pins_per_client_max=limits.pins_per_client_max,
            pinned_bytes_max=limits.pinned_bytes_max,
        )
        self.shares = OwnerShares(tenants, self.budget)
        self.runway = Runway(
            table,
            holes,
            slots,
            grants,
            tenants,
            families,
            spans,
            self.commits,
            self.policy,
            self.shares,
            self.budget,
            memory.ring,
            self.counters,
            outbox.add,
            withdrawn=lambda: self.host_memory.withdrawn.size_bytes,
            rescan_s=limits.rescan_s,
        )
        self.own = Submitter(NOBODY, tenants.owner(quotas.own_uid), quotas.own_uid)
        self.lending = Lending(
            self.runway,
            table,
            holes,
            grants,
            tenants,
            self.shares,
            limits,
            self.budget,
            self.own,
            outbox.send,
            outbox.count_refusal,
        )
        self.commit_own: Callable[[memoryview, float], object] = lambda record, now: None
        """Set by the store."""
        self.remote = Remote(
            table,
            slots,
            tenants,
            self.own,
            self.lending,
            lambda record, now: self.commit_own(record, now),
            self.generations,
            self.invalidate,
            claims,
            outbox,
            limits,
        )
        self.host_memory = HostMemory(
            table,
            holes,
            spans,
            families,
            self.policy,
            self.budget,
            self.remote.writes,
            outbox,
            self.runway.places.join,
            limits.rescan_s,
        )
        self.runway.pages = self.host_memory
        self.matching = Matching(
            table, slots, self.agents, self.blocks, self.lifetimes.uses.used, outbox, limits.prefix_wait_s
        )
        self.reports = Reports(self, epoch)

    @property
    def ring_bytes(self) -> int:
        """The ring's final size."""
        return self.limits.ring_bytes if self.runway.is_growing else self.holes.capacity_bytes

    def is_past(self, key: bytes) -> bool:
        """Whether the key's generation is past."""
        return self.generations.is_past(key)

    def invalidate(self, tag: bytes, generation: int) -> None:
        """Raises a namespace's generation for the daemon itself.

        Raises:
            LimitReached: as `Sweeps.invalidate`.
        """
        self.lifetimes.sweeps.invalidate(NOBODY, messages.Invalidate(0, tag, generation - 1))

    def apply_commit_limits(self) -> None:
        """Commits count against the limits in force from now on."""
        limits = self.commit_limits
        limits.max_tokens = NO_TOKENS_MAX if self.limits.max_tokens is None else self.limits.max_tokens
        limits.default_ttl_s = self.limits.default_ttl_s or 0.0


def _random_bytes(seed: int) -> Callable[[int], bytes]:
    """Makes bytes that nobody can guess who does not know the seed, a number of 128 bits: for the slots of grants."""
    secret, numbers = seed.to_bytes(16, "little"), count()
    return lambda size: shake_256(secret + next(numbers).to_bytes(8, "little")).digest(size)

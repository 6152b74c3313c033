"""The parts of one store's core, created and connected here.

Owns the limits in force, and which part refers to which. Does not own any behaviour. Invariant: a part receives the
parts that it uses when it is created, so no two refer to each other.
"""

from __future__ import annotations

from ...ipc.messages import control as messages
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
from ..reports.counters import StoreCounters
from ..reports.hits import Hits
from ..reports.removal_history import RemovalHistory
from ..room.lending import Lending
from ..room.runway import Runway
from ..store.commit import NO_TOKENS_MAX, Commits
from ..store.entries import Entries, StoreMemory
from .reports import Reports


class Parts(Entries):
    """All parts of one store. A reload of the configuration replaces `limits`, and no part."""

    def __init__(
        self, memory: StoreMemory, policy: str, limits: StoreLimits, quotas: Quotas, epoch: int, seed: int
    ) -> None:
        super().__init__(memory, policy, epoch, seed)
        table, slots, spans = self.table, self.slots, self.spans
        self.limits = limits
        self.quotas = quotas
        self.index = memory.index
        self.generations = memory.index.generations
        self.counters = StoreCounters()
        self.outbox = outbox = StoreOutbox(self.counters)
        self.budget = RingBudget(limits.max_entries, limits.max_bytes, limits.max_tokens)
        self.blocks = SequenceBlocks(table, slots, memory.ring, seed, limits.prefix_tokens_max)
        spans.unblock = self.blocks.index.remove
        self.claims = claims = ClaimTable(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max, epoch)
        self.unstorable = Unstorable(self.counters.claims_unstorable)
        self.commits = Commits(self, claims.by_key, self.generations.is_past, self.blocks.take)
        self.apply_commit_limits()
        self.removal_history = RemovalHistory(limits.max_entries)
        self.hits = Hits(table, limits.ring_bytes, lambda: self.budget.put_bytes_max)
        self.lifetimes = Lifetimes(self, self.generations, self.removal_history, self.hits, quotas, outbox, limits)
        self.runway = Runway(self, self.commits, self.budget, outbox)
        self.lending = Lending(self, self.runway, limits, self.budget, outbox, quotas.own_uid)
        self.own = self.lending.own
        self.remote = Remote(self, self.lending, self.invalidate, claims, outbox, limits)
        writes, places = self.remote.writes, self.runway.places
        self.host_memory = HostMemory(self, self.budget, writes, outbox, places.join)
        self.runway.pages = self.host_memory
        self.matching = Matching(
            table, slots, self.agents, self.blocks, self.lifetimes.used, outbox, limits.prefix_wait_s
        )
        self.reports = Reports(self, epoch)

    def invalidate(self, tag: bytes, generation: int) -> None:
        """Raises a namespace's generation for the daemon itself. Raises LimitReached as `Sweeps.invalidate`."""
        self.lifetimes.sweeps.invalidate(NOBODY, messages.Invalidate(0, tag, generation - 1))

    def apply_commit_limits(self) -> None:
        """Commits count against the limits in force from now on."""
        tokens_max = self.limits.max_tokens
        self.commits.tokens_max = NO_TOKENS_MAX if tokens_max is None else tokens_max
        self.commits.default_ttl_s = self.limits.default_ttl_s or 0.0

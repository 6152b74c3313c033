"""The parts of one store's core, created and connected here.

Owns the limits in force, and which part refers to which. Does not own any behaviour. Invariant: a part receives the
parts that it uses when it is created, so no two refer to each other.
"""

from __future__ import annotations

from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ..policy.replacement import Replacement
from ..reports.removal_history import RemovalHistory
from .budget import RingBudget
from .claims import ClaimTable
from .counters import StoreCounters
from .expiry import Expiry
from .hits import Hits
from .idle_sweep import IdleSweep
from .intake import Intake
from .limits import StoreLimits
from .matching import Matching
from .outbox import StoreOutbox
from .pins import Pins
from .publication import Publication
from .put_answers import PutAnswers
from .quotas import Quotas
from .reclaim import Reclaim
from .remote.agreement import Agreement
from .remote.demotion import Demotion
from .remote.fetches import Fetches
from .remote.host_claims import HostClaims
from .remote.link import RemoteLink
from .remote.runs import Runs
from .remote.writes import Writes
from .residency import Residency
from .residency_report import ResidencyReport
from .room import Room
from .sequences import Sequences
from .span_table import SpanTable
from .sweeps import Sweeps
from .unstorable import Unstorable


class Parts:
    """All parts of one store. A reload of the configuration replaces `limits`, and no part."""

    def __init__(
        self,
        index: IndexWriter,
        ring: SpanAllocator,
        policy: Replacement,
        sequences: Sequences,
        limits: StoreLimits,
        quotas: Quotas,
        epoch: int,
    ) -> None:
        self.limits = limits
        self.quotas = quotas
        self.counters = StoreCounters()
        self.outbox = outbox = StoreOutbox(self.counters)
        self.budget = RingBudget(limits.max_entries, limits.max_bytes, limits.max_tokens)
        self.memory = memory = SpanTable(index, ring, policy, sequences, self.budget, epoch)
        self.pins = Pins(limits.pins_per_client_max, limits.pinned_bytes_max)
        self.claims = claims = ClaimTable(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max, epoch)
        self.removal_history = RemovalHistory(limits.max_entries)
        self.hits = Hits(limits.ring_bytes)
        self.expiry = expiry = Expiry(memory, self.pins, outbox, self.removal_history, self.hits, limits.default_ttl_s)
        self.room = room = Room(memory, self.pins)
        self.residency = residency = Residency(memory, outbox)
        self.link = link = RemoteLink(outbox)
        self.sweeps = Sweeps(memory, expiry, outbox, quotas)
        self.agreement = agreement = Agreement(memory, self.sweeps, claims, link, outbox, limits)
        self.host_claims = host_claims = HostClaims(link, outbox)
        claims.given_up = host_claims.given_up
        self.writes = writes = Writes(memory, link, agreement, host_claims, outbox, limits)
        self.demotion = demotion = Demotion(writes, outbox)
        self.idle_sweep = IdleSweep(memory, room, demotion)
        self.reclaim = Reclaim(memory, room, residency, demotion, expiry, claims, outbox, limits.rescan_s)
        self.fetches = fetches = Fetches(claims, link, agreement, host_claims, writes, outbox, limits)
        self.runs = Runs(memory, link, agreement, fetches, outbox)
        self.unstorable = unstorable = Unstorable(self.counters.claims_unstorable)
        answers = PutAnswers(memory, expiry, claims, unstorable, fetches, writes, outbox)
        publication = Publication(memory, expiry, answers, outbox, limits)
        self.intake = Intake(memory, room, residency, self.reclaim, publication, answers, claims, outbox, limits)
        self.residency_report = ResidencyReport(memory, residency, self.idle_sweep, outbox)
        self.matching = Matching(memory, expiry, outbox, limits.prefix_tokens_max, limits.prefix_wait_s)

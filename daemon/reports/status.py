"""The store's part of the status. Owns only its form. Invariants: nothing is changed, and the cost does not depend on
the number of entries, but for the window, which takes 3 ms for a million rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...shm.index.generations import GenerationWriter
    from ..claims.claims import ClaimTable
    from ..claims.unstorable import Unstorable
    from ..core.budget import RingBudget
    from ..lifetimes.lifetimes import Lifetimes
    from ..prefix.blocks import SequenceBlocks
    from ..prefix.matching import Matching
    from ..replacement import Replacement
    from ..store.commit import Submitter
    from ..store.grants import Grants
    from ..store.holes import Holes
    from ..store.spans import Spans
    from ..store.table import RowTable
    from ..store.tenants import Tenants
    from .counters import StoreCounters
    from .hits import Hits
    from .removal_history import RemovalHistory


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The figures of one store, from these parts of it. `besides`: the figures of other rooms, at a time."""

    epoch: int
    table: RowTable
    holes: Holes
    tenants: Tenants
    grants: Grants
    submitters: Mapping[int, Submitter]
    spans: Spans
    policy: Replacement
    budget: RingBudget
    generations: GenerationWriter
    claims: ClaimTable
    unstorable: Unstorable
    blocks: SequenceBlocks
    matching: Matching
    lifetimes: Lifetimes
    hits: Hits
    history: RemovalHistory
    counters: StoreCounters
    besides: Callable[[float], Mapping[str, Any]]

    def status(self, now: float) -> dict[str, Any]:
        """Sizes in bytes, counts, and the counters since the daemon started.

        `used_bytes`: of entries, of grants, and of what waits for a scan. `lent_bytes`: of `grants`, as far as nothing
        is stored there. `retired_bytes`: of ended entries that are not free yet.
        """
        claims, pins = self.claims, self.lifetimes.pins
        return {
            "epoch": self.epoch,
            "policy": self.policy.name,
            "entries": len(self.table.by_key),
            "max_entries": self.budget.max_entries,
            "tokens": self.tenants.total_tokens,
            "max_tokens": self.budget.max_tokens,
            "used_bytes": sum(self.tenants.owned_bytes),
            "max_bytes": self.budget.max_bytes,
            "ring_bytes": self.holes.capacity_bytes,
            "largest_free_bytes": self.holes.largest_bytes,
            "holes": len(self.holes),
            "lent_bytes": self.grants.lent_bytes,
            "grants": sum(len(each.grants) for each in self.submitters.values()),
            "retired_bytes": self.spans.ended_bytes,
            "pinned_spans_seen": len(self.spans.last_pinned),
            "claims_held": len(claims),
            "claims_waiting": claims.waiting,
            "claims_granted": claims.granted,
            "claims_handed_over": claims.handed_over,
            "unstorable_keys": len(self.unstorable),
            "unstorable": self.unstorable.rows(now),
            "pins": len(pins),
            "pinned_bytes": pins.pinned_bytes,
            "namespaces": self.tenants.namespaces,
            "sweeps": len(self.lifetimes.sweeps),
            "window_bytes": self.policy.window_bytes,
            "hit_ratios": self.hits.as_dict(now),
            "at_eviction": self.history.made_room(),
            "prefix_blocks": len(self.blocks.index),
            "prefix_rebuilding": self.blocks.rebuilding,
            "prefix_queries_waiting": self.matching.held,
            **self.besides(now),
            **self.counters.as_dict(),
        }

    def by_uid(self, besides: Iterable[int] = ()) -> dict[int, dict[str, int]]:
        """The amounts that each uid has of shared resources: for every uid that has any, and for those of `besides`."""
        tenants, claims, namespaces, sizes = self.tenants, self.claims.of_uid, self.generations.of_uid, self.table.sizes
        lent: Counter[int] = Counter()
        for each in self.submitters.values():
            lent[each.uid] += sum(sizes[piece] for grant in each.grants.values() for piece in grant.pieces)
        owners = {uid: owner for uid, owner in tenants.owner_of.items() if tenants.owned_bytes[owner]}
        rows: dict[int, dict[str, int]] = {}
        for uid in {*besides, *owners, *claims, *namespaces}:
            owner = owners.get(uid)
            rows[uid] = {
                "span_bytes": 0 if owner is None else tenants.owned_bytes[owner],
                "entries": 0 if owner is None else tenants.owned_entries[owner],
                "tokens": 0 if owner is None else tenants.owned_tokens[owner],
                "claims": claims[uid],
                "namespaces": namespaces[uid],
                "lent_bytes": lent[uid],
            }
        return rows

    def hit_curve(self) -> dict[str, Any]:
        """Estimated hit ratios of rings of other sizes (`Hits.curve`), and the name of the policy."""
        return {"policy": self.policy.name, **self.hits.curve()}

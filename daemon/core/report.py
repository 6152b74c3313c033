"""The store's part of the status. Owns only its form. Invariants: nothing is changed, and the cost does not depend on
the number of entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from .entries import SpanEntry
from .host_memory import Pressed

if TYPE_CHECKING:
    from .store import Store


def status(store: Store, now: float) -> dict[str, Any]:
    """Sizes in bytes, counts, and the counters since the daemon started."""
    memory, ring, puts = store.memory, store.memory.ring, store.intake.puts
    return {
        "epoch": store.epoch,
        "policy": memory.policy.name,
        "entries": len(memory.entries),
        "max_entries": store.budget.max_entries,
        "tokens": memory.spans.taken_tokens,
        "max_tokens": store.budget.max_tokens,
        "used_bytes": ring.used_bytes,
        "max_bytes": store.budget.max_bytes,
        "ring_bytes": ring.capacity_bytes,
        "ring_bytes_final": store.limits.ring_bytes,
        "ring_growing": store.intake.ring_is_growing,
        "largest_free_bytes": ring.largest_free_bytes,
        "holes": ring.hole_count,
        "resident_bytes": store.residency.resident_bytes,
        # Less than the ring's own sum: pages that are still being punched are resident.
        "withdrawn_bytes": store.residency.punched_bytes,
        "withdrawn_extents": ring.withdrawn_count,
        "regrow_error": store.residency.error,
        "pressed": _pressed(store.idle_sweep.pressed),
        "retired_bytes": memory.spans.retired_bytes,
        "pinned_spans_seen": len(memory.last_pinned),
        "puts_in_flight": len(puts),
        "puts_waiting": puts.waiting,
        "puts_announced": puts.announced,
        "announced_bytes": puts.arrivals.announced_bytes,
        "claims_held": len(store.claims),
        "claims_waiting": store.claims.waiting,
        "unstorable_keys": len(store.unstorable),
        "unstorable": store.unstorable.rows(now),
        "pins": len(store.pins),
        "pinned_bytes": store.pins.pinned_bytes,
        "namespaces": memory.entries.namespace_count,
        "sweeps": len(store.sweeps),
        "window_bytes": memory.policy.window_bytes,
        "hit_ratios": store.hits.as_dict(now),
        "at_eviction": store.removal_history.made_room(),
        "evicted_while_pinned": memory.evicted_while_pinned,
        "prefix_blocks": len(memory.sequences),
        "chain_blocks": memory.sequences.chained,
        "prefix_rebuilding": memory.sequences.rebuilding,
        "prefix_queries_waiting": store.matching.held,
        "remote_state": _remote(store, now),
        "claims_granted": store.claims.granted,
        "claims_handed_over": store.claims.handed_over,
        **store.counters.as_dict(),
    }


def by_uid(store: Store, besides: Iterable[int]) -> dict[int, dict[str, int]]:
    """As `Store.by_uid`."""
    puts = Counter(put.uid for put in store.intake.puts)
    announced = store.intake.puts.arrivals.by_uid()
    holdings, claims, namespaces = (
        store.memory.spans.holdings,
        store.claims.of_uid,
        store.memory.index.generations.of_uid,
    )
    rows: dict[int, dict[str, int]] = {}
    for uid in {*besides, *puts, *claims, *namespaces, *holdings.uids()}:
        holding = holdings.of(uid)
        rows[uid] = {
            "span_bytes": holding.size_bytes,
            "entries": holding.entries,
            "tokens": holding.tokens,
            "claims": claims[uid],
            "namespaces": namespaces[uid],
            "puts_in_flight": puts[uid],
            "announced_bytes": announced.get(uid, 0),
        }
    return rows


def _remote(store: Store, now: float) -> dict[str, Any] | None:
    """What the daemon knows of the remote store; None without one. `why`: the error for which it is left alone;
    `refuses_writes`: the one for which it is only read; `not_agreed`: namespaces whose generation it does not take."""
    if not store.limits.remote_s:
        return None
    speed = store.link.speed
    refuses_writes = store.link.taking.why if store.limits.remote_writes else ""
    refused = store.agreement.refused
    return {
        "serves": store.link.breaker.closed,
        "why": store.link.breaker.why,
        "left_alone": store.link.breaker.opened,
        "refuses_writes": refuses_writes,
        "full": bool(refuses_writes) and store.link.full,
        "read_only": bool(refuses_writes) and not store.link.full,
        "not_agreed": len(refused),
        "not_agreed_why": refused[-1] if refused else "",
        "fetches": len(store.fetches),
        "writes": store.writes.under_way,
        "queued": store.writes.queued,
        "queued_bytes": store.writes.queued_bytes,
        "too_slow": store.link.slowness.why,
        "refuses_removals": store.link.removing.why,
        "removals": store.writes.removals,
        "removals_dropped": store.counters.remote["removals_dropped"],
        "answer_s": speed.answer_s.known(now),
        "read_bytes_per_s": speed.bytes_per_s(now),
    }


def _pressed(pressed: Pressed) -> dict[str, Any] | None:
    """The demands of the last Pressed; None without any."""
    return None if pressed == Pressed() else asdict(pressed)


def _prefix(store: Store, entry: SpanEntry) -> dict[str, Any] | None:
    record = store.memory.sequences.record(entry)
    if record is None:
        return None
    return {
        "start": record.start,
        "tokens": record.count,
        "snapshot": record.snapshot,
        "parent": None if record.parent is None else record.parent.hex(),
        "children": entry.child_count,
    }


def entry(store: Store, entry: SpanEntry) -> dict[str, Any]:
    """One entry. `key` and `namespace` are hexadecimal, times are Unix seconds. `prefix`: for a block of a cached
    sequence its first token, its number of tokens, its parent's key and its number of children; otherwise None.
    `parent`: the key of the entry's parent, or None; `children`: the number of entries whose parent it is."""
    zero_s = store.unix_at_zero_s
    expires_at = entry.expires_at
    return {
        "key": entry.key.hex(),
        "namespace": entry.tag.hex(),
        "payload_bytes": entry.payload_bytes,
        "span_bytes": entry.span_bytes,
        "tree_bytes": entry.tree_bytes,
        "tokens": entry.tokens,
        "uses": entry.uses,
        "created_unix_s": zero_s + entry.created_at,
        "used_unix_s": zero_s + entry.used_at,
        "expires_unix_s": None if expires_at is None else zero_s + expires_at,
        "pinned_by_message": store.pins.holds(entry.span_id),
        "owner_uid": entry.owner_uid,
        "cost_ms": entry.cost_ms,
        "agent": entry.agent,
        "prefix": _prefix(store, entry),
        "parent": None if entry.parent is None else entry.parent.key.hex(),
        "children": entry.child_count,
        "span_id": entry.span_id,
    }

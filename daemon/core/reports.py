"""What people are told of a store: its status, its entries page by page, and why a key's entry stays or has left.

Owns the form of answers, and the cursor of pages. Does not own entries, records or the policy's memory.

Invariants: nothing is changed. The cost of a status does not depend on the number of entries. An entry that is stored
during all pages is on exactly one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import asdict

from ...shm.ring.layout import KEY_BYTES, NAMESPACE_TAG_BYTES
from ..forms.events import Pressed
from ..store.table import LIVE

if TYPE_CHECKING:
    from .parts import Parts

ENTRIES_MAX: Final = 256
"""Entries on one page: 2 to 3 ms."""
LOOKS_MAX: Final = 1 << 18
COMPARED: Final = 128
"""Entries that one entry is compared with. The share of colder ones is then mostly right to 4 points."""
_DIGEST: Final = slice(16, 24)
"""The part of a key that is its digest (`RowTable.digests`)."""

Array = np.ndarray[Any, Any]


class Reports:
    """Describes one store, made of these `parts`. `unix_at_zero_s`: the Unix time at time 0, for times shown to people.
    The caller of a query sets it anew, since the wall clock may have been set meanwhile."""

    def __init__(self, parts: Parts, epoch: int) -> None:
        self.unix_at_zero_s = 0.0
        self._parts = parts
        self._epoch = epoch
        self._states: Array = np.frombuffer(parts.table.states, np.uint8)

    # ---- the store

    def status(self, now: float) -> dict[str, Any]:
        """Sizes in bytes, counts, and the counters since the daemon started.

        `used_bytes`: of entries, of grants, and of what waits for a scan. `lent_bytes`: of `grants`, as far as nothing
        is stored there. `retired_bytes`: of ended entries that are not free yet.
        """
        parts = self._parts
        claims, pins, budget = parts.claims, parts.lifetimes.pins, parts.budget
        host_memory, residency = parts.host_memory, parts.host_memory.residency
        return {
            "epoch": self._epoch,
            "policy": parts.policy.name,
            "entries": len(parts.table.by_key),
            "max_entries": budget.max_entries,
            "tokens": parts.tenants.total_tokens,
            "max_tokens": budget.max_tokens,
            "used_bytes": sum(parts.tenants.owned_bytes),
            "max_bytes": budget.max_bytes,
            "ring_bytes": parts.holes.capacity_bytes,
            "largest_free_bytes": parts.runway.places.largest_bytes,
            "lent_bytes": parts.grants.lent_bytes,
            "grants": sum(len(each.grants) for each in parts.lending.submitters.values()),
            "retired_bytes": parts.spans.ended_bytes,
            "claims_held": len(claims),
            "claims_waiting": claims.waiting,
            "claims_granted": parts.counters.claims["compute"],
            "claims_handed_over": claims.handed_over,
            "unstorable": parts.unstorable.rows(now),
            "pins": len(pins),
            "pinned_bytes": pins.pinned_bytes,
            "namespaces": parts.tenants.namespaces,
            "sweeps": len(parts.lifetimes.sweeps),
            "hit_ratios": parts.hits.as_dict(now),
            "prefix_blocks": len(parts.blocks.index),
            "prefix_rebuilding": parts.blocks.rebuilding,
            "ring_growing": parts.runway.is_growing,
            "resident_bytes": residency.resident_bytes,
            # Pages that are still being punched are resident.
            "withdrawn_bytes": residency.punched_bytes,
            "withdrawn_extents": len(host_memory.withdrawn.rows),
            "regrow_error": residency.error,
            "pressed": None if host_memory.pressed == Pressed() else asdict(host_memory.pressed),
            "grants_waiting": parts.lending.waiting,
            "remote_state": parts.remote.state(now) if parts.limits.remote_s else None,
            **parts.counters.as_dict(),
        }

    def by_uid(self, besides: Iterable[int] = ()) -> dict[int, dict[str, int]]:
        """The amounts that each uid has of shared resources: for every uid that has any, and for those of `besides`."""
        parts = self._parts
        tenants, claims, namespaces = parts.tenants, parts.claims.of_uid, parts.generations.of_uid
        lent: Counter[int] = Counter()
        for each in parts.lending.submitters.values():
            lent[tenants.uids[each.owner]] += sum(
                parts.table.sizes[piece] for grant in each.grants.values() for piece in grant.pieces
            )
        owners = {uid: owner for uid, owner in tenants.owner_of.items() if tenants.owned_bytes[owner]}
        rows: dict[int, dict[str, int]] = {}
        for uid in {*besides, *owners, *claims, *namespaces}:
            owned = tenants.owned_bytes, tenants.owned_entries, tenants.owned_tokens
            span_bytes, entries, tokens = (each[owners[uid]] if uid in owners else 0 for each in owned)
            rows[uid] = {
                "span_bytes": span_bytes,
                "entries": entries,
                "tokens": tokens,
                "claims": claims[uid],
                "namespaces": namespaces[uid],
                "lent_bytes": lent[uid],
            }
        return rows

    def hit_curve(self) -> dict[str, Any]:
        """Estimated hit ratios of rings of other sizes (`Hits.curve`), and the name of the policy."""
        return {"policy": self._parts.policy.name, **self._parts.hits.curve()}

    # ---- entries

    def page(
        self, after: bytes | None, count: int, namespace: bytes | None, now: float
    ) -> tuple[list[dict[str, Any]], bytes | None]:
        """Up to `count` published entries, or ENTRIES_MAX, behind the cursor `after`; fewer if many rows have none of
        them. And the cursor of the next page; None at the end."""
        table = self._parts.table
        first = 1 if after is None else min(int.from_bytes(after, "big"), table.row_mask) + 1
        rows = slice(first, first + LOOKS_MAX)
        fits = self._states[rows] == LIVE
        if namespace is not None:
            fits &= table.column("namespaces")[rows] == self._parts.tenants.number_of.get(namespace, -1)
        most = min(count, ENTRIES_MAX)
        found = (np.flatnonzero(fits)[:most] + first).tolist()
        last = found[-1] if len(found) == most else first + LOOKS_MAX - 1
        behind = last.to_bytes(KEY_BYTES, "big") if last < table.row_mask else None
        return [self._described(row, now) for row in found], behind

    def why(self, key: bytes, now: float, leased: bool | None = None) -> dict[str, Any]:
        """All that is known of a key. `leased`: whether a lane pins its entry now; None: unknown, so the last scan
        decides.

        `state`: "stored"; "leaving" while a scan checks whether a reader pins it; "gone"; or "unknown". `reason`: why a
        leaving entry is evicted, empty in the other states. `entry` and `standing` describe a stored entry. `gone`
        describes the key's latest removal, if it is among the last `records`. `remembered`: what the policy remembers
        of the key without storing it, which may be that its put was refused. The last four are None if there is
        nothing to report.
        """
        parts = self._parts
        row, leaving = parts.table.by_key.get(key), parts.spans.hidden.get(key)
        last = parts.removal_history.find(key)
        memory = gone = None
        if not row and not leaving:
            memory = parts.policy.recall(int.from_bytes(key[_DIGEST], "little"))
        if last is not None:
            at = last.pop("at")
            gone = {**last, "gone_unix_s": self.unix_at_zero_s + at, "gone_s": max(0.0, now - at)}
        return {
            "key": key.hex(),
            "state": "stored" if row else "leaving" if leaving else "gone" if last or memory else "unknown",
            "reason": parts.spans.reason_of(leaving) if leaving and not row else "",
            "policy": parts.policy.name,
            "entry": self._described(row, now) if row else None,
            "standing": self._standing(row, now, leased) if row else None,
            "gone": gone,
            # Without a worth: the cost and the size may differ when the key is put again.
            "remembered": memory and {"uses": memory.uses, "like": list(memory.like), "comes_back": memory.comes_back},
            "records": len(parts.removal_history),
        }

    def _described(self, row: int, now: float) -> dict[str, Any]:
        """One entry. `key` and `namespace` are hexadecimal, times are Unix seconds. `agent` is empty if no client has
        named it. `prefix`: for a block of a cached sequence its first token, its number of tokens, its parent's key and
        its number of children; otherwise None. `parent`: the key of the entry's parent, or None; `children`: the number
        of entries whose parent it is."""
        parts, zero_s = self._parts, self.unix_at_zero_s
        table, details, record = parts.table, parts.details, parts.blocks.record(row)
        created, used, uses = self._times(row, now)
        expires = details.expires(row)
        key = self._key(row)
        return {
            "key": key,
            "namespace": key[: 2 * NAMESPACE_TAG_BYTES],
            "payload_bytes": table.payloads[row],
            "span_bytes": table.sizes[row],
            "tree_bytes": details.tree_bytes(row),
            "tokens": table.tokens[row],
            "uses": uses,
            "created_unix_s": zero_s + created,
            "used_unix_s": zero_s + used,
            "expires_unix_s": zero_s + expires if expires else None,
            "pinned_by_message": parts.lifetimes.pins.holds(row),
            "owner_uid": parts.tenants.uids[table.owners[row]],
            "cost_ms": details.cost(row),
            "agent": parts.agents.name(table.agents[row]),
            "prefix": record
            and {
                "start": record.start,
                "tokens": record.count,
                "snapshot": record.snapshot,
                "parent": None if record.parent is None else record.parent.hex(),
                "children": table.children[row],
            },
            "parent": self._key(table.parents[row]) if table.parents[row] else None,
            "children": table.children[row],
            "span_id": table.span_ids[row],
        }

    def _standing(self, row: int, now: float, leased: bool | None) -> dict[str, Any]:
        """The rank of a stored entry in the order of eviction. `compared`: the number of other entries not in use that
        it was compared with; `colder`: how many of these would be evicted before it. `held`: "pin" for a pin by
        message, "lease" for a pin of a lane, or None. The pins of lanes on other entries are those of the last scan."""
        table, spans, policy = self._parts.table, self._parts.spans, self._parts.policy
        created, used, _ = self._times(row, now)
        explained = policy.explain(row)
        pinned = spans.last_pinned
        free = [each for each in self._sample(row) if each not in spans.held and table.span_ids[each] not in pinned]
        others = [each for each in free if each != row]
        mine, *theirs = policy.standings([row, *others])
        if leased is None:
            leased = table.span_ids[row] in pinned
        return {
            **asdict(explained),
            "like": list(explained.like),
            "age_s": max(0.0, now - created),
            "idle_s": max(0.0, now - used),
            "compared": len(others),
            "colder": sum(other < mine for other in theirs),
            "children": table.children[row],
            "held": "pin" if self._parts.lifetimes.pins.holds(row) else "lease" if leased else None,
        }

    def _sample(self, row: int) -> list[int]:
        """Published entries from everywhere in the table, since rows beside one another were often put together."""
        live = np.flatnonzero(self._states == LIVE)
        if len(live) > COMPARED:
            first = self._parts.table.digests[row] % len(live)
            live = live[(first + np.arange(COMPARED) * len(live) // COMPARED) % len(live)]
        found: list[int] = live.tolist()
        return found

    def _key(self, row: int) -> str:
        return str(self._parts.details.keys(np.array([row])).tobytes().hex())

    def _times(self, row: int, now: float) -> tuple[float, float, int]:
        """When an entry was put, when it was last used or put, and how often it was used."""
        at = np.array([row])
        created = float(self._parts.details.created(at, now)[0])
        uses, used = self._parts.details.uses(at)
        return created, min(max(float(used[0]), created), now), int(uses[0])

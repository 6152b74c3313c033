"""Entries as people are told of them: one by its key, or page by page.

Owns the form of a described entry, and of the cursor of pages. Does not own entries. Nothing is changed.

Invariants: an entry that is stored during all pages is on exactly one of them. A page looks at LOOKS_MAX rows at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...shm.payloads.prefix import PrefixRecord
from ...shm.ring.layout import KEY_BYTES, NAMESPACE_TAG_BYTES
from ..store.agents import AgentNumbers
from ..store.details import Details
from ..store.table import LIVE, RowTable
from ..store.tenants import Tenants

ENTRIES_MAX: Final = 256
"""Entries on one page: 2 to 3 ms."""
LOOKS_MAX: Final = 1 << 18

Array = np.ndarray[Any, Any]


class DescribedEntries:
    """Describes the entries of one store.

    Args:
        pinned: whether a row is pinned by message (`Pins.holds`).
        record: the record of a block; None if the entry is none (`SequenceBlocks.record`).
    """

    def __init__(
        self,
        table: RowTable,
        details: Details,
        tenants: Tenants,
        agents: AgentNumbers,
        pinned: Callable[[int], bool],
        record: Callable[[int], PrefixRecord | None],
    ) -> None:
        self._table = table
        self._details = details
        self._tenants = tenants
        self._agents = agents
        self.pinned = pinned
        self._record = record
        self._states: Array = np.frombuffer(table.states, np.uint8)
        self._names = table.column("namespaces")
        self.unix_at_zero_s = 0.0
        """The Unix time at time 0, for times shown to people. The caller of a query sets it anew, since the wall clock
        may have been set meanwhile."""

    def find(self, key: bytes, now: float) -> dict[str, Any] | None:
        """The description of a published entry; None if there is none."""
        row = self._table.by_key.get(key)
        return None if row is None else self.describe(row, now)

    def page(
        self, after: bytes | None, count: int, namespace: bytes | None, now: float
    ) -> tuple[list[dict[str, Any]], bytes | None]:
        """Up to `count` published entries, or ENTRIES_MAX, behind the cursor `after`; fewer if many rows have none of
        them.

        Returns:
            The entries, and the cursor of the next page; None at the end.
        """
        first = 1 if after is None else min(int.from_bytes(after, "big"), self._table.row_mask) + 1
        rows = slice(first, first + LOOKS_MAX)
        fits = self._states[rows] == LIVE
        if namespace is not None:
            fits &= self._names[rows] == self._tenants.number_of.get(namespace, -1)
        most = min(count, ENTRIES_MAX)
        found = (np.flatnonzero(fits)[:most] + first).tolist()
        last = found[-1] if len(found) == most else first + LOOKS_MAX - 1
        behind = last.to_bytes(KEY_BYTES, "big") if last < self._table.row_mask else None
        return [self.describe(row, now) for row in found], behind

    def describe(self, row: int, now: float) -> dict[str, Any]:
        """One entry. `key` and `namespace` are hexadecimal, times are Unix seconds. `agent` is empty if no client has
        named it. `prefix`: for a block of a cached sequence its first token, its number of tokens, its parent's key and
        its number of children; otherwise None. `parent`: the key of the entry's parent, or None; `children`: the number
        of entries whose parent it is."""
        table, details, zero_s = self._table, self._details, self.unix_at_zero_s
        key = self.key(row)
        created, used, uses = self.times(row, now)
        expires = details.expires(row)
        parent = self.key(table.parents[row]).hex() if table.parents[row] else None
        return {
            "key": key.hex(),
            "namespace": key[:NAMESPACE_TAG_BYTES].hex(),
            "payload_bytes": table.payloads[row],
            "span_bytes": table.sizes[row],
            "tree_bytes": details.tree_bytes(row),
            "tokens": table.tokens[row],
            "uses": uses,
            "created_unix_s": zero_s + created,
            "used_unix_s": zero_s + used,
            "expires_unix_s": zero_s + expires if expires else None,
            "pinned_by_message": self.pinned(row),
            "owner_uid": self._tenants.uids[table.owners[row]],
            "cost_ms": details.cost(row),
            "agent": self._agents.name(table.agents[row]),
            "prefix": self._prefix(row),
            "parent": parent,
            "children": table.children[row],
            "span_id": table.span_ids[row],
        }

    def key(self, row: int) -> bytes:
        """The key of an entry."""
        key: bytes = self._details.keys(np.array([row])).tobytes()
        return key

    def times(self, row: int, now: float) -> tuple[float, float, int]:
        """When an entry was put, when it was last used or put, and how often it was used."""
        at = np.array([row])
        created = float(self._details.created(at, now)[0])
        uses, used = self._details.uses(at)
        return created, min(max(float(used[0]), created), now), int(uses[0])

    def _prefix(self, row: int) -> dict[str, Any] | None:
        record = self._record(row)
        if record is None:
            return None
        return {
            "start": record.start,
            "tokens": record.count,
            "snapshot": record.snapshot,
            "parent": None if record.parent is None else record.parent.hex(),
            "children": self._table.children[row],
        }

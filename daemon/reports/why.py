"""Explains why an entry stays in the ring or left it: all that is known of one key.

Owns the answer's form. Does not own entries, records or the policy's memory. Invariants: nothing is changed. COMPARED
entries are compared with the asked one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec.structs import asdict

from ..replacement import Explained, Replacement
from ..store.spans import Spans
from ..store.table import LIVE, RowTable
from .entries import DescribedEntries
from .removal_history import RemovalHistory, RemovalRecord

COMPARED: Final = 128
"""Entries that one entry is compared with. The share of colder ones is then mostly right to 4 points."""
_DIGEST: Final = slice(16, 24)
"""The part of a key that is its digest (`RowTable.digests`)."""

Array = np.ndarray[Any, Any]


class Explanations:
    """Explains the keys of one store."""

    def __init__(
        self,
        table: RowTable,
        spans: Spans,
        policy: Replacement,
        entries: DescribedEntries,
        history: RemovalHistory,
    ) -> None:
        self._table = table
        self._spans = spans
        self._policy = policy
        self._entries = entries
        self._history = history
        self._states: Array = np.frombuffer(table.states, np.uint8)

    def why(self, key: bytes, now: float, leased: bool | None = None) -> dict[str, Any]:
        """All that is known of a key. `leased`: whether a lane pins its entry now; None: unknown, so the last scan
        decides.

        `state`: "stored"; "leaving" while a scan checks whether a reader pins it; "gone"; or "unknown". `reason`: why a
        leaving entry is evicted, empty in the other states. `entry` and `standing` describe a stored entry. `gone`
        describes the key's latest removal, if it is among the last `records`. `remembered`: what the policy remembers
        of the key without storing it, which may be that its put was refused. The last four are None if there is
        nothing to report.
        """
        row, leaving = self._table.by_key.get(key), self._spans.hidden.get(key)
        last = self._history.find(key)
        memory = None
        if not row and not leaving:
            memory = self._policy.recall(int.from_bytes(key[_DIGEST], "little"))
        state = "stored" if row else "leaving" if leaving else "gone" if last or memory else "unknown"
        return {
            "key": key.hex(),
            "state": state,
            "reason": self._spans.reason_of(leaving) if leaving and not row else "",
            "policy": self._policy.name,
            "entry": self._entries.describe(row, now) if row else None,
            "standing": self._standing(row, now, leased) if row else None,
            "gone": None if last is None else self._gone(last, now),
            "remembered": None if memory is None else _remembered(memory),
            "records": len(self._history),
        }

    def _standing(self, row: int, now: float, leased: bool | None) -> dict[str, Any]:
        """The rank of a stored entry in the order of eviction.

        `compared`: the number of other entries not in use that it was compared with; `colder`: how many of these would
        be evicted before it. `held`: "pin" for a pin by message, "lease" for a pin of a lane, or None. The pins of
        lanes on other entries are those of the last scan.
        """
        created, used, _ = self._entries.times(row, now)
        explained = self._policy.explain(row)
        others = [other for other in self._sample(row) if other != row and not self._held(other)]
        mine, *theirs = self._policy.standings([row, *others])
        if leased is None:
            leased = self._table.span_ids[row] in self._spans.last_pinned
        held = "pin" if self._entries.pinned(row) else "lease" if leased else None
        return {
            **asdict(explained),
            "like": list(explained.like),
            "age_s": max(0.0, now - created),
            "idle_s": max(0.0, now - used),
            "compared": len(others),
            "colder": sum(other < mine for other in theirs),
            "children": self._table.children[row],
            "held": held,
        }

    def _sample(self, row: int) -> list[int]:
        """Published entries from everywhere in the table, since rows beside one another were often put together."""
        live = np.flatnonzero(self._states == LIVE)
        if len(live) > COMPARED:
            first = self._table.digests[row] % len(live)
            live = live[(first + np.arange(COMPARED) * len(live) // COMPARED) % len(live)]
        found: list[int] = live.tolist()
        return found

    def _held(self, row: int) -> bool:
        return self._spans.is_held(row) or self._table.span_ids[row] in self._spans.last_pinned

    def _gone(self, gone: RemovalRecord, now: float) -> dict[str, Any]:
        values = asdict(gone)
        del values["key"], values["at"]
        gone_unix_s = self._entries.unix_at_zero_s + gone.at
        return {**values, "gone_unix_s": gone_unix_s, "gone_s": max(0.0, now - gone.at)}


def _remembered(values: Explained) -> dict[str, Any]:
    """Without a worth: the cost and the size may differ when the key is put again."""
    return {"uses": values.uses, "like": list(values.like), "comes_back": values.comes_back}

"""The time to live: which entries have expired. The column `ends` says when to look at an entry.

    put, touch → ends[row], header        due(now): one pass of numpy over the column → the rows that end now
                                             └ pinned by message, or with children: looked at again later

The pass takes some 5 ms for a million rows, so it is made at most every 1/LOOKED_AT_PER_S seconds a row: an entry
expires up to 0.25 s late in a store of a million rows, and at once in a small one. The header has the time for clients
and for the next daemon. A get does not renew it.

Owns the column `ends`. The commit fills it in, and the end of an entry clears it (`store.spans`).

Invariants: exactly the stored entries that expire have a number in the column. It is their time of expiry, or a later
one at which they are looked at again.
"""

from __future__ import annotations

from math import inf
from typing import Any, Final

import numpy as np

from ..store.entries import Entries, OverEntries
from ..store.table import LIVE, VICTIM
from .pins import Pins

PUT_OFF_S: Final = 5.0
"""Delay until an expired parent is looked at again. The end of its last child causes that at once."""
LOOKED_AT_PER_S: Final = 4e6
"""Rows."""

Array = np.ndarray[Any, Any]


class Expiry(OverEntries):
    """The times of expiry of one store's entries."""

    def __init__(self, entries: Entries, pins: Pins) -> None:
        super().__init__(entries)
        self._pins = pins
        self._ends = self._table.column("ends")
        self._top = 0
        """Above all rows that ever had a time."""
        self._next = inf
        """When an entry expires; earlier if the first to expire has ended."""
        self._looked_at = -inf
        self._found: Array = np.empty(0, np.int64)
        """Those that had expired by then, and were not given by `due` yet."""

    def next_timer(self) -> float | None:
        when = self._looked_at if len(self._found) else self._next_look
        return None if when == inf else when

    @property
    def _next_look(self) -> float:
        return max(self._next, self._looked_at + self._top / LOOKED_AT_PER_S)

    def stored(self, rows: Array) -> None:
        """New entries, whose times of expiry the commit has put into the column, or those that a recovery has found."""
        ends = self._ends[rows]
        if ends.any():
            self._top = max(self._top, int(rows.max()) + 1)
            self._next = min(self._next, float(np.min(ends, where=ends > 0, initial=inf)))

    def touched(self, row: int, now: float) -> None:
        """The time to live of an entry begins anew."""
        ttl = self._details.ttl(row)
        if ttl:
            self._details.set_expires(row, now + ttl)
            self._look_at(row, now + ttl)

    def look_again(self, row: int) -> None:
        """An entry has lost a pin or a child that may have kept it."""
        if self._table.ends[row]:
            self._look_at(row, self._details.expires(row))

    def due(self, now: float, most: int) -> list[int]:
        """Up to `most` entries that have expired, and may end: neither pinned by message, nor with published
        children. More may be due (`next_timer`)."""
        if not len(self._found):
            if now < self._next_look:
                return []
            ends = self._ends[: self._top]
            self._found = np.flatnonzero((ends > 0) & (ends <= now))
            self._looked_at = now
            self._next = float(np.min(ends, where=ends > now, initial=inf))
        rows, self._found = self._found[:most], self._found[most:]
        ends = self._ends[rows]
        # It may have ended, or been renewed, since it was found.
        rows = rows[(ends > 0) & (ends <= now)]
        found = []
        for row in rows.tolist():
            if self._pins.holds(row):
                self._look_at(row, self._pins.last_until(row))
            elif self._table.children[row]:
                self._look_at(row, now + PUT_OFF_S)
            else:
                found.append(row)
        return found

    def _look_at(self, row: int, when: float) -> None:
        self._table.ends[row] = when
        self._top = max(self._top, row + 1)
        self._next = min(self._next, when)

    def check_invariants(self) -> None:
        table = self._table
        stored = {row for row in table.in_order() if table.states[row] in (LIVE, VICTIM)}
        timed = set(np.flatnonzero(self._ends).tolist())
        assert timed == {row for row in stored if self._details.expires(row)}
        for row in timed:
            expires = self._details.expires(row)
            assert table.ends[row] >= expires - abs(expires) * 2.0**-35, "an entry would expire too early"
            assert row < self._top
        waits = set(self._found.tolist())
        assert all(row in waits or table.ends[row] >= self._next for row in timed)

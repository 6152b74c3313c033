"""The walk over all entries for those that nobody has used for some time: once for each Pressed that asks for it.

    slices of rows → LIVE, last use older than idle_s → candidates ─ leaves first → the next ones to hide

Owns: the walk in progress. Does not own: which entries are in use, nor what becomes of those that are idle
(`host_memory`).

Invariants: at most one walk is in progress; a walk that is asked for meanwhile follows it. A block is a candidate only
once it has no published children.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..store.details import Details
from ..store.table import EDGE, LIVE, RowTable

SLICE_ROWS: Final = 1 << 12
LOOKS_MAX: Final = 1 << 13
"""Entries of one step: less than 2 ms, if they were used; 5 ms for those that never were."""

Array = np.ndarray[Any, Any]


class IdleSweep:
    """The walk over the rows of one store."""

    def __init__(self, table: RowTable, details: Details) -> None:
        self._table = table
        self._details = details
        self._states = np.frombuffer(table.states, np.uint8)
        self._next = 0
        self._again = False
        self._found: list[int] = []
        """Idle entries, the deepest first. Some of them may have ended meanwhile, and their rows may have others."""
        self.walking = False

    def ask(self, *, it_is: bool) -> None:
        """A walk is wanted from now on, or no longer."""
        if not it_is:
            self.walking, self._again = False, False
            self._found.clear()
        elif self.walking:
            self._again = True
        else:
            self.walking, self._next = True, 0

    def take(self, most: int, idle_s: float, now: float) -> list[int]:
        """Idle entries without published children, which come no more unless they are given back (`wait`). Looks at a
        few further slices if none is left; so an empty list is not the end of the walk (`walking`)."""
        table, looks = self._table, 0
        while not self._found and self._next <= table.row_mask and looks < LOOKS_MAX:
            rows = np.flatnonzero(self._states[self._next : self._next + SLICE_ROWS] == LIVE) + self._next
            self._next += SLICE_ROWS
            looks += len(rows)
            rows = rows[self._idle(rows, idle_s, now)]
            self._found = rows[np.argsort(table.column("depths")[rows], kind="stable")].tolist()
        taken: list[int] = []
        while self._found and len(taken) < most:
            row = self._found.pop()
            if table.states[row] == LIVE and not table.children[row]:
                taken.append(row)
        some = np.array(taken, np.int64)
        taken = some[self._idle(some, idle_s, now)].tolist()
        if not self._found and self._next > table.row_mask and not taken:
            self.walking, self._again, self._next = self._again, False, 0
        return taken

    def went(self, rows: list[int]) -> None:
        """These entries are hidden: their parents may follow."""
        parents = {self._table.parents[row] for row in rows} - {EDGE}
        self._found += [row for row in parents if not self._table.children[row]]

    def wait(self, rows: list[int]) -> None:
        """These entries are to be offered again."""
        self._found += rows

    def _idle(self, rows: Array, idle_s: float, now: float) -> Array:
        """Which entries were neither used nor put for `idle_s`."""
        _, used = self._details.uses(rows)
        never = np.flatnonzero(used <= now - idle_s)
        # The put may be later than the last use that the slot tells of.
        used[never] = np.maximum(used[never], self._details.created(rows[never], now))
        idle: Array = now - used >= idle_s
        return idle

"""Evicts idle entries under pressure.

Owns the last Pressed, and the walk over all entries that it may request: once for each Pressed, SLICE entries at a
time, so that no event takes long. Entries in use are skipped, and so are blocks with a descendant that is not idle.
Does not own the pages of the ring (`residency`), nor which entries stay until they are written to the remote store
(`demotion`).

Invariant: at most one walk is in progress.
"""

from __future__ import annotations

from .entries import SpanEntry
from .host_memory import Pressed
from .remote.demotion import Demotion
from .room import Room
from .span_table import SpanTable
from .sweeps import SLICE


class IdleSweep:
    """The last Pressed and the walk in progress."""

    def __init__(self, memory: SpanTable, room: Room, demotion: Demotion) -> None:
        self._memory = memory
        self._demotion = demotion
        self._room = room
        self._after: bytes | None = None
        self._again = False
        self.pressed = Pressed()
        self.walking = False

    def press(self, pressed: Pressed) -> None:
        """Takes a new Pressed. A walk in progress is stopped if `idle_s` is None; otherwise it ends before the next one
        begins."""
        self.pressed = pressed
        if pressed.idle_s is None:
            self.walking = self._again = False
        elif self.walking:
            self._again = True
        else:
            self.walking, self._after = True, None

    @property
    def due(self) -> bool:
        """Whether `advance` has entries to examine now."""
        memory = self._memory
        return self.walking and not (memory.scan_in_flight or memory.scan_due or self._demotion.waits)

    def advance(self, now: float) -> None:
        """Hides the idle entries of the next slice that are not in use."""
        idle_s = self.pressed.idle_s
        if not self.due or idle_s is None:
            return
        page, behind = self._memory.entries.page(self._after, SLICE, None)

        def is_idle(entry: SpanEntry) -> bool:
            return now - entry.used_at >= idle_s and self._room.unevictable.may_go(entry)

        idle = self._room.leaves_first(filter(is_idle, page), is_idle, SLICE)
        staying = self._demotion.staying(idle, now)
        self._memory.hide((entry, "emergency") for entry in idle if entry not in staying)
        if staying or len(idle) == SLICE:
            # Entries stay until they are written, or the idle entries and their descendants exceed one slice: examine
            # the same page again.
            return
        if behind is not None:
            self._after = behind
        else:
            self.walking, self._again, self._after = self._again, False, None

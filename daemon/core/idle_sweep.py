"""What pressure demands of the store beyond its pages: that what is idle goes.

Owns the pressure as it was last told, and the walk over the entries that it may ask for: once for each Pressed, SLICE
entries at a time, so that no event takes long. Entries that somebody holds are passed over, as are blocks of sequences
that something follows which is not idle.
"""

from __future__ import annotations

from .entries import SpanEntry
from .host_memory import Pressed
from .room import Room
from .span_table import SpanTable
from .sweeps import SLICE


class IdleSweep:
    """The pressure, and the walk under way."""

    def __init__(self, memory: SpanTable, room: Room) -> None:
        self._memory = memory
        self._room = room
        self._after: bytes | None = None
        self._again = False
        self.pressed = Pressed()
        self.walking = False

    def press(self, pressed: Pressed) -> None:
        """From now on; a walk under way comes to its end before another one begins."""
        self.pressed = pressed
        if pressed.idle_s is None:
            self.walking = self._again = False
        elif self.walking:
            self._again = True
        else:
            self.walking, self._after = True, None

    @property
    def due(self) -> bool:
        """Whether `advance` has something to do now."""
        return self.walking and not self._memory.scan_in_flight and not self._memory.scan_due

    def advance(self, now: float) -> None:
        """Hides the idle ones of the next slice, if nobody holds them."""
        idle_s = self.pressed.idle_s
        if not self.due or idle_s is None:
            return
        page, behind = self._memory.entries.page(self._after, SLICE, None)

        def is_idle(entry: SpanEntry) -> bool:
            return now - entry.used_at >= idle_s and self._room.unevictable.may_go(entry)

        idle = self._room.leaves_first(filter(is_idle, page), is_idle, SLICE)
        self._memory.hide((entry, "emergency") for entry in idle)
        if len(idle) == SLICE:
            # What follows the idle ones of this page may be more than they are: the page comes again.
            return
        if behind is not None:
            self._after = behind
        else:
            self.walking, self._again, self._after = self._again, False, None

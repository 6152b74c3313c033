"""What the governor is told of the ring's memory: what the ring holds, what it would hold, and whether that is settled.

Owns the last report, and sends another one only where something changed or the governor asked. During an exchange of
pages nothing is told: when the exchange ends, the ring holds as much as before it.
"""

from __future__ import annotations

from .host_memory import HostHolds
from .idle_sweep import IdleSweep
from .outbox import StoreOutbox
from .residency import Residency
from .span_table import SpanTable


class ResidencyReport:
    """Reports at the end of an event."""

    def __init__(self, memory: SpanTable, residency: Residency, idle_sweep: IdleSweep, outbox: StoreOutbox) -> None:
        self._memory = memory
        self._residency = residency
        self._idle_sweep = idle_sweep
        self._outbox = outbox
        self._last: HostHolds | None = None
        self._last_of: tuple[int, int, int, bool] | None = None

    def ask(self) -> None:
        """The next report is sent, also if it is the same as the last."""
        self._last = self._last_of = None

    def report(self, ring_bytes: int, *, stuck: bool) -> None:
        """Sends what has changed.

        Args:
            ring_bytes: the ring's size once it has grown.
            stuck: whether no entry that may go would give back the pages that are too many.
        """
        residency, walking = self._residency, self._idle_sweep.walking
        if residency.exchanging:
            return
        if residency.unrestricted:
            # The way of nearly every event: all of the ring is in memory, as it was after the last event.
            of = (self._memory.ring.capacity_bytes, self._memory.budget.max_bytes, ring_bytes, walking)
            if of == self._last_of:
                return
            self._last_of = of
        else:
            self._last_of = None
        settled = not (walking or residency.regrowing) and (not residency.over_target or stuck)
        holds = HostHolds(residency.resident_bytes, residency.wanted_bytes(ring_bytes), settled)
        if holds != self._last:
            self._last = holds
            self._outbox.add(holds)

"""Reports the ring's resident bytes to the governor: present bytes, wanted bytes, and whether they have settled.

Owns the last report. Sends a report only if a value has changed or the governor asked. Does not own the values. No
report is sent during an exchange of pages: when the exchange ends, as many bytes are resident as before.

Invariant: two reports in a row differ, unless the governor asked.
"""

from __future__ import annotations

from .host_memory import HostHolds
from .idle_sweep import IdleSweep
from .outbox import StoreOutbox
from .residency import Residency
from .span_table import SpanTable


class ResidencyReport:
    """Reports at the end of each event."""

    def __init__(self, memory: SpanTable, residency: Residency, idle_sweep: IdleSweep, outbox: StoreOutbox) -> None:
        self._memory = memory
        self._residency = residency
        self._idle_sweep = idle_sweep
        self._outbox = outbox
        self._last: HostHolds | None = None
        self._last_of: tuple[int, int, int, bool] | None = None

    def ask(self) -> None:
        """Makes the next report be sent even if nothing has changed."""
        self._last = self._last_of = None

    def report(self, ring_bytes: int, *, stuck: bool) -> None:
        """Sends a report if a value has changed.

        Args:
            ring_bytes: the ring's final size.
            stuck: no evictable entry can give the excess pages.
        """
        residency, walking = self._residency, self._idle_sweep.walking
        if residency.exchanging:
            return
        if residency.unrestricted:
            # Nearly every event: the whole ring is resident, as after the last event.
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

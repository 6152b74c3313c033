"""The host's memory, as far as the ring takes it: what the governor asks for, and what is done about it.

    Pressed ── resident_bytes_max ── pages over it ─ of holes: at once (`residency`)
                                                   └ of entries: `_choose` → hidden, a scan, holes
    HostHolds ← whenever what is resident has changed

An entry is chosen in the policy's order. One whose end would free few pages or none is chosen together with its
neighbours, the colder one first, until CLUSTER_PAGES are free in one piece. That keeps the number of withdrawn rows
small.

The caller begins scans (`spans.scan_due`, `scan_due`). Freed rows become holes while there are excess bytes.

Invariants: no entry goes for pages while holes, or rows that wait for a scan, may give them; none is hidden while it
is being written to the remote store (`Writes.staying`), or is known to be in use. Two reports in a row differ, unless
the governor asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from ...shm.ring.layout import PAGE_BYTES
from ..forms.effects import HostHolds
from ..forms.events import Pressed
from ..forms.limits import RingBudget
from ..forms.outbox import StoreOutbox
from ..remote.writes import Writes
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, LIVE
from .residency import Residency
from .withdrawn import Withdrawn, pages_in

VICTIMS_MAX: Final = 256
"""Entries of one round: what one scan decides about."""
CLUSTER_PAGES: Final = 16
AT_ONCE: Final = 32
LOOKS_MAX: Final = 256
"""Entries that one search takes from the policy."""
RESCAN_S: Final = 0.05
"""The delay of another scan, which doubles each time nothing was freed, up to RESCAN_S_MAX."""
RESCAN_S_MAX: Final = 2.0


class HostMemory(OverEntries):
    """The pages of one ring. `give_up` makes holes of all free places that are kept ready to be lent. After RESCAN_S,
    and then after twice as long, a scan looks whether pins have gone that keep pages."""

    def __init__(
        self,
        entries: Entries,
        budget: RingBudget,
        writes: Writes,
        outbox: StoreOutbox,
        give_up: Callable[[], object],
    ) -> None:
        super().__init__(entries)
        self._writes = writes
        self._outbox = outbox
        self._give_up = give_up
        self.withdrawn = Withdrawn(self._table, self._holes)
        self.residency = Residency(self.withdrawn, self._holes, budget, outbox)
        self._rescan_s = RESCAN_S
        self._rescan_at: float | None = None
        self._tried: list[int] = []
        """Rows that the policy gave, and whose end would free no page; it gives others meanwhile."""
        self._last: HostHolds | None = None
        self.pressed = Pressed()
        self.stuck = False
        """Whether no evictable entry can give the pages over the target, by the pins that the last scan found."""
        self.searching = False
        """Whether the next Tick, which is due now, continues a search."""
        self.scan_due = False
        """Whether a scan is wanted although no row was unpublished. The caller resets it when a scan begins."""
        self.only_for_puts = False
        """The daemon is about to end: no entry goes for pages."""

    def press(self, pressed: Pressed) -> None:
        self.pressed = pressed
        self.residency.pressure_bytes_max = pressed.resident_bytes_max
        self._last = None
        self._restart()

    def scanned(self, *, something_freed: bool) -> None:
        """A scan was decided about: other pins, and other holes."""
        if something_freed:
            self._rescan_s = RESCAN_S
            self._restart()

    def tick(self, now: float) -> None:
        if self._rescan_at is not None and now >= self._rescan_at:
            self._rescan_at = None
            if self.stuck:
                self.scan_due = True
                self._restart()

    def next_timer(self) -> float | None:
        return min((at for at in (self._rescan_at, self.residency.retry_at) if at is not None), default=None)

    def reconcile(self, now: float) -> None:
        """Gives pages back or takes them back, and hides entries if holes do not suffice. The caller begins a scan
        after that if one is due."""
        if self.residency.excess_bytes:
            self._give_up()
        self.residency.step(now)
        self.searching = False
        if self.residency.excess_bytes == 0:
            self.stuck, self._rescan_at = False, None
            self._give_back()
            self._writes.end()
        elif not (
            self._spans.scanning or self._spans.scan_due or self.stuck or self.only_for_puts or self._writes.waits
        ):
            self._evict_for_pages(now)

    def report(self, ring_bytes: int) -> None:
        """Tells the governor if a value has changed. `ring_bytes`: the ring's final size. During an exchange of pages
        nothing is told: when it ends, as many bytes are resident as before."""
        residency = self.residency
        if residency.exchange_progress() != "none":
            return
        settled = not residency.regrowing and (not residency.over_target or self.stuck)
        holds = HostHolds(residency.resident_bytes, residency.wanted_bytes(ring_bytes), settled)
        if holds != self._last:
            self._last = holds
            self._outbox.add(holds)

    def check_invariants(self) -> None:
        self.residency.check_invariants()
        if self.residency.victims_bytes and not (self._spans.scanning or self._spans.scan_due):
            later = self._writes.waits or self.only_for_puts
            assert self.stuck or self.searching or later, "nothing is done about pages over the target"
        assert not self.stuck or self._rescan_at is not None or self.scan_due

    def _evict_for_pages(self, now: float) -> None:
        want_bytes = self.residency.victims_bytes
        if not want_bytes:
            return
        victims = self._choose(want_bytes)
        reason = self.residency.reason
        # An exchange of pages is for a put, which does not wait for the remote store.
        staying = self._writes.staying(victims, now) if self.residency.over_target else set()
        going = [row for row in victims if row not in staying]
        if staying:
            self._tried += staying
            self._give_back()
        if going:
            # The policy did not give all of them: it must not give them later.
            self._policy.may_go(going, False)
            self._spans.hide(going, reason)
        elif not victims and not self.searching:
            # The governor and the grant that wait for these pages must learn that they do not come.
            self.stuck = True
            self._writes.end()
            self._rescan_at = now + self._rescan_s
            self._rescan_s = min(2 * self._rescan_s, RESCAN_S_MAX)

    def _choose(self, want_bytes: int) -> list[int]:
        """Entries whose end frees `want_bytes` of whole pages and little more. A parent stands behind its children:
        only then it may go."""
        policy, offered, freed_bytes = self._policy, 0, 0
        chosen: dict[int, None] = {}
        while freed_bytes < want_bytes and len(chosen) < VICTIMS_MAX and offered < LOOKS_MAX:
            rows = policy.victims(AT_ONCE)
            if not rows:
                break
            offered += len(rows)
            self._tried += rows
            for row in rows:
                if freed_bytes < want_bytes and row not in chosen and self._may_go(row, chosen):
                    freed_bytes += self._add(row, chosen, want_bytes - freed_bytes)
        # What the policy gave in vain stays with us, so that the next search gets other rows.
        self.searching = not chosen and offered >= LOOKS_MAX
        if not self.searching:
            self._tried = [row for row in self._tried if row not in chosen]
            self._give_back()
        return list(chosen)

    def _add(self, row: int, chosen: dict[int, None], want_bytes: int) -> int:
        """Chooses a row, with neighbours if it is small. Returns the bytes of whole pages that come free; 0 if there is
        none: then nothing is chosen."""
        goal_bytes = min(want_bytes, CLUSTER_PAGES * PAGE_BYTES)
        table, group = self._table, {row}
        chosen[row] = None
        first, last = self._widened(row, row, chosen)
        while len(chosen) < VICTIMS_MAX and self._gain(first, last, group) < goal_bytes:
            beside = [each for each in (table.nexts[last], table.prevs[first]) if self._may_go(each, chosen)]
            if not beside:
                break
            row = min(beside, key=self._warmth)
            group.add(row)
            chosen[row] = None
            first, last = self._widened(first, last, chosen)
        gained = self._gain(first, last, group)
        if not gained:
            for row in group:
                del chosen[row]
        return gained

    def _widened(self, first: int, last: int, chosen: Collection[int]) -> tuple[int, int]:
        """The rows from `first` to `last` with adjacent rows that were chosen before."""
        table = self._table
        while table.prevs[first] in chosen:
            first = table.prevs[first]
        while table.nexts[last] in chosen:
            last = table.nexts[last]
        return first, last

    def _gain(self, first: int, last: int, group: Collection[int]) -> int:
        """Bytes of whole pages from the row before `first` to the one behind `last` that come free with `group`, and
        are not free without."""
        table, after = self._table, self._table.nexts[last]
        low, high = table.end(table.prevs[first]), table.offsets[after] if after != EDGE else self._holes.capacity_bytes
        gained, row = pages_in(low, high), first
        while True:
            if row in group:
                gained -= pages_in(low, table.offsets[row])
                low = table.end(row)
            if row == last:
                return gained - pages_in(low, high)
            row = table.nexts[row]

    def _may_go(self, row: int, ending: Collection[int]) -> bool:
        """Whether an entry is evictable together with the rows `ending`: it has no other children, and is not known to
        be in use."""
        table = self._table
        if (
            row == EDGE
            or table.states[row] != LIVE
            or row in self._spans.held
            or table.span_ids[row] in self._spans.last_pinned
        ):
            return False
        if not table.children[row]:
            return True
        return all(table.states[each] != LIVE or each in ending for each in self._families.children_of(row))

    def _warmth(self, row: int) -> tuple[bool, float]:
        return self._policy.in_window(row), float(self._policy.worth([row])[0])

    def _give_back(self) -> None:
        """The policy may give the rows again that it gave in vain."""
        if not self._tried:
            return
        live = [row for row in self._tried if self._table.states[row] == LIVE]
        self._tried = []
        for held in (False, True):
            self._policy.may_go([row for row in live if (row in self._spans.held) == held], not held)

    def _restart(self) -> None:
        self.stuck = False
        self._give_back()

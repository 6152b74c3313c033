"""Makes room by scans and drains: when each is requested, and what follows from its outcome.

Owns the timing of scans, the attempt to make room for the put at the head of the queue, and the evictions that bring
the store back under a lowered budget or a lowered limit of resident bytes. The order is always: hide, Scan, Scanned,
free; `memory` ensures that a span is freed in no other way. Before the first victims for a put are chosen, the reads
recorded until then are processed: Drain, Drained. Does not own the choice of victims (`room`) nor pages (`residency`).

Invariants:
- At most one Scan is in flight.
- An attempt ends: each of its rounds frees a span, or counts against FRUITLESS_MAX, or exchanges pages and counts
  against EXCHANGES_MAX.
- Pages over the target of resident bytes go before room is made for a put.
- Retired spans that stay pinned are scanned again after `rescan_s`. The delay doubles each time that a scan frees
  nothing, up to RESCAN_S_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from .choice import Cursor
from .claims import ClaimTable
from .effects import Drain, Move, Scan, WriteExpiry
from .entries import SpanEntry
from .expiry import Expiry
from .need import Need
from .outbox import StoreOutbox
from .remote.demotion import Demotion
from .residency import Residency
from .room import Room
from .span_table import SpanTable

FRUITLESS_MAX: Final = 2
"""Scans in a row without a freed span after which an attempt ends."""
EXCHANGES_MAX: Final = 3
"""Exchanges of pages after which an attempt ends."""
RESCAN_S_MAX: Final = 2.0
"""The longest delay until retired spans are scanned again, in seconds."""


@dataclass(slots=True)
class Attempt:
    """An attempt to make room for one put. `scans`: scans since it began; `fruitless`: scans in a row that freed
    nothing; `exchanges`: exchanges of pages. `admitted`: the policy prefers the put to its victims. `drains`: it has
    requested a Drain. `drained`: the reads recorded before the attempt are processed."""

    need: Need
    cursor: Cursor = field(default_factory=Cursor)
    scans: int = 0
    fruitless: int = 0
    exchanges: int = 0
    admitted: bool = False
    drains: bool = False
    drained: bool = False


class Reclaim:
    """Turns needs into scans, and scans into room."""

    def __init__(
        self,
        memory: SpanTable,
        room: Room,
        residency: Residency,
        demotion: Demotion,
        expiry: Expiry,
        claims: ClaimTable,
        outbox: StoreOutbox,
        rescan_s: float,
    ) -> None:
        self._memory = memory
        self._room = room
        self._residency = residency
        self._demotion = demotion
        self._expiry = expiry
        self._claims = claims
        self._outbox = outbox
        self._rescan_s_min = rescan_s
        self._rescan_s = rescan_s
        self._rescan_at: float | None = None
        self._attempt: Attempt | None = None
        self._budget_cursor = Cursor()
        self._page_cursor = Cursor()
        self._trim_due = self._rescan_due = False
        self.stuck = False
        """Whether no evictable entry can give the excess pages, judged by the pins that the last scan found."""
        self.searching = False
        """Whether the next Tick continues a search or a postponed outcome."""
        self._draining = self._drain_again = False
        self._deferred_pins: AbstractSet[int] | None = None
        """The pins found by the scan in flight, while their processing is postponed."""
        self._only_for_puts = False

    def next_timer(self) -> float | None:
        """When `tick` is due."""
        return None if self._memory.scan_in_flight else self._rescan_at

    def change_limits(self, rescan_s: float) -> None:
        """Takes effect after the next scan that frees a span."""
        self._rescan_s_min = rescan_s

    def drop_attempt(self) -> None:
        """Ends the attempt: another put may be at the head of the queue."""
        self._attempt = None
        self._residency.drop_exchange()

    def placed(self) -> None:
        """Ends the attempt of the put that has its room. If the policy compares puts with reads, the reads recorded
        until now are processed."""
        drained = self._draining or (self._attempt is not None and self._attempt.drained)
        if self._memory.policy.compares_puts_with_reads and not drained:
            self._drain()
        self.drop_attempt()

    def restart_search(self) -> None:
        """Restarts the search for pages, since the limit of resident bytes or the set of evictable entries may have
        changed."""
        self.stuck = False
        self._page_cursor.skip = 0

    def make_room(self, need: Need, now: float, admits: Callable[[int], bool] | None = None) -> str:
        """Continues to make room for the put at the head of the queue, which does not fit.

        Args:
            admits: takes a victim's number; true if the policy prefers the put to that victim. None: the put is always
                preferred.

        Returns:
            "draining": a Drain is pending. "scanning": a Scan is pending. "moving": effects on pages, or copies, are
                pending. "searching": call again at the next Tick. "none": no evictable entry would help. "declined":
                the policy prefers the victims to the put.
        """
        memory, residency = self._memory, self._residency
        if memory.scan_in_flight or memory.scan_due:
            self.scan_if_due()
            return "scanning"
        if memory.moving:
            return "moving"
        if self._attempt is None:
            self._attempt = Attempt(need)
        attempt = self._attempt
        progress = residency.exchange_progress()
        if progress == "moving" and not self.stuck:
            return "moving"
        if progress != "none":
            attempt.exchanges += 1
            residency.drop_exchange()
            if progress == "moving" and not attempt.scans:
                # As far as known, the pages that the put needs are pinned. A scan shows whether they still are.
                self._scan()
                return "scanning"
        if residency.excess_bytes and not self.stuck:
            return "moving"
        if residency.regrowing and not memory.spans.over_budget(need.entries, need.span_bytes, need.tokens):
            # The ring is about to regrow, which makes room without an eviction.
            return "moving"
        if attempt.fruitless >= FRUITLESS_MAX or attempt.exchanges >= EXCHANGES_MAX:
            return "none"
        if not attempt.drains:
            attempt.drains = True
            self._drain()
        if not attempt.drained:
            return "draining"
        choice = self._room.choose(need, attempt.cursor, now)
        if choice.victims or choice.moves:
            if (
                choice.victims
                and not attempt.admitted
                and admits is not None
                and not admits(choice.warmest_needed(need.span_bytes).number)
            ):
                return "declined"
            attempt.admitted |= bool(choice.victims)
            memory.hide(choice.victims.items())
            if self._move(choice.moves) and not choice.victims:
                return "moving"
        elif choice.searching:
            return "searching"
        elif choice.exchange is not None and residency.excess_bytes:
            return "none"
        elif choice.exchange is not None:
            residency.exchange(*choice.exchange, need.span_bytes)
            self.restart_search()
            return "moving"
        elif attempt.scans and not memory.next_scan_may_free:
            return "none"
        # Without victims, the scan shows the present pins, and which retired spans have become free.
        self._scan()
        return "scanning"

    def moved(self, number: int, *, copied: bool) -> None:
        """Ends a move whose copy is complete, or failed. The entry's old span is free after the next scan."""
        entry = self._memory.end_move(number, copied=copied)
        if entry is None:
            return
        self._outbox.counters.moves += 1
        self._outbox.counters.moved_bytes += entry.span_bytes
        if entry.expires_at is not None:
            # A touch may have changed the expiry after the header was copied.
            self._outbox.add(WriteExpiry(entry.offset, entry.expires_at))

    def scan_if_due(self) -> None:
        """Requests a scan if an unpublished span waits for its first scan."""
        if self._memory.scan_due and not self._memory.scan_in_flight:
            self._scan()

    def scan_soon(self, now: float) -> None:
        """Schedules a scan after a recovery, which may leave spans to scan and more entries than the budgets allow."""
        self._rescan_at = now

    def trim(self) -> None:
        """Makes `reconcile` check a lowered budget."""
        self._trim_due = True

    def evict_only_for_puts(self) -> None:
        """From now on, entries are evicted for puts only."""
        self._only_for_puts = True

    def reconcile(self, now: float, *, idle_first: bool) -> None:
        """Chooses victims while more bytes are resident than the target allows, or the store is over a budget.

        Args:
            idle_first: idle entries are being evicted for the same purpose; other entries stay until that has ended.
        """
        memory = self._memory
        self.searching = self._deferred_pins is not None
        if memory.scan_in_flight or memory.scan_due or self._only_for_puts:
            return
        if self._residency.excess_bytes == 0:
            self.stuck = False
            if not idle_first:
                self._demotion.end()
        elif self._evict_for_pages(now, idle_first=idle_first):
            return
        if self._trim_due:
            self._trim_due = False
            self._trim(now)
        if self._rescan_due and not memory.scan_in_flight:
            # Without victims, the scan shows which pins have ended since the last scan.
            self._rescan_due = False
            if self._waits_for_pins:
                self._scan()

    def drained(self) -> bool:
        """The reads recorded before the last Drain are processed. Returns whether the attempt to make room goes on; if
        it began after that Drain, it waits for another."""
        again, self._draining, self._drain_again = self._drain_again, False, False
        if again:
            self._drain()
        elif self._attempt is not None and self._attempt.drains:
            self._attempt.drained = True
            return True
        return False

    def scanned(self, pinned: AbstractSet[int], now: float) -> None:
        """Processes a scan's pins, or postpones that (`searching`) until it is known whether the put can fit."""
        memory, attempt = self._memory, self._attempt
        memory.last_pinned = pinned
        victims = memory.victims_in_scan()
        if (
            attempt is not None
            and any(entry.span_id in pinned for entry in victims)
            and not self._room.unevictable.advance_survey()
        ):
            self._deferred_pins, self.searching = pinned, True
            return
        outcome = memory.scanned(pinned, now, self._spares(pinned))
        if attempt is not None:
            attempt.scans += 1
            attempt.cursor.scanned = True
            if outcome.freed:
                attempt.fruitless = 0
            elif victims:
                attempt.fruitless += 1
        self._outbox.counters.republished += len(outcome.republished)
        for entry in outcome.victims:
            self._expiry.victim_gone(entry)
        for entry in outcome.republished:
            self._outbox.send_verdicts(self._claims.committed(entry.key))
        if outcome.freed:
            self.restart_search()
        self._trim_due = True
        self._time_rescan(now, something_freed=bool(outcome.freed))

    def tick(self, now: float) -> None:
        """Processes a postponed outcome, schedules a scan of retired spans, and checks the budgets again."""
        if self._deferred_pins is not None:
            pinned, self._deferred_pins = self._deferred_pins, None
            self.scanned(pinned, now)
        if self._memory.scan_in_flight or self._rescan_at is None or now < self._rescan_at:
            return
        self._rescan_at = None
        self._rescan_due = self._trim_due = True
        self.restart_search()

    def check_invariants(self, *, idle_first: bool) -> None:
        """Asserts that every span that waits for a scan gets one."""
        memory = self._memory
        stuck = memory.scan_due or self._waits_for_pins
        deferred = (self._trim_due or self._rescan_due) and self._residency.excess_bytes > 0
        assert memory.scan_in_flight or not stuck or self._rescan_at is not None or deferred
        if self._residency.victims_bytes and not memory.scan_in_flight:
            later = idle_first or self._demotion.waits
            assert self.stuck or self.searching or later, "nothing is done about pages over the target"

    @property
    def _waits_for_pins(self) -> bool:
        return self._memory.has_pinned_retired or self._memory.spans.over_budget() or self.stuck

    def _trim(self, now: float) -> None:
        """Chooses victims while the store is over a lowered budget."""
        memory = self._memory
        if not memory.spans.over_budget():
            return
        choice = self._room.choose(Need(), self._budget_cursor, now)
        if choice.victims:
            self._budget_cursor.skip = 0
            memory.hide(choice.victims.items())
            self._scan()
            return
        # The examined entries at the cold end are pinned. Continue after them next time; start over after the end.
        if not self._room.has_more:
            self._budget_cursor.skip = 0
        self._time_rescan(now, something_freed=False)

    def _evict_for_pages(self, now: float, *, idle_first: bool) -> bool:
        """Chooses entries to evict for their pages if holes do not suffice. False if no evictable entry would help."""
        want_bytes = self._residency.victims_bytes
        if self.stuck:
            return False
        if not want_bytes or idle_first or self._demotion.waits:
            return True
        choice = self._room.choose_for_pages(want_bytes, self._residency.reason, self._page_cursor)
        # An exchange of pages is for a put, which does not wait for the remote store.
        staying = self._demotion.staying(choice.victims, now) if self._residency.over_target else ()
        if go := [(entry, reason) for entry, reason in choice.victims.items() if entry not in staying]:
            self._memory.hide(go)
            self._scan()
        if choice.victims:
            return True
        if self._room.has_more:
            self.searching = True
            return True
        # The governor and the put that wait for these pages must learn that they do not come.
        self.stuck = self.searching = True
        self._demotion.end()
        self._time_rescan(now, something_freed=False)
        return False

    def _move(self, moves: Iterable[tuple[SpanEntry, int]]) -> bool:
        """Begins the moves; whether one is in progress."""
        for entry, offset in moves:
            move = self._memory.begin_move(entry, offset)
            if move is None:
                break
            copy = move.copy
            self._outbox.add(Move(copy.span_id, entry.offset, copy.offset, copy.span_bytes, copy.owner_uid))
        return self._memory.moving

    def _drain(self) -> None:
        """Requests a Drain: at once, or after the one in flight."""
        if not self._draining:
            self._outbox.add(Drain())
        self._draining, self._drain_again = True, self._draining

    def _scan(self) -> None:
        self._memory.begin_scan()
        self._rescan_due = False
        self._outbox.counters.scans += 1
        self._outbox.add(Scan())

    def _spares(self, pinned: AbstractSet[int]) -> Callable[[SpanEntry], bool]:
        """Decides which unpinned victims are republished: those whose room is no longer needed or is of no use, and
        those for which a put of a child has come since they were chosen. Victims of an emergency are republished only
        for such a put."""
        spared, is_awaited = self._is_unneeded(pinned), self._memory.sequences.is_awaited
        return lambda entry: (spared and entry.reason != "emergency") or is_awaited(entry)

    def _is_unneeded(self, pinned: AbstractSet[int]) -> bool:
        """Whether the room that the victims of the scan in flight make is not needed, or of no use because the put
        cannot fit."""
        if self._residency.excess_bytes:
            return False
        victims = self._memory.victims_in_scan()
        if self._attempt is None:
            return not self._memory.spans.over_budget()
        if not any(entry.span_id in pinned for entry in victims):
            return False
        return self._room.unevictable.obstacle(self._attempt.need) is not None

    def _time_rescan(self, now: float, *, something_freed: bool) -> None:
        if not self._waits_for_pins:
            self._rescan_at, self._rescan_s = None, self._rescan_s_min
            return
        longer = min(2 * self._rescan_s, RESCAN_S_MAX)
        self._rescan_s = self._rescan_s_min if something_freed else longer
        self._rescan_at = now + self._rescan_s

"""Scans and drains: when one is asked for, and what follows from its outcome.

Owns the timing of scans, the attempt that is being made for the put at the head of the queue, and bringing the store
back under a budget that was lowered, or under what may be in memory. The order is always: hide, Scan, Scanned, free;
`memory` sees to it that nothing is freed otherwise. Before the first victims for a put are chosen, what was read until
then is heard of: Drain, Drained.

Invariants: one Scan is in flight at most. An attempt ends: each of its rounds frees a span, or is one of
FRUITLESS_MAX that did not, or one of EXCHANGES_MAX of pages. What may be in memory goes before any put. Retired spans
that stay pinned are looked at again after `rescan_s`, twice as long each time that nothing came of it, up to
RESCAN_S_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from .claims import ClaimTable
from .effects import Drain, Move, Scan, WriteExpiry
from .entries import SpanEntry
from .expiry import Expiry
from .need import Need
from .outbox import StoreOutbox
from .residency import Residency
from .room import Choice, Cursor, Room
from .span_table import SpanTable

FRUITLESS_MAX: Final = 2
EXCHANGES_MAX: Final = 3
RESCAN_S_MAX: Final = 2.0


@dataclass(slots=True)
class Attempt:
    """Making room for one put. `scans` made since it began, `fruitless` ones in a row. `admitted`: it is worth it.
    `drained`: what was read before it is known.
    """

    need: Need
    cursor: Cursor = field(default_factory=Cursor)
    scans: int = 0
    fruitless: int = 0
    exchanges: int = 0
    admitted: bool = False
    drained: bool = False


class Reclaim:
    """Turns needs into scans, and scans into room."""

    def __init__(
        self,
        memory: SpanTable,
        room: Room,
        residency: Residency,
        expiry: Expiry,
        claims: ClaimTable,
        outbox: StoreOutbox,
        rescan_s: float,
    ) -> None:
        self._memory = memory
        self._room = room
        self._residency = residency
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
        """Whether nothing that may go gives the pages that are too many in memory, by what the last scan saw."""
        self.searching = False
        """Whether to be asked again at the next Tick, after a while for others."""
        self._draining = False
        self._deferred_pins: AbstractSet[int] | None = None
        """What the scan in flight found, before that is carried out."""
        self._only_for_puts = False

    def next_timer(self) -> float | None:
        """When `tick` has something to do."""
        return None if self._memory.scan_in_flight else self._rescan_at

    def change_limits(self, rescan_s: float) -> None:
        """From the next scan that frees something on."""
        self._rescan_s_min = rescan_s

    def drop_attempt(self) -> None:
        """The put at the head is another one from now on."""
        self._attempt = None
        self._residency.drop_exchange()

    def restart_search(self) -> None:
        """More or fewer bytes may be in memory than before."""
        self.stuck = False
        self._page_cursor.skip = 0

    def make_room(self, need: Need, admits: Callable[[int], bool] | None = None) -> str:
        """Goes on making room for the put at the head of the queue, which does not fit.

        Args:
            admits: whether it is worth the span that would have to go for it; without it, it is.

        Returns:
            "draining", "scanning" or "moving" (an outcome of reads, spans or pages is on its way), "searching" (call
            again, after a while), "none": nothing that may go would help, or "declined": it is not worth what would.
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
                # The pages that it needs are pinned, by what is known: the scan tells whether they still are.
                self._scan()
                return "scanning"
        if residency.excess_bytes and not self.stuck:
            return "moving"
        if residency.regrowing and not memory.spans.over_budget(need.entries, need.span_bytes, need.tokens):
            # The ring is about to have more: that costs nobody an entry.
            return "moving"
        if attempt.fruitless >= FRUITLESS_MAX or attempt.exchanges >= EXCHANGES_MAX:
            return "none"
        if not attempt.drained:
            self._drain()
            return "draining"
        choice = self._room.choose(need, attempt.cursor)
        if choice.victims or choice.moves:
            if (
                choice.victims
                and not attempt.admitted
                and admits is not None
                and not admits(_dearest(choice, need).number)
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
        # Without victims the scan tells what is pinned by now, and whether retired spans have become free.
        self._scan()
        return "scanning"

    def moved(self, number: int, *, copied: bool) -> None:
        """A copy is whole, or failed. The span that the entry had is free after the next scan."""
        entry = self._memory.end_move(number, copied=copied)
        if entry is None:
            return
        self._outbox.counters.moves += 1
        self._outbox.counters.moved_bytes += entry.span_bytes
        if entry.expires_at is not None:
            # Perhaps it was touched after its header had been copied.
            self._outbox.add(WriteExpiry(entry.offset, entry.expires_at))

    def scan_if_due(self) -> None:
        """Asks for a scan if something was unpublished that none has looked at."""
        if self._memory.scan_due and not self._memory.scan_in_flight:
            self._scan()

    def scan_soon(self, now: float) -> None:
        """After a recovery: there may be spans to scan, and more entries than the budgets allow."""
        self._rescan_at = now

    def trim(self) -> None:
        """A budget was lowered: `reconcile` is to see whether it holds."""
        self._trim_due = True

    def evict_only_for_puts(self) -> None:
        """From now on nothing goes but for a put."""
        self._only_for_puts = True

    def reconcile(self, now: float, *, idle_first: bool) -> None:
        """Chooses victims while more is in memory than may be, or the store is over a budget.

        Args:
            idle_first: whether idle entries are being chosen for the same end, so that others stay until that is done.
        """
        memory = self._memory
        self.searching = self._deferred_pins is not None
        if memory.scan_in_flight or memory.scan_due or self._only_for_puts:
            return
        if self._residency.excess_bytes == 0:
            self.stuck = False
        elif self._evict_for_pages(now, idle_first=idle_first):
            return
        if self._trim_due:
            self._trim_due = False
            self._trim(now)
        if self._rescan_due and not memory.scan_in_flight:
            # Without victims the scan tells which pins have gone since the last one.
            self._rescan_due = False
            if self._waits_for_pins:
                self._scan()

    def drained(self) -> None:
        """What was read until now is known."""
        self._draining = False
        if self._attempt is not None:
            self._attempt.drained = True

    def scanned(self, pinned: AbstractSet[int], now: float) -> None:
        """Carries out what a scan found, or puts that off (`searching`) until it is known whether the put can fit."""
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
            attempt.cursor.fresh = True
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
        """Goes on with a scan's outcome; looks again at retired spans, and again for something to trim."""
        if self._deferred_pins is not None:
            pinned, self._deferred_pins = self._deferred_pins, None
            self.scanned(pinned, now)
        if self._memory.scan_in_flight or self._rescan_at is None or now < self._rescan_at:
            return
        self._rescan_at = None
        self._rescan_due = self._trim_due = True
        self.restart_search()

    def check_invariants(self, *, idle_first: bool) -> None:
        """Asserts that whatever waits for a scan gets one."""
        memory = self._memory
        stuck = memory.scan_due or self._waits_for_pins
        deferred = (self._trim_due or self._rescan_due) and self._residency.excess_bytes > 0
        assert memory.scan_in_flight or not stuck or self._rescan_at is not None or deferred
        if self._residency.victims_bytes and not memory.scan_in_flight:
            assert self.stuck or self.searching or idle_first, "nothing is done about pages over the target"

    @property
    def _waits_for_pins(self) -> bool:
        return self._memory.has_pinned_retired or self._memory.spans.over_budget() or self.stuck

    def _trim(self, now: float) -> None:
        """Chooses victims while the store is over a budget that was lowered."""
        memory = self._memory
        if not memory.spans.over_budget():
            return
        choice = self._room.choose(Need(), self._budget_cursor)
        if choice.victims:
            self._budget_cursor.skip = 0
            memory.hide(choice.victims.items())
            self._scan()
            return
        # Whatever stands at the cold end is pinned: look further next time, and at the start after the end.
        if not self._room.more:
            self._budget_cursor.skip = 0
        self._time_rescan(now, something_freed=False)

    def _evict_for_pages(self, now: float, *, idle_first: bool) -> bool:
        """Chooses entries for their pages, where holes do not suffice. True unless nothing of theirs would help."""
        want_bytes = self._residency.victims_bytes
        if self.stuck:
            return False
        if not want_bytes or idle_first:
            return True
        choice = self._room.choose_for_pages(want_bytes, self._residency.reason, self._page_cursor)
        if choice.victims:
            self._memory.hide(choice.victims.items())
            self._scan()
            return True
        if self._room.more:
            self.searching = True
            return True
        # Whoever waits for these pages must hear that they do not come.
        self.stuck = self.searching = True
        self._time_rescan(now, something_freed=False)
        return False

    def _move(self, moves: Iterable[tuple[SpanEntry, int]]) -> bool:
        """Begins the moves; whether there is any."""
        for entry, offset in moves:
            move = self._memory.begin_move(entry, offset)
            if move is None:
                break
            copy = move.copy
            self._outbox.add(Move(copy.span_id, entry.offset, copy.offset, copy.span_bytes, copy.owner_uid))
        return self._memory.moving

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._outbox.add(Drain())

    def _scan(self) -> None:
        self._memory.begin_scan()
        self._rescan_due = False
        self._outbox.counters.scans += 1
        self._outbox.add(Scan())

    def _spares(self, pinned: AbstractSet[int]) -> Callable[[SpanEntry], bool]:
        """Which victims that nobody pins stay after all: the room is no longer wanted, or of no use; or a put that is
        to follow one has come since it was chosen.
        """
        spared, is_awaited = self._is_unneeded(pinned), self._memory.sequences.is_awaited
        return lambda entry: (spared and entry.reason != "emergency") or is_awaited(entry)

    def _is_unneeded(self, pinned: AbstractSet[int]) -> bool:
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


def _dearest(choice: Choice, need: Need) -> SpanEntry:
    """The last of the victims that the need takes; those behind it go in view of the puts to come."""
    left_bytes = need.span_bytes
    for entry in choice.victims:
        left_bytes -= entry.span_bytes
        if left_bytes <= 0:
            break
    return entry

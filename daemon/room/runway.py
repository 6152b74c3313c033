"""The runway: room that is made ahead of puts, in batches; and room for a large place, which a request waits for.

    Drain (reads until now) → victims of the policy → hidden → Scan → pinned: an entry again; unpinned: free
                              moves of survivors → Moved → the old bytes wait for the same scan

Owns: when rounds, scans and drains begin, and the attempt for the request that waits. Does not own: the choice of
victims (the policy) and of stretches (`ways`), the free places (`places`), nor who gets one (`lending`).

Invariants: at most one scan and one drain in flight. No search while a scan or a move is in flight. An attempt ends:
each of its rounds frees bytes, or counts against FRUITLESS_MAX. Rows that wait for pins are scanned again, after a
delay that doubles each time nothing was freed, up to RESCAN_S_MAX.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from ..forms.effects import Drain, Scan
from ..forms.limits import RingBudget
from ..forms.outbox import StoreOutbox
from ..host_memory.host_memory import RESCAN_S, RESCAN_S_MAX, HostMemory
from ..store.commit import Commits
from ..store.entries import Entries, OverEntries
from ..store.spans import ScanOutcome
from ..store.table import ENDED
from .moves import RingMoves
from .places import FreePlaces
from .stretches import MOVES_MAX, RUN_ROWS_MAX, Way
from .survey import OwnerShares
from .ways import LATER, Attempt, Ways

BATCH_SHARE: Final = 64
"""A round for tokens over their limit evicts 1/BATCH_SHARE of the limit more."""
EXCHANGES_MAX: Final = 3
"""Exchanges of pages after which an attempt ends."""
FRUITLESS_MAX: Final = 2
"""Scans in a row without freed bytes after which an attempt ends."""
STRETCH_ROWS: Final = 512
"""Entries of usual size that go from a stretch for several places, at most."""


class Runway(OverEntries):
    """Makes room in one ring. `budget`: the limits in force; others change it."""

    def __init__(self, entries: Entries, commits: Commits, budget: RingBudget, outbox: StoreOutbox) -> None:
        super().__init__(entries)
        self._commits = commits
        self.shares = OwnerShares(entries.tenants, budget)
        self._budget = budget
        self._counters = outbox.counters
        self._emit = outbox.add
        self._rescan_s = RESCAN_S
        self._rescan_at: float | None = None
        self.places = FreePlaces(entries, budget, lambda: self.pages.withdrawn.size_bytes)
        self.moves = RingMoves(entries, outbox.add)
        self._ways = Ways(entries, self.shares, budget, self.places, commits.tails)
        self.pages: HostMemory
        """The pages of the ring, which the caller makes after this, with `places.join`."""
        self._attempt: Attempt | None = None
        self._draining = self._drained = False
        self._vain = False
        """Whether the last round found no victim. Nothing is tried again before a scan."""
        self.only_for_requests = False
        """The daemon is about to end: no entry goes for a limit, nor ahead of requests."""
        self.is_growing = False
        """Whether the ring grows: until it has its size, nothing is evicted for its bytes."""

    def grown(self, ring_bytes: int, *, more: bool) -> None:
        """The ring's first `ring_bytes` may be used; `more`: it will grow further."""
        if ring_bytes > self._holes.capacity_bytes:
            self._holes.grow(ring_bytes)
        self.is_growing = more
        self.drop_attempt()

    # ---- rounds

    def advance(self, now: float) -> None:
        """Begins what is due: a round for limits that were lowered or for later requests, and a scan. At the end of
        each event, after the requests were served."""
        spans, places = self._spans, self.places
        self._commits.evicts = places.is_full
        if spans.scanning:
            return
        if not (spans.scan_due or self.moves or self._vain or self._attempt or self.only_for_requests):
            over_bytes, over_entries, over_tokens = self._lacks()
            if (over_bytes > 0 or over_entries > 0 or over_tokens > 0) and self._has_drained():
                self._drained = False
                owners = self.shares.evictable(places.owner, max(over_bytes, 0))
                ahead = not self._is_over
                if rows := self._ways.coldest(over_bytes, over_entries, over_tokens, owners, ahead=ahead):
                    spans.hide(rows, "entries" if over_entries > 0 else "tokens" if over_tokens > 0 else "capacity")
                    places.begin_round()
                else:
                    self._vain = True
                    self._time_rescan(now, freed=False)
        if spans.scan_due:
            self.scan()

    def make_room(self, size: int, owner: int, now: float, *, ahead: bool = False) -> bool:
        """Goes on making room for a request for which `take` found none. `ahead`: no put waits for it, and nothing goes
        for it that was just put. Returns False if no evictable entry would help: the request is refused."""
        spans = self._spans
        if spans.scanning or spans.scan_due or self.moves:
            return True
        attempt = self._attempt
        if attempt is None:
            # A search for several places costs as much as for one.
            entry_bytes = self.places.used_bytes // max(self._tenants.total_entries, 1)
            stretch_bytes = max(size, min(self.places.ahead_bytes, STRETCH_ROWS * entry_bytes) // size * size)
            is_wide = 2 * size > RUN_ROWS_MAX * entry_bytes
            attempt = self._attempt = Attempt(size, owner, stretch_bytes, ahead, is_wide)
            self._drained = self.places.keeps = False
            self.places.join()
        if not ahead and self._wait_for_pages(attempt):
            return True
        if attempt.fruitless >= FRUITLESS_MAX or attempt.exchanges >= EXCHANGES_MAX:
            return False
        if not self._has_drained():
            return True
        way = self._ways.of(attempt, now)
        if way is LATER:
            return True
        if way is not None:
            self._go(way)
            self.places.begin_round()
        elif attempt.scans and attempt.stretch_bytes > size:
            attempt.stretch_bytes = size
            return self.make_room(size, owner, now, ahead=ahead)
        elif attempt.scans:
            return False
        else:
            # It shows which pins have ended.
            self.scan()
        return True

    def _wait_for_pages(self, attempt: Attempt) -> bool:
        """Whether pages are about to be given back, which comes first, or are taken back for the request, which costs
        no entry."""
        pages, residency = self.pages, self.pages.residency
        fits = attempt.size <= self._budget.put_bytes_max - self.places.used_bytes
        progress = residency.exchange_progress()
        if progress == "moving" and not pages.stuck:
            return True
        if progress != "none":
            attempt.exchanges += 1
            residency.drop_exchange()
        if (residency.excess_bytes and not pages.stuck) or (residency.regrowing and fits):
            return True
        if attempt.exchanges or not fits or (window := pages.withdrawn.window(attempt.size)) is None:
            return False
        residency.exchange(*window, attempt.size)
        return True

    @property
    def searching(self) -> bool:
        """Whether a search goes on with the next event, which is due now."""
        return self._attempt is not None and self._attempt.sought and not (self._spans.scanning or self.moves)

    def drop_attempt(self) -> None:
        """Another request waits now, or none; or a limit has changed: what did not fit may fit now."""
        self._attempt = None
        self._vain = False
        self.places.keeps = True
        self.pages.residency.drop_exchange()

    def drained(self) -> None:
        """The reads recorded before the last Drain are processed."""
        self._draining, self._drained = False, True

    def scanned(self, pinned: AbstractSet[int], now: float) -> ScanOutcome:
        """The pins that the scan found. Returns what became of the rows; those that are free are not the caller's."""
        outcome = self._spans.scanned(pinned | self.moves.sources if self.moves else pinned)
        self._counters.republished += len(outcome.republished)
        attempt = self._attempt
        if attempt is not None:
            attempt.scans += 1
            if outcome.freed_bytes:
                attempt.fruitless = 0
            elif outcome.victims or outcome.republished:
                attempt.fruitless += 1
        self.places.free(outcome.freed)
        self._vain = False
        self._time_rescan(now, freed=outcome.freed_bytes > 0)
        return outcome

    def moved(self, number: int, *, copied: bool) -> None:
        """The copy of an entry that moves is complete, or has failed."""
        if row := self.moves.end(number, copied=copied):
            self._counters.moves += 1
            self._counters.moved_bytes += self._table.sizes[row]

    def next_timer(self) -> float | None:
        """When `tick` is due."""
        return None if self._spans.scanning else self._rescan_at

    def tick(self, now: float) -> None:
        """Scans what waits for pins, if that is due."""
        if self._rescan_at is not None and now >= self._rescan_at and not self._spans.scanning:
            self._rescan_at = None
            self._vain = False
            if self._spans.waits_for_pins or self._is_over:
                self.scan()

    # ---- what a round needs

    @property
    def _is_over(self) -> bool:
        budget, tenants = self._budget, self._tenants
        return tenants.total_entries > budget.max_entries or (
            budget.max_tokens is not None and tenants.total_tokens > budget.max_tokens
        )

    def _lacks(self) -> tuple[int, int, int]:
        """The bytes, entries and tokens that are to be evicted: what is over a limit, and what is to be free for later
        requests. What is over a limit on bytes goes with its pages (daemon/host_memory)."""
        budget, tenants, over_tokens = self._budget, self._tenants, 0
        if budget.max_tokens is not None and tenants.total_tokens > budget.max_tokens:
            over_tokens = tenants.total_tokens - budget.max_tokens + budget.max_tokens // BATCH_SHARE
        lacking_bytes, lacking = self.places.lacking()
        if self.is_growing:
            lacking_bytes = 0
        return lacking_bytes, max(tenants.total_entries - budget.max_entries, lacking), over_tokens

    def _has_drained(self) -> bool:
        """Whether the reads until lately are processed; has them processed otherwise."""
        if not self._drained and not self._draining:
            self._draining = True
            self._emit(Drain())
        return self._drained

    def scan(self) -> None:
        """Begins a scan; none is in flight."""
        self._spans.begin_scan()
        self._counters.scans += 1
        self._emit(Scan())

    def _time_rescan(self, now: float, *, freed: bool) -> None:
        if not self._spans.waits_for_pins and not self._is_over:
            self._rescan_at, self._rescan_s = None, RESCAN_S
            return
        self._rescan_s = RESCAN_S if freed else min(2 * self._rescan_s, RESCAN_S_MAX)
        self._rescan_at = now + self._rescan_s

    def _go(self, way: Way) -> None:
        """Carries a way out, as far as it can be by now. A scan follows."""
        if len(way.moves) > MOVES_MAX:
            way = Way([], moves=way.moves[:MOVES_MAX], inside=way.inside)
        # Nothing moves into the piece that is to be free.
        holes = self._holes
        inside = way.inside if way.moves else ()
        filled = [holes.take_behind(row, holes.behind(row), ENDED) for row in inside if holes.behind(row)]
        for row in way.moves:
            if not self.moves.begin(row):
                break
        for row in filled:
            if row:
                holes.free(row)
        if way.victims and not way.handed:
            self._policy.may_go(way.victims, False)
        self._spans.hide(way.victims, way.reason)
        if not way.victims and not self.moves:
            self.scan()

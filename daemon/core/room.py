"""Chooses the victims, moves or pages that make room for a put. Changes nothing itself.

Owns the choice. Does not own the budgets, the ring's holes, the index's buckets, or which entries are evictable
(`unevictable`). The descendants of a chosen block are chosen with it.

Invariants: victims are chosen only if, as far as known, they make the put fit, in this round or together with later
rounds; so a put that cannot fit costs no entry. A round examines a bounded number of entries. The unevictable spans are
surveyed only if the quick search fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final

from ...shm.window import Window, widest_withdrawn
from .choice import Choice, Cursor
from .coldest import LOOKS_MAX, Coldest
from .entries import EntryState, SpanEntry
from .holdings import Capacity, Holding
from .moving import Moving, MovingTime
from .need import Need
from .page_eviction import PageEviction
from .pins import Pins
from .span_table import SpanTable
from .unevictable import Unevictable
from .windows import ANCHORS_MAX, Price, Prices, Windows

VICTIMS_MAX: Final = 96
"""Victims of one round."""
WINDOW_ENTRIES_MAX: Final = 512
"""Entries of one window. If they are more than VICTIMS_MAX, they are evicted in several rounds."""
BATCH_BYTES_MAX: Final = 64 << 20
"""The most bytes that one round frees for later puts."""
BATCH_SHARE: Final = 64
"""One round frees 1/BATCH_SHARE of the ring, or of a budget, for later puts."""
BATCH_ENTRIES_MAX: Final = 64
"""The most entries that one round evicts for later puts."""
PLANS_MAX: Final = 32
"""Rounds in which, for one put, entries are moved or cold entries are evicted so that entries can be moved."""
SPARE_SHARE: Final = 50
"""Spare room: some of the coldest entries are evicted instead of warmer ones, so that entries can move. This is done
while fewer bytes are free than 1.5 times the put's bytes plus 1/SPARE_SHARE of the ring."""
FAR: Final = 1000.0
"""With more free bytes, spare room is made only if the cheapest way would evict entries of more than FAR times the
worth of the coldest ones, such as new entries. While no time is left for moves, a window of at most FAR times the worth
of the coldest entry's bytes is evicted at once."""
SPARE_STEPS: Final = 4
"""One round makes spare room of 1/SPARE_STEPS of the bytes that the cheapest way would evict."""
SPARE_MIN: Final = 32
"""One round makes spare room of at least 1/SPARE_MIN of the put's bytes."""


class Room:
    """Chooses victims in `memory`."""

    def __init__(self, memory: SpanTable, pins: Pins) -> None:
        self._memory = memory
        self.unevictable = unevictable = Unevictable(memory, pins)
        self._coldest = Coldest(memory, pins, unevictable.may_go)
        self._moving_time = MovingTime()

    @property
    def has_more(self) -> bool:
        """Whether evictable entries may be left that were not examined."""
        return self._coldest.has_more

    def choose(self, need: Need, cursor: Cursor, now: float) -> Choice:
        """The next victims; none if no evictable entry would help.

        If uids compete, the victims are entries of the uids that are over their shares (`holdings`). Only if none of
        these entries helps, a put of a uid within its share gets the entries of any uid as victims.
        """
        self._coldest.begin()
        owners = self.evictable_uids(need)
        choice = self._choose(need, cursor, owners, now)
        found = choice.victims or choice.moves or choice.searching or choice.exchange is not None
        if found or owners is None or need.uid in owners or not cursor.scanned:
            return choice
        return self._choose(need, cursor, None, now)

    def evictable_uids(self, need: Need) -> frozenset[int] | None:
        """The uids whose entries may be evicted for the need. None: those of any uid."""
        if need.key is None:
            return None
        budget = self._memory.budget
        capacity = Capacity(max(1, budget.put_bytes_max), budget.max_entries, budget.max_tokens)
        more = Holding(need.span_bytes, need.entries, need.tokens)
        return self._memory.spans.holdings.evictable_uids(need.uid, more, capacity)

    def _choose(self, need: Need, cursor: Cursor, owners: frozenset[int] | None, now: float) -> Choice:
        choice = Choice()
        exchange: tuple[int, int] | None = None
        if need.key is not None:
            ring = self._memory.ring
            if ring.largest_free_bytes < need.span_bytes:
                cursor.begun = self._rest(cursor.begun, owners)
                if cursor.begun:
                    return self._part(cursor.begun)
                found = self._cheapest_way(need, cursor, owners, now)
                if isinstance(found, Choice):
                    return found
                window = found or self._exchange_window(need, cursor) or self._window(need, cursor.window_at, owners)
                if window is None and owners is None:
                    if not self.unevictable.advance_survey():
                        return Choice(searching=True)
                    window = self._window_between_pins(need)
                if window is None:
                    return choice
                entries = list(map(self._memory.spans.at, window.spans))
                if len(entries) > VICTIMS_MAX:
                    cursor.begun = entries
                    return self._part(cursor.begun)
                choice.victims = self._with_children(dict.fromkeys(entries, "capacity"))
                if ring.withdrawn_count or not window.enough:
                    cursor.window_at = window.low
                if not window.enough:
                    return choice
                if not window.spans:
                    exchange = (window.low, window.high)
            if not self._bucket_has_room(need.key, choice):
                victim = self._coldest_of_bucket(need.key, owners)
                if victim is None:
                    return Choice()
                choice.victims[victim] = "index_bucket"
        choice = self._meet_budgets(need, choice, cursor, owners)
        choice.victims = self._with_children(choice.victims)
        if exchange is not None and not choice.victims and not choice.searching:
            within = not self._memory.spans.over_budget(need.entries, need.span_bytes, need.tokens)
            choice.exchange = exchange if within else None
            cursor.exchanged |= within
        return choice

    def choose_for_pages(self, want_bytes: int, reason: str, cursor: Cursor) -> Choice:
        """Entries whose end frees `want_bytes` of whole pages and little more, coldest first."""
        memory = self._memory
        self._coldest.begin()
        eviction = PageEviction(
            memory.ring,
            self._may_end_after,
            lambda o: memory.policy.rank(memory.spans.at(o).number),
            VICTIMS_MAX,
        )
        seen = 0
        for entry in self._coldest.walk(cursor.skip):
            left_bytes = want_bytes - eviction.freed_bytes
            if left_bytes <= 0 or len(eviction.spans) >= VICTIMS_MAX:
                break
            eviction.add(entry.offset, left_bytes)
            seen += 1
        cursor.skip = 0 if eviction.spans else cursor.skip + seen
        return Choice(self._with_children({memory.spans.at(offset): reason for offset in eviction.spans}))

    def leaves_first(
        self, wanted: Iterable[SpanEntry], test: Callable[[SpanEntry], bool], most: int
    ) -> list[SpanEntry]:
        """The entries of `wanted` that pass `test` and all of whose descendants pass it, together with these
        descendants, in the order in which they may be hidden. At most `most`; of a large tree, possibly only a part of
        the leaves."""
        chosen: dict[SpanEntry, None] = {}
        stay: set[SpanEntry] = set()
        looks = LOOKS_MAX
        for entry in wanted:
            below = self._memory.sequences.leaves_first(entry, chosen)
            for each in islice(below, max(looks, 0) if entry.child_count else 1):
                if len(chosen) >= most:
                    return list(chosen)
                looks -= entry.child_count > 0
                if each not in stay and test(each):
                    chosen[each] = None
                elif each.parent is not None:
                    stay.add(each.parent)
        return list(chosen)

    def _may_end_after(self, offset: int, ending: Collection[int]) -> bool:
        """Whether the entry at a ring offset is evictable together with those at `ending`: it has no other children."""
        entry = self._memory.spans.at(offset)
        child = entry.newest_child if entry.child_count else None
        while child is not None and child.offset in ending:
            child = child.sibling
        return child is None and self.unevictable.may_go(entry)

    def _with_children(self, victims: dict[SpanEntry, str]) -> dict[SpanEntry, str]:
        """The victims with all their descendants, in the order in which they may be hidden. At most VICTIMS_MAX: the
        rest is left for the next round."""
        if not any(entry.child_count for entry in victims):
            return victims
        whole: dict[SpanEntry, str] = {}
        for entry, reason in victims.items():
            for each in self._memory.sequences.leaves_first(entry, whole):
                if len(whole) >= VICTIMS_MAX:
                    return whole
                whole[each] = reason
        return whole

    def _exchange_window(self, need: Need, cursor: Cursor) -> Window | None:
        """A window in which only withdrawn pages are in the way, for a put within the budgets. An exchange of pages
        costs no entry. It is tried once in an attempt, since the memory may not be available."""
        if cursor.exchanged or self._memory.spans.over_budget(need.entries, need.span_bytes, need.tokens):
            return None
        return widest_withdrawn(self._memory.ring.map, need.span_bytes)

    def _cheapest_way(
        self, need: Need, cursor: Cursor, owners: frozenset[int] | None, now: float
    ) -> Choice | Window | None:
        """The cheapest of three ways to get `need.span_bytes` in one piece: entries move into holes elsewhere; the
        entries of a window are evicted; or some of the coldest entries are evicted, so that more entries can move in
        the next round. While no time is left for moves, a window is chosen, unless new entries are evicted with it.

        Returns:
            None if entries cannot move: for blocks of sequences, while pages are withdrawn, and after PLANS_MAX rounds.
        """
        memory, ring = self._memory, self._memory.ring
        coldest = next(self._coldest.walk(owners=owners), None)
        if coldest is None or coldest.prefix_bytes or ring.withdrawn_count or cursor.plans >= PLANS_MAX:
            return None
        windows = self._windows(need, owners)
        if not self._moving_time.is_left(now):
            window = windows.cheapest(self._coldest.walk(owners=owners))
            unavoidable = memory.policy.rank(coldest.number)[0] * need.span_bytes
            if window is not None and windows.price(window)[0] <= FAR * unavoidable:
                return window
        self._moving_time.searched()
        if ring.free_bytes < need.span_bytes:
            if self.unevictable.is_known and self.unevictable.obstacle(need) is not None:
                return None
            choice = self._meet_budgets(need, Choice(), cursor, owners)
            choice.victims = self._with_children(choice.victims)
            return choice if choice.victims else None
        if not cursor.scanned:
            # An entry in use does not move. A scan shows which entries are in use.
            return Choice()
        cursor.plans += 1
        prices = Prices(memory)
        # The first entry priced sets the floor of all prices, so it must be the coldest.
        prices.of(coldest)
        plan = Moving(memory, prices, self.unevictable.may_go, self._evictable_test(owners)).best(need.span_bytes)
        if plan is not None and plan.moves and not plan.victims:
            self._moving_time.moved(plan)
            return Choice({}, plan.moves)
        window = windows.cheapest(self._coldest.walk(owners=owners))
        ways: list[tuple[Price, int, Choice | Window]] = []
        if plan is not None and plan.moves:
            ways.append((plan.lost, plan.gone_bytes, Choice(dict.fromkeys(plan.victims, "capacity"), plan.moves)))
        if window is not None:
            ways.append((windows.price(window), sum(map(ring.size_at, window.spans)), window))
        if not ways:
            return None
        lost, gone_bytes, way = min(ways, key=lambda each: each[:2])
        if cursor.spare_bytes < need.span_bytes:
            spare = self._coldest_bytes(max(gone_bytes // SPARE_STEPS, need.span_bytes // SPARE_MIN), owners)
            little_free = ring.free_bytes < need.span_bytes * 3 // 2 + ring.capacity_bytes // SPARE_SHARE
            if prices.total(spare) < lost and (little_free or FAR * self._worth(spare) < lost[0]):
                cursor.spare_bytes += sum(entry.span_bytes for entry in spare)
                return Choice(self._with_children(dict.fromkeys(spare, "capacity")))
        if isinstance(way, Choice) and plan is not None:
            self._moving_time.moved(plan)
        return way

    def _worth(self, entries: Iterable[SpanEntry]) -> float:
        return sum(self._memory.policy.rank(entry.number)[0] * entry.span_bytes for entry in entries)

    def _coldest_bytes(self, size_bytes: int, owners: frozenset[int] | None) -> list[SpanEntry]:
        """The coldest entries, until they have `size_bytes` together."""
        found = []
        for entry in islice(self._coldest.walk(owners=owners), VICTIMS_MAX):
            found.append(entry)
            size_bytes -= entry.span_bytes
            if size_bytes <= 0:
                break
        return found

    def _window(self, need: Need, window_at: int | None, owners: frozenset[int] | None) -> Window | None:
        ring = self._memory.ring
        if window_at is not None and ring.is_free(window_at):
            begun = Windows(self._memory, need.span_bytes, self._evictable_test(owners), VICTIMS_MAX)
            window = begun.around(window_at, through=True)
            if window is not None:
                return window
        return (
            self._windows(need, owners).cheapest(self._coldest.walk(owners=owners))
            or widest_withdrawn(ring.map, need.span_bytes)
            or (None if owners is None else self._window_of(need, owners))
        )

    def _rest(self, begun: list[SpanEntry], owners: frozenset[int] | None) -> list[SpanEntry]:
        """The remaining entries of a window that is evicted in several rounds. Empty if one of them is in use by
        now."""
        left = [entry for entry in begun if entry.state is EntryState.LIVE]
        return left if all(map(self._evictable_test(owners), left)) else []

    def _part(self, begun: list[SpanEntry]) -> Choice:
        """The entries of a window that are evicted in one round."""
        return Choice(self._with_children(dict.fromkeys(begun[:VICTIMS_MAX], "capacity")))

    def _windows(self, need: Need, owners: frozenset[int] | None) -> Windows:
        """Windows of up to WINDOW_ENTRIES_MAX entries. So a large put may replace many small entries, not only large
        ones, which may be new."""
        return Windows(self._memory, need.span_bytes, self._evictable_test(owners), WINDOW_ENTRIES_MAX)

    def _evictable_test(self, owners: frozenset[int] | None) -> Callable[[SpanEntry], bool]:
        """The test whether an entry is evictable and belongs to one of the owners."""
        if owners is None:
            return self.unevictable.may_go
        return lambda entry: entry.owner_uid in owners and self.unevictable.may_go(entry)

    def _window_of(self, need: Need, owners: frozenset[int]) -> Window | None:
        """A window of the owners' entries. If it needs more entries than one round evicts, this is its first part, and
        the next rounds extend it."""
        wide = Windows(self._memory, need.span_bytes, self._evictable_test(owners), LOOKS_MAX)
        windows = Windows(self._memory, need.span_bytes, self._evictable_test(owners), VICTIMS_MAX)
        for entry in islice(self._coldest.walk(owners=owners), ANCHORS_MAX):
            found = wide.around(entry.offset, through=True)
            if found is not None and (found.enough or len(found.spans) >= LOOKS_MAX):
                return windows.around(entry.offset, through=True)
        return None

    def _window_between_pins(self, need: Need) -> Window | None:
        """The window around the coldest entry that lies in a wide enough gap between unevictable spans."""
        survey = self.unevictable.survey()
        if survey is None or self.unevictable.obstacle(need) is not None:
            return None
        windows = Windows(self._memory, need.span_bytes, self.unevictable.may_go, VICTIMS_MAX)
        lows, highs = survey.gaps(need.span_bytes, [*self._memory.filling, *self._memory.unpublished()])
        if not len(lows):
            return None
        for entry in self._coldest.walk():
            at = int(lows.searchsorted(entry.offset, "right")) - 1
            if at >= 0 and entry.offset < highs[at]:
                return windows.around(entry.offset, through=True)
        # No cold entry lies in a wide gap: take the widest gap, though its entries are warm.
        return windows.around(int(lows[(highs - lows).argmax()]), through=True)

    def _bucket_has_room(self, key: bytes, choice: Choice) -> bool:
        return any(entry is None or entry in choice.victims for entry in self.unevictable.bucket(key))

    def _coldest_of_bucket(self, key: bytes, owners: frozenset[int] | None) -> SpanEntry | None:
        test = self._evictable_test(owners)
        may_go = [entry for entry in self.unevictable.bucket(key) if entry is not None and test(entry)]
        rank = self._memory.policy.rank
        return min(may_go, key=lambda entry: (entry.child_count > 0, rank(entry.number)), default=None)

    def _meet_budgets(self, need: Need, choice: Choice, cursor: Cursor, owners: frozenset[int] | None) -> Choice:
        """Adds the coldest entries until the budgets hold, and a few more, so that one scan serves many puts."""
        over, want = self._wanted(need, choice)
        if max(want.values()) <= 0:
            return choice
        victims, seen = choice.victims, 0
        for entry in self._coldest.walk(cursor.skip, owners):
            if len(victims) >= VICTIMS_MAX or max(want.values()) <= 0:
                break
            seen += 1
            if entry in victims:
                continue
            gives = {"entries": 1, "tokens": entry.tokens, "capacity": entry.span_bytes}
            reason = next((what for what in want if want[what] > 0 and gives[what]), None)
            if reason is None:
                continue
            victims[entry] = reason
            for what, much in gives.items():
                over[what] -= much
                want[what] -= much
        if not victims:
            cursor.skip += seen
        if max(over.values()) <= 0 or need.key is None:
            return choice
        if not self.unevictable.advance_survey():
            return Choice(searching=True)
        if self.unevictable.obstacle(need) is not None:
            return Choice()
        if not victims and self.has_more:
            return Choice(searching=True)
        return choice

    def _wanted(self, need: Need, choice: Choice) -> tuple[dict[str, int], dict[str, int]]:
        """By how much the need exceeds each budget; and the amounts to free, later puts included."""
        memory, budget, victims = self._memory, self._memory.budget, choice.victims
        gone_bytes = sum(entry.span_bytes for entry in victims)
        bytes_max = budget.max_bytes if need.key is None else budget.put_bytes_max
        over = {
            "entries": memory.spans.taken_entries + need.entries - budget.max_entries - len(victims),
            "tokens": 0,
            "capacity": memory.ring.used_bytes + need.span_bytes - bytes_max - gone_bytes,
        }
        if budget.max_tokens is not None:
            gone_tokens = sum(entry.tokens for entry in victims)
            over["tokens"] = memory.spans.taken_tokens + need.tokens - budget.max_tokens - gone_tokens
        want = dict(over)
        if need.key is None:
            return over, want
        if over["entries"] > 0:
            want["entries"] += min(budget.max_entries // BATCH_SHARE, BATCH_ENTRIES_MAX)
        if over["tokens"] > 0 and budget.max_tokens is not None:
            want["tokens"] += budget.max_tokens // BATCH_SHARE
        if over["capacity"] > 0 or "capacity" in victims.values():
            batch = min(memory.ring.capacity_bytes // BATCH_SHARE, BATCH_BYTES_MAX)
            want["capacity"] = max(over["capacity"], batch - gone_bytes)
        return over, want

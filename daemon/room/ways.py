"""The way to room for one request: which of the coldest entries go, which stretch is emptied, which entries move.

    bytes, entries or slots of the table are lacking → the coldest entries go, with some more for later requests
    no hole is large enough → of a stretch, those that are worth as little as the coldest entry go, and the others move;
                              without such a stretch, the cheapest of: entries move into holes elsewhere; a stretch is
                              evicted; some of the coldest entries go, so that more can move
    no time is left for moves → first of all the cheapest stretch is looked for, and evicted if it is cheap
    only a stretch with new entries, or none → a stretch around old entries that are no blocks
    nothing around the coldest entries is free of pins, or it has more entries than one round looks at
                            → a stretch between the pins, cleared in several rounds

If uids compete, only entries of uids over their shares go. Only if none of them helps, a request of a uid within its
share gets those of any uid.

Owns: the choice for one request, and the coldest entries of a round. Does not own: the prices of stretches
(`stretches`), nor what becomes of the chosen ones (`runway`).

Invariants: entries are chosen only if, as far as is known, the request fits then, in this round or together with later
ones. A search looks at a bounded number of entries.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..forms.limits import RingBudget
from ..store.entries import Entries, OverEntries
from ..store.table import LIVE, WITHDRAWN, Array
from .moves import MovingTime
from .places import FreePlaces
from .stretches import LOOKS_MAX, MOVES_MAX, NOTHING, RUN_ROWS_MAX, WIDE, Stretches, Test, Way, chosen
from .survey import OwnerShares, Survey

ROUND_ROWS_MAX: Final = 256
"""Victims of one round."""
SURPLUS_SHARE: Final = 16
BATCH_SHARE: Final = 64
BATCH_BYTES_MAX: Final = 64 << 20
"""A round for a request frees up to 1/BATCH_SHARE of the ring for later ones too."""
PLANS_MAX: Final = 32
"""Rounds of one attempt in which entries are moved, or evicted so that others can be moved."""
ANCHORS_MAX: Final = 32
"""The coldest entries, around which stretches to evict are looked for."""
SPARE_SHARE: Final = 50
"""Spare room: some of the coldest entries are evicted instead of warmer ones, so that entries can move. This is done
while fewer bytes are free than 1.5 times the request's bytes plus 1/SPARE_SHARE of the ring."""
NEAR: Final = 0.1
"""The entries of a stretch that are worth at most this share more than the coldest one go, and the others move."""
FAR: Final = 1000.0
"""With more free bytes, spare room is made only if the cheapest way would evict entries of more than FAR times the
worth of the coldest ones. While no time is left for moves, a stretch of at most FAR times that worth is evicted."""
SPARE_STEPS: Final = 4
SPARE_MIN: Final = 32
"""One round makes spare room of 1/SPARE_STEPS of the bytes that the cheapest way would evict, at least of 1/SPARE_MIN
of the request's."""
OLD_MAX: Final = 4096
"""Entries among which the coldest are looked for that are no blocks."""
GAPS_MAX: Final = 4
"""Gaps between pins that are looked at."""

_NEW: Final = (1.0, 0.0, 0.0)
"""The price of a way that costs what was just put, however much."""
LATER: Final = Way([])
"""The search goes on with the next event: half of it takes 2 ms."""


@dataclass(slots=True)
class Attempt:
    """The attempt to make room for a request of `size` bytes. `stretch_bytes`: of a stretch for it and for later ones.
    `ahead`: no put waits for it. `wide`: runs of many entries are looked for, since no other was found, or a place has
    as many. `sought`: there is no stretch to clear; the search goes on with the next event. `clears`: the bytes of a
    stretch that is cleared in several rounds. `spare_bytes`: evicted so that entries can move. `exchanges`: of pages,
    for the request."""

    size: int
    owner: int
    stretch_bytes: int
    ahead: bool = False
    wide: bool = False
    sought: bool = False
    clears: tuple[int, int] | None = None
    scans: int = 0
    fruitless: int = 0
    plans: int = 0
    spare_bytes: int = 0
    exchanges: int = 0


class Ways(OverEntries):
    """Ways to room in one ring."""

    def __init__(
        self, entries: Entries, shares: OwnerShares, budget: RingBudget, places: FreePlaces, tails: Collection[int]
    ) -> None:
        super().__init__(entries)
        self._entries = entries
        self._shares = shares
        self._budget = budget
        self._places = places
        self._tails = tails
        """Span ids of blocks that were just stored. They go last: a sequence is put block by block."""
        self._stretches = Stretches(entries)
        self._time = MovingTime()

    def coldest(
        self, over_bytes: int, over: int, over_tokens: int, owners: Collection[int] | None, *, ahead: bool
    ) -> list[int]:
        """The coldest entries, until so much goes with them, at most ROUND_ROWS_MAX. They are handed out. `ahead`: for
        puts that may come, for which nothing goes that was just put."""
        table, tenants, policy = self._table, self._tenants, self._policy
        found: list[int] = []
        tails: set[int] = self._tail_rows() if ahead else set()
        spared: list[int] = []
        while (over_bytes > 0 or over > 0 or over_tokens > 0) and len(found) < ROUND_ROWS_MAX:
            total = max(tenants.total_entries, 1)
            count = max(
                over,
                -(-over_bytes * total // max(self._places.used_bytes, 1)),
                -(-over_tokens * total // max(tenants.total_tokens, 1)),
            )
            # Some more, since they may be smaller than others. What is left over may go another time.
            count += count // SURPLUS_SHARE
            rows = policy.victims(min(max(count, 1), ROUND_ROWS_MAX - len(found)), owners)
            if ahead and rows and policy.in_window(rows[-1]):
                # The window comes last: there is nothing else.
                inside = policy.are_in_window(np.array(rows))
                policy.may_go(np.array(rows)[inside].tolist(), True)
                rows = np.array(rows)[~inside].tolist()
            if not rows:
                break
            if kept := tails.intersection(rows):
                # A parent stays with its child.
                kept.update(self._families.ancestors(kept).intersection(rows))
                spared += kept
                rows = [row for row in rows if row not in kept]
            if not (rows := self._spans.unpinned(rows)):
                continue
            sizes, tokens = np.cumsum(table.column("sizes")[rows]), np.cumsum(table.column("tokens")[rows])
            needed = max(
                over,
                int(np.searchsorted(sizes, over_bytes)) + 1 if over_bytes > 0 else 0,
                int(np.searchsorted(tokens, over_tokens)) + 1 if over_tokens > 0 else 0,
            )
            if needed < len(rows):
                policy.may_go(rows[needed:], True)
                rows = rows[:needed]
            found += rows
            over -= len(rows)
            over_bytes -= int(sizes[len(rows) - 1])
            over_tokens -= int(tokens[len(rows) - 1])
        if spared:
            policy.may_go(spared, True)
        return found

    def of(self, attempt: Attempt, now: float) -> Way | None:
        """What makes room for the request: entries of the owners that are over their shares; only if none helps, a
        request of an owner within its share gets those of any owner."""
        owners = self._shares.evictable(attempt.owner, attempt.size)
        way = self._way_of(attempt, owners, now)
        if way is None and owners is not None and attempt.owner not in owners and attempt.scans:
            way = self._way_of(attempt, None, now)
        return way

    def _way_of(self, attempt: Attempt, owners: Collection[int] | None, now: float) -> Way | None:
        size, spans = attempt.size, self._spans
        if (spans.held or spans.last_pinned) and Survey(self._entries).obstacle(size, self._budget) is not None:
            return None
        over_bytes, over = size - self._places.left_bytes, 1 - self._places.left_entries
        if over_bytes > 0 or over > 0:
            more_bytes, more = self._more_bytes if over_bytes > 0 else 0, self._places.ahead if over > 0 else 0
            rows = self.coldest(over_bytes + more_bytes, over + more, 0, owners, ahead=True)
            if not attempt.ahead:
                lacking_bytes = over_bytes - sum(map(self._table.sizes.__getitem__, rows))
                rows += self.coldest(lacking_bytes, over - len(rows), 0, owners, ahead=False)
            return Way(rows, handed=True, reason="entries" if over > 0 else "capacity") if rows else None
        if attempt.clears is not None and (way := self._way_between_pins(attempt, owners)) is not None:
            return way
        way = self._cheapest_way(attempt, owners, now)
        if way is None or way.price[0]:
            old = self._way_of_old(size, owners)
            way = old if old is not None and (way is None or old.price < way.price) else way
        if attempt.ahead:
            return None if way is None or way.price[0] else way
        is_one, is_new = attempt.stretch_bytes == attempt.size, way is not None and way.price[0] > 0
        if (way is None and not attempt.wide) or ((way is None or is_new) and not is_one):
            # First for one place alone, then with longer runs.
            attempt.wide |= is_one
            attempt.stretch_bytes = attempt.size
            return self._way_of(attempt, owners, now)
        if way is not None and not is_new:
            return way
        chains = self._way_between_pins(attempt, owners)
        if way is not None and (chains is None or chains.price[0]):
            attempt.clears = None
            return way
        return chains

    @property
    def _more_bytes(self) -> int:
        """The bytes that go for later requests, in a round for one that waits."""
        return min(self._places.ahead_bytes, self._holes.capacity_bytes // BATCH_SHARE, BATCH_BYTES_MAX)

    def _cheapest_way(self, attempt: Attempt, owners: Collection[int] | None, now: float) -> Way | None:
        """The cheapest way to get the bytes in one piece (module docstring). While no time is left for moves, a cheap
        stretch is evicted, before anything else is looked for."""
        size, stretches, policy = attempt.stretch_bytes, self._stretches, self._policy
        wide = WIDE if attempt.wide else 1
        stretches.rows_max, stretches.looks_max = wide * RUN_ROWS_MAX, wide * LOOKS_MAX
        may_go, may_move = self._evictable(owners), self._evictable(None, leaves=False)
        anchors = policy.coldest(ANCHORS_MAX, owners)
        if not anchors or (attempt.ahead and policy.in_window(anchors[0])):
            return None
        floor = float(policy.worth(anchors[:1])[0])
        moves = not self._table.records[anchors[0]] and attempt.plans < PLANS_MAX
        is_time_left, window = self._time.is_left(now), None
        if moves and not is_time_left and not attempt.sought:
            window = stretches.to_evict(size, anchors, may_go)
            if _is_cheap(window, FAR * floor * size):
                return window
        if moves and policy.weighs and not attempt.sought:
            most_bytes, cold = (self._more_bytes, size if is_time_left else 0), (1 + NEAR) * floor
            if (way := stretches.to_clear(size, anchors, cold, most_bytes, may_move, may_go)) is not None:
                if way.moves:
                    self._planned(attempt, way)
                return way
            attempt.sought = True
            return LATER
        attempt.sought = False
        window = window or stretches.to_evict(size, anchors, may_go)
        if not moves or (not is_time_left and _is_cheap(window, FAR * floor * size)):
            return window
        if not attempt.scans:
            # An entry in use does not move. A scan shows which entries are in use. Nothing is cleared after it either.
            attempt.sought = True
            return Way([])
        plan = stretches.to_move(size, floor, may_move, may_go)
        self._planned(attempt, plan)
        if plan is not None and not plan.victims:
            return plan
        ways = [way for way in (plan, window) if way is not None]
        if not ways:
            return None
        best = min(ways, key=lambda way: (way.price, way.gone_bytes))
        return self._spare_room(attempt, chosen(anchors, may_go), floor, best) or best

    def _planned(self, attempt: Attempt, plan: Way | None) -> None:
        """A plan of moves was looked for, and perhaps found."""
        attempt.plans += 1
        if plan is not None:
            moves = plan.moves[:MOVES_MAX]
            self._time.spent(len(moves), sum(map(self._table.sizes.__getitem__, moves)))

    def _spare_room(self, attempt: Attempt, coldest: list[int], floor: float, best: Way) -> Way | None:
        """Some of the coldest entries, if they go instead of those of the best way, so that more can move."""
        size, holes, stretches = attempt.stretch_bytes, self._holes, self._stretches
        if attempt.spare_bytes >= size:
            return None
        spare, spare_bytes, wanted_bytes = [], 0, max(best.gone_bytes // SPARE_STEPS, size // SPARE_MIN)
        for row in coldest:
            spare.append(row)
            spare_bytes += self._table.sizes[row]
            if spare_bytes >= wanted_bytes:
                break
        if not spare or stretches.price(spare, floor) >= best.price:
            return None
        worth = stretches.price(spare, 0.0)
        is_little_free = holes.total_bytes < size * 3 // 2 + holes.capacity_bytes // SPARE_SHARE
        if not is_little_free and best.price[0] <= worth[0] and FAR * worth[1] >= best.price[1]:
            return None
        attempt.spare_bytes += spare_bytes
        return Way(spare)

    def _way_of_old(self, size: int, owners: Collection[int] | None) -> Way | None:
        """A stretch to evict around entries that are no blocks: for a place that costs new entries around the coldest
        ones, of which blocks with children are the neighbours."""
        table = self._table
        rows = np.flatnonzero((np.frombuffer(table.states, np.uint8) == LIVE) & (table.column("records") == 0))
        rows = rows[~self._policy.are_in_window(rows)]
        may_go = self._evictable(owners)
        # The largest: fewer of them have to go.
        rows = rows[np.argsort(table.column("sizes")[rows], kind="stable")[-OLD_MAX:]]
        return self._way_around(size, rows[may_go(rows)], may_go)

    def _way_between_pins(self, attempt: Attempt, owners: Collection[int] | None) -> Way | None:
        """Of a stretch between unevictable rows some entries, with their descendants: for a place that is wider than
        what is free of pins and parents around the coldest entries, or has more entries than one round looks at. Later
        rounds clear the rest of the stretch, unless an entry in it is in use by then. What was just put goes only if
        nothing else does: the way has a price then."""
        survey, new = Survey(self._entries), self._new_rows()
        for spared in ({*new, *self._families.ancestors(new)}, set[int]()):
            may_go = self._evictable(owners, leaves=False, survey=survey, spared=spared)
            rows = self._entries_in(attempt.clears)
            if not len(rows) or not may_go(rows).all():
                attempt.clears = self._stretch_between_pins(attempt.size, survey, may_go)
                rows = self._entries_in(attempt.clears)
            whole: dict[int, None] = {}
            for row in rows[:ROUND_ROWS_MAX].tolist():
                whole.update(dict.fromkeys(self._families.leaves_first(row, whole)))
            if whole or not new:
                return Way([*whole], NOTHING if spared or not new else _NEW) if whole else None
        return None

    def _new_rows(self) -> set[int]:
        """Rows that go last: those of the window, and of blocks that were just stored."""
        rows = np.flatnonzero(np.frombuffer(self._table.states, np.uint8)[: self._table.top] == LIVE)
        inside: list[int] = rows[self._policy.are_in_window(rows)].tolist()
        return {*inside, *self._tail_rows()}

    def _stretch_between_pins(self, size: int, survey: Survey, may_go: Test) -> tuple[int, int] | None:
        """The bytes of the cheapest stretch around the coldest entries in the widest gaps between unevictable rows."""
        table = self._table
        for gap in sorted(survey.gaps(size), key=lambda gap: gap[0] - gap[1])[:GAPS_MAX]:
            rows = self._entries_in(gap)
            found = self._way_around(size, rows[:: 1 + len(rows) // OLD_MAX], may_go, rows_max=self._table.count)
            if found is not None and found.victims:
                return table.offsets[found.victims[0]], table.end(found.victims[-1])
        return None

    def _entries_in(self, stretch: tuple[int, int] | None) -> Array:
        """The rows of the entries in some bytes of the ring, by offset."""
        low, high = stretch or (0, 0)
        offsets = self._table.column("offsets")
        states = np.frombuffer(self._table.states, np.uint8)
        rows = np.flatnonzero((states == LIVE) & (offsets >= low) & (offsets < high))
        by_offset: Array = rows[np.argsort(offsets[rows])]
        return by_offset

    def _way_around(self, size: int, rows: Array, may_go: Test, rows_max: int = 0) -> Way | None:
        """A stretch to evict around the coldest of some rows."""
        coldest = rows[np.argsort(self._policy.worth(rows), kind="stable")[:ANCHORS_MAX]].tolist()
        return self._stretches.to_evict(size, coldest, may_go, rows_max) if coldest else None

    def _tail_rows(self) -> set[int]:
        """Rows of the blocks among the entries that were stored last, of a quarter of the store at most."""
        latest = [*self._tails][-1 - self._tenants.total_entries // 4 :]
        return {self._table.row_of(span_id) for span_id in latest if span_id}

    def _evictable(
        self,
        owners: Collection[int] | None,
        *,
        leaves: bool = True,
        survey: Survey | None = None,
        spared: AbstractSet[int] = frozenset(),
    ) -> Test:
        """The test which entries are evictable now, as far as is known; if not `leaves`, with their descendants. Blocks
        that were just stored are not. With a survey they are, but for the spared ones, and pages that the system has
        are in nobody's way."""
        table = self._table
        states = np.frombuffer(table.states, np.uint8)
        children, owner_of = table.column("children"), table.column("owners")
        kept = np.array(
            sorted(self._spans.in_use() | (self._tail_rows() if survey is None else survey.kept | spared)), np.int64
        )

        def test(rows: Array) -> Array:
            may: Array = states[rows] == LIVE
            if leaves:
                may &= children[rows] == 0
            if owners is not None:
                may &= np.isin(owner_of[rows], [*owners])
            if len(kept):
                may &= kept[np.minimum(np.searchsorted(kept, rows), len(kept) - 1)] != rows
            return may if survey is None else may | (states[rows] == WITHDRAWN)

        return test


def _is_cheap(window: Way | None, most: float) -> bool:
    """Whether at most this worth goes with a stretch, and no new entries."""
    return window is not None and window.price[0] == 0 and window.price[1] <= most

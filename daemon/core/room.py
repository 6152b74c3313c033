"""What must go so that a put fits: chosen by the policy, without touching anything.

Knows the budgets, the ring's holes, the index's buckets, and what must stay: spans being filled, spans pinned by
message, and spans that the last scan found pinned. That last set is a hint only (whether a victim may be reused is
decided by a scan after it was unpublished), but one that keeps entries in use from flickering. What comes before any of
these in a cached sequence must stay too, and what follows a victim goes with it.

Invariants: nothing is chosen unless, by what is known, it makes the put fit, in this round or in the next ones; so a
put that cannot fit costs nobody an entry. A round looks at a bounded number of entries. What must stay is walked only
when the quick way fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from ...shm.allocator import Window
from .clearing import Clearing
from .coldest import LOOKS_MAX, Coldest
from .entries import EntryState, SpanEntry
from .holdings import Capacity, Holding
from .moving import Moving
from .pins import Pins
from .span_table import SpanTable
from .survey import SURVEYED_MAX, Survey
from .windows import ANCHORS_MAX, Prices, Windows

VICTIMS_MAX: Final = 96
BATCH_BYTES_MAX: Final = 64 << 20
BATCH_SHARE: Final = 64
BATCH_ENTRIES_MAX: Final = 64
PLANS_MAX: Final = 32
"""Rounds in which entries move for one put, or colder ones go so that they can."""
SPARE_SHARE: Final = 50
"""Rather than something warm, the coldest go as well, until a put's bytes and a half and this part of the ring are
free."""
SPARE_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Need:
    """What a put takes. An empty need (no key) stands for bringing the store back under its budgets."""

    key: bytes | None = None
    span_bytes: int = 0
    tokens: int = 0
    uid: int = 0

    @property
    def entries(self) -> int:
        return 0 if self.key is None else 1


@dataclass(slots=True)
class Cursor:
    """How far the search for one need has come, from round to round.

    `window_at` is where a window that takes several rounds was begun, `skip` how many of the coldest entries that may
    go were looked at in vain, `plans` how often entries were to move, `exchanged` whether pages were to be exchanged
    once, `fresh` whether what is pinned was looked at since the search began.
    """

    window_at: int | None = None
    skip: int = 0
    exchanged: bool = False
    fresh: bool = False
    plans: int = 0


@dataclass(slots=True)
class Choice:
    """Victims with the reason for each, and entries that are to move, each to the hole that is there then. `looking`:
    none among those looked at; ask again.

    `exchange`: with no victims, a stretch [low, high) of the ring in which only withdrawn extents are in the way.
    """

    victims: dict[SpanEntry, str] = field(default_factory=dict)
    moves: list[tuple[SpanEntry, int]] = field(default_factory=list)
    looking: bool = False
    exchange: tuple[int, int] | None = None


class Room:
    """Chooses victims in `memory`."""

    def __init__(self, memory: SpanTable, pins: Pins) -> None:
        self._memory = memory
        self._pins = pins
        self._kept: set[SpanEntry] = set()
        self._kept_for: tuple[AbstractSet[int], int] | None = None
        self._awaited: set[SpanEntry] = set()
        self._awaited_for = -1
        self._survey: Survey | None = None
        self._surveyed_for: tuple[AbstractSet[int], int] | None = None
        self._coldest = Coldest(memory, pins, self.may_go)

    @property
    def more(self) -> bool:
        """Whether entries may go that were not looked at."""
        return self._coldest.more

    def choose(self, need: Need, cursor: Cursor) -> Choice:
        """The next victims; none where nothing that may go would help.

        Where uids compete, victims are of those that give way (`holdings`). Only a uid that is within its share, when
        nothing of these may go, gets room from others within theirs.
        """
        self._coldest.begin()
        owners = self.gives_way(need)
        choice = self._choose(need, cursor, owners)
        found = choice.victims or choice.moves or choice.looking or choice.exchange is not None
        if found or owners is None or need.uid in owners or not cursor.fresh:
            return choice
        return self._choose(need, cursor, None)

    def gives_way(self, need: Need) -> frozenset[int] | None:
        """The uids from which room is made for the need; None: from all."""
        if need.key is None:
            return None
        budget = self._memory.budget
        capacity = Capacity(max(1, budget.put_bytes_max), budget.max_entries, budget.max_tokens)
        more = Holding(need.span_bytes, need.entries, need.tokens)
        return self._memory.holdings.gives_way(need.uid, more, capacity)

    def _choose(self, need: Need, cursor: Cursor, owners: frozenset[int] | None) -> Choice:
        choice = Choice()
        exchange: tuple[int, int] | None = None
        if need.key is not None:
            ring = self._memory.ring
            if ring.largest_free_bytes < need.span_bytes:
                gathered = self._gathered(need, cursor, owners)
                if gathered is not None:
                    return gathered
                window = self._spanless(need, cursor) or self._window(need, cursor.window_at, owners)
                if window is None and owners is None:
                    if not self.surveyed():
                        return Choice(looking=True)
                    window = self._window_between_pins(need)
                if window is None:
                    return choice
                choice.victims = self._with_children({self._memory.at(o): "capacity" for o in window.spans})
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
        if exchange is not None and not choice.victims and not choice.looking:
            within = not self._memory.over_budget(need.entries, need.span_bytes, need.tokens)
            choice.exchange = exchange if within else None
            cursor.exchanged |= within
        return choice

    def clear(self, want_bytes: int, reason: str, cursor: Cursor) -> Choice:
        """Entries whose end frees whole pages, `want_bytes` of them and little more, coldest first."""
        memory = self._memory
        self._coldest.begin()
        clearing = Clearing(
            memory.ring,
            lambda o: memory.at(o).child_count == 0 and self.may_go(memory.at(o)),
            lambda o: memory.policy.rank(memory.at(o).number),
            VICTIMS_MAX,
        )
        seen = 0
        for entry in self._coldest.walk(cursor.skip):
            left_bytes = want_bytes - clearing.freed_bytes
            if left_bytes <= 0 or len(clearing.spans) >= VICTIMS_MAX:
                break
            clearing.add(entry.offset, left_bytes)
            seen += 1
        cursor.skip = 0 if clearing.spans else cursor.skip + seen
        return Choice(self._with_children({memory.at(offset): reason for offset in clearing.spans}))

    def surveyed(self) -> bool:
        """Goes on looking at what must stay. True once that is done, and `obstacle` may be asked; else ask again."""
        if self._is_soon_surveyed:
            return True
        now_for = self._memory.last_pinned, self._pins.changes
        known_for = self._surveyed_for
        is_fresh = known_for is not None and known_for[0] is now_for[0] and known_for[1] == now_for[1]
        if self._survey is None or (self._survey.done and not is_fresh):
            self._survey, self._surveyed_for = self._begin_survey(), now_for
        # Once it is done it serves, be it old by then: pins come and go all the time.
        self._survey.go_on()
        return self._survey.done

    @property
    def knows(self) -> bool:
        """Whether `obstacle` may be asked, though what it goes by may be old."""
        return self._is_soon_surveyed or (self._survey is not None and self._survey.done)

    def obstacle(self, need: Need) -> str | None:
        """What keeps a put out even if everything goes that may, by name; None where nothing does, or nothing is known
        yet (`surveyed`)."""
        memory = self._memory
        budget = memory.budget
        survey = self._stays()
        if survey is None:
            return None
        filling = [*memory.filling]
        if survey.entries + len(filling) + need.entries > budget.max_entries:
            return "max_entries"
        stays_bytes = survey.size_bytes + memory.filling_bytes
        if stays_bytes + need.span_bytes > budget.max_bytes:
            return "max_bytes"
        if need.key is not None and stays_bytes + need.span_bytes > budget.put_bytes_max:
            return "resident_bytes_max"
        tokens = survey.tokens + sum(entry.tokens for entry in filling)
        if budget.max_tokens is not None and tokens + need.tokens > budget.max_tokens:
            return "max_tokens"
        if need.key is not None:
            if not len(survey.gaps(need.span_bytes, filling)[0]):
                return "ring"
            if not any(entry is None or not self._must_stay(entry) for entry in self._bucket(need.key)):
                return "index bucket"
        return None

    def staying_bytes(self) -> int:
        """Bytes of what must stay, by what is known."""
        survey = self._stays()
        return self._memory.filling_bytes + (survey.size_bytes if survey is not None else 0)

    def _must_stay(self, entry: SpanEntry) -> bool:
        if entry.state is EntryState.FILLING or entry.span_id in self._memory.last_pinned:
            return True
        if entry.state is not EntryState.LIVE:
            return False
        if self._pins.holds(entry.span_id):
            return True
        return entry.prefix_bytes > 0 and (entry in self._awaited_pieces() or entry in self._kept_pieces())

    def may_go(self, entry: SpanEntry) -> bool:
        """Whether the entry is published, and by what is known nobody holds it, nor anything that follows it."""
        return entry.state is EntryState.LIVE and not self._must_stay(entry)

    def leaves_first(
        self, wanted: Iterable[SpanEntry], test: Callable[[SpanEntry], bool], most: int
    ) -> list[SpanEntry]:
        """Those of `wanted` that pass `test`, as does all that follows them, in the order in which they may be hidden;
        what follows them is among them. No more than `most`, and of trees that are large, perhaps a part of the leaves.
        """
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

    def _with_children(self, victims: dict[SpanEntry, str]) -> dict[SpanEntry, str]:
        """The victims in the order in which they may be hidden, with all that follows them. No more than VICTIMS_MAX:
        then some of what was to go is left for the next round.
        """
        if not any(entry.child_count for entry in victims):
            return victims
        whole: dict[SpanEntry, str] = {}
        for entry, reason in victims.items():
            for each in self._memory.sequences.leaves_first(entry, whole):
                if len(whole) >= VICTIMS_MAX:
                    return whole
                whole[each] = reason
        return whole

    def _kept_pieces(self) -> set[SpanEntry]:
        """The pieces of sequences that come before something that is pinned."""
        memory = self._memory
        kept_for = (memory.last_pinned, self._pins.changes)
        if kept_for != self._kept_for:
            pinned = map(memory.span, (*memory.last_pinned, *self._pins.spans()))
            self._kept = memory.sequences.before(pinned)
        # The very set, also where it is an equal one: comparing it with itself costs nothing.
        self._kept_for = kept_for
        return self._kept

    def _awaited_pieces(self) -> set[SpanEntry]:
        """The pieces that something is to follow which is on its way, and what comes before them."""
        sequences = self._memory.sequences
        if sequences.changes != self._awaited_for:
            awaited = {entry for entry in map(self._memory.entries.find, sequences.followed) if entry is not None}
            self._awaited, self._awaited_for = awaited | sequences.before(awaited), sequences.changes
        return self._awaited

    @property
    def _is_soon_surveyed(self) -> bool:
        """Whether what must stay is so little that it is looked at whenever it is asked for."""
        return len(self._memory.last_pinned) + len(self._pins) <= SURVEYED_MAX

    def _stays(self) -> Survey | None:
        """What must stay, puts in flight excepted; None where that is not known yet."""
        if not self._is_soon_surveyed:
            return self._survey if self.knows else None
        survey = self._begin_survey()
        while not survey.done:
            survey.go_on()
        return survey

    def _begin_survey(self) -> Survey:
        """Walks pins and the sequences that lead to them, not entries."""
        memory, pinned, pins = self._memory, self._memory.last_pinned, self._pins
        besides = (number for number in list(pins.spans()) if number not in pinned)
        pieces = (each for each in self._awaited_pieces() | self._kept_pieces() if not self._is_pinned(each))
        spans = chain(map(memory.span, chain(pinned, besides)), pieces)
        return Survey(spans, self._must_stay, memory.ring.capacity_bytes)

    def _is_pinned(self, entry: SpanEntry) -> bool:
        return entry.span_id in self._memory.last_pinned or self._pins.holds(entry.span_id)

    def _spanless(self, need: Need, cursor: Cursor) -> Window | None:
        """A window in which nothing but withdrawn pages is in the way, for a put within the budgets: exchanging pages
        costs nobody an entry. Once in an attempt: what it takes may not be to be had."""
        if cursor.exchanged or self._memory.over_budget(need.entries, need.span_bytes, need.tokens):
            return None
        return self._memory.ring.widest_withdrawn(need.span_bytes)

    def _gathered(self, need: Need, cursor: Cursor, owners: frozenset[int] | None) -> Choice | None:
        """First the coldest go until enough is free, then what stands in the way moves together; None where that is not
        the way: for pieces of sequences, which do not move, while pages are withdrawn, and after PLANS_MAX rounds."""
        memory, ring = self._memory, self._memory.ring
        coldest = next(self._coldest.walk(owners=owners), None)
        if coldest is None or coldest.prefix_bytes or ring.withdrawn_count or cursor.plans >= PLANS_MAX:
            return None
        if ring.free_bytes < need.span_bytes:
            if self.knows and self.obstacle(need) is not None:
                return None
            choice = self._meet_budgets(need, Choice(), cursor, owners)
            choice.victims = self._with_children(choice.victims)
            return choice if choice.victims else None
        if not cursor.fresh:
            # What is held does not move: a scan tells.
            return Choice()
        cursor.plans += 1
        prices = Prices(memory)
        # The coldest is asked for first.
        prices.of(coldest)
        plan = Moving(memory, prices, self.may_go, self._of(owners)).best(need.span_bytes)
        if plan is None or not plan.moves:
            # No move helps. Windows choose as well, and let more go at once, so that one scan serves many puts.
            return None
        spare_bytes = (need.span_bytes >> 1) + ring.capacity_bytes // SPARE_SHARE
        if plan.victims and ring.free_bytes < need.span_bytes + spare_bytes:
            spare = self._coldest_bytes(max(entry.span_bytes for entry in plan.victims) // SPARE_STEPS, owners)
            if prices.total(spare) < plan.lost:
                return Choice(self._with_children(dict.fromkeys(spare, "capacity")))
        return Choice(dict.fromkeys(plan.victims, "capacity"), plan.moves)

    def _coldest_bytes(self, size_bytes: int, owners: frozenset[int] | None) -> list[SpanEntry]:
        """The coldest, so many that they have as many bytes."""
        found = []
        for entry in islice(self._coldest.walk(owners=owners), VICTIMS_MAX):
            found.append(entry)
            size_bytes -= entry.span_bytes
            if size_bytes <= 0:
                break
        return found

    def _window(self, need: Need, window_at: int | None, owners: frozenset[int] | None) -> Window | None:
        ring = self._memory.ring
        windows = Windows(self._memory, need.span_bytes, self._of(owners), VICTIMS_MAX)
        window = None
        if window_at is not None and ring.is_free(window_at):
            window = windows.around(window_at, through=True)
        return (
            window
            or windows.cheapest(self._coldest.walk(owners=owners))
            or ring.widest_withdrawn(need.span_bytes)
            or (None if owners is None else self._window_of(need, windows, owners))
        )

    def _of(self, owners: frozenset[int] | None) -> Callable[[SpanEntry], bool]:
        """Whether an entry may go, and is of one of the owners."""
        if owners is None:
            return self.may_go
        return lambda entry: entry.owner_uid in owners and self.may_go(entry)

    def _window_of(self, need: Need, windows: Windows, owners: frozenset[int]) -> Window | None:
        """A window of the owners' entries, which may take several rounds: it looks further than one round goes."""
        wide = Windows(self._memory, need.span_bytes, self._of(owners), LOOKS_MAX)
        for entry in islice(self._coldest.walk(owners=owners), ANCHORS_MAX):
            found = wide.around(entry.offset, through=True)
            if found is not None and (found.enough or len(found.spans) >= LOOKS_MAX):
                return windows.around(entry.offset, through=True)
        return None

    def _window_between_pins(self, need: Need) -> Window | None:
        """The window around the coldest entry where there is room enough between what stays."""
        survey = self._stays()
        if survey is None or self.obstacle(need) is not None:
            return None
        windows = Windows(self._memory, need.span_bytes, self.may_go, VICTIMS_MAX)
        lows, highs = survey.gaps(need.span_bytes, [*self._memory.filling, *self._memory.unpublished()])
        if not len(lows):
            return None
        for entry in self._coldest.walk():
            at = int(lows.searchsorted(entry.offset, "right")) - 1
            if at >= 0 and entry.offset < highs[at]:
                return windows.around(entry.offset, through=True)
        # Whatever stands in the widest gap is warm; but it is all there is.
        return windows.around(int(lows[(highs - lows).argmax()]), through=True)

    def _bucket(self, key: bytes) -> list[SpanEntry | None]:
        """What stands where `key` may stand."""
        index = self._memory.index
        return [self._memory.span(index.read(slot).span_id) for slot in index.slots_for(key)]

    def _bucket_has_room(self, key: bytes, choice: Choice) -> bool:
        return any(entry is None or entry in choice.victims for entry in self._bucket(key))

    def _coldest_of_bucket(self, key: bytes, owners: frozenset[int] | None) -> SpanEntry | None:
        test = self._of(owners)
        may_go = [entry for entry in self._bucket(key) if entry is not None and test(entry)]
        rank = self._memory.policy.rank
        return min(may_go, key=lambda entry: (entry.child_count > 0, rank(entry.number)), default=None)

    def _meet_budgets(self, need: Need, choice: Choice, cursor: Cursor, owners: frozenset[int] | None) -> Choice:
        """Adds the coldest until the budgets hold, and a few more, so that one scan serves many."""
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
        if not self.surveyed():
            return Choice(looking=True)
        if self.obstacle(need) is not None:
            return Choice()
        if not victims and self.more:
            return Choice(looking=True)
        return choice

    def _wanted(self, need: Need, choice: Choice) -> tuple[dict[str, int], dict[str, int]]:
        """What the need is over budget by, and what to free in view of the puts to come."""
        memory, budget, victims = self._memory, self._memory.budget, choice.victims
        gone_bytes = sum(entry.span_bytes for entry in victims)
        bytes_max = budget.max_bytes if need.key is None else budget.put_bytes_max
        over = {
            "entries": memory.taken_entries + need.entries - budget.max_entries - len(victims),
            "tokens": 0,
            "capacity": memory.ring.used_bytes + need.span_bytes - bytes_max - gone_bytes,
        }
        if budget.max_tokens is not None:
            gone_tokens = sum(entry.tokens for entry in victims)
            over["tokens"] = memory.taken_tokens + need.tokens - budget.max_tokens - gone_tokens
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

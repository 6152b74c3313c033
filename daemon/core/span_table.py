"""The ring and the index as one: every span, the state it is in, and the order in which it may be reused.

    place → FILLING → publish → LIVE → hide → VICTIM ─ scan: unpinned → free
                 │               │      ↑_______________│ scan: pinned → republish
                 │ discard       └ retire → RETIRED ─ scan: unpinned → free; pinned → waits for the next scan
                 ↓                            ↑
               free             begin_move → copied → end_move: the entry has the copy, the span it had is RETIRED

Owns the ring's map, the index, the entries, and what waits for a scan. Says of every change of an entry to
`eviction_order`, which tells the policy what may go. Knows nothing of clients, time limits or how much room is needed.

Invariants:
- a span that was ever published is freed only if a scan that *began after it was unpublished* did not find it pinned;
- one scan at a time: what is unpublished while it runs waits for the next;
- a span is in exactly one state, its slot holds its id until it is freed, its bytes are taken until then;
- no two spans have the same id: a new span skips the ids of damaged slots that a former daemon left;
- a copy of an entry's bytes is published before the span that the entry had is unpublished, and only while the entry is
  published: a daemon killed at any moment leaves one of the two, or both alike;
- a key has at most one entry: a victim whose key is stored anew meanwhile is retired before;
- of a cached sequence, no block is published or hidden whose parent was freed as a victim, and none is republished
  whose parent is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ...shm.layout import SPAN_COUNTER_MASK, span_bytes, span_id
from ...shm.prefix import PrefixRecord
from ..policy.replacement import Replacement
from .budget import RingBudget
from .entries import EntryState, EntryTable, SpanEntry
from .eviction_order import EvictionOrder
from .holdings import Holding, Holdings
from .sequences import Sequences

SCAN_SPANS_MAX: Final = 96
"""Spans that one scan decides about, so that carrying its outcome out stays a matter of 2 or 3 ms."""


@dataclass(slots=True)
class Outcome:
    """What a scan decided: `victims` were freed as such, `republished` ones came back."""

    victims: list[SpanEntry] = field(default_factory=list)
    freed: list[SpanEntry] = field(default_factory=list)
    republished: list[SpanEntry] = field(default_factory=list)
    kept: int = 0


@dataclass(frozen=True, slots=True)
class PendingMove:
    """An entry's bytes are being copied to another span: from that of `source` to that of `copy`, which stands for the
    span alone and is nobody's entry."""

    source: SpanEntry
    copy: SpanEntry


class SpanTable:
    """All spans of one ring."""

    def __init__(
        self,
        index: IndexWriter,
        ring: SpanAllocator,
        policy: Replacement,
        sequences: Sequences,
        budget: RingBudget,
        epoch: int,
    ) -> None:
        self.index = index
        self.ring = ring
        self.policy = policy
        self.sequences = sequences
        self.budget = budget
        self.entries = EntryTable()
        self.order = EvictionOrder(policy, self.entries)
        self.last_pinned: AbstractSet[int] = frozenset()
        self.evicted_while_pinned = 0
        self.taken_entries = 0
        self.taken_tokens = 0
        self.retired_bytes = 0
        self.holdings = Holdings()
        self._epoch = epoch
        self._spans_made = 0
        self._spans: dict[int, SpanEntry] = {}
        self._by_offset: dict[int, SpanEntry] = {}
        self._filling: dict[int, SpanEntry] = {}
        self._fresh: dict[int, SpanEntry] = {}
        self._held: dict[int, SpanEntry] = {}
        self._scanning: dict[int, SpanEntry] | None = None
        self._moves: dict[int, PendingMove] = {}

    @property
    def filling(self) -> Iterable[SpanEntry]:
        """Spans being filled."""
        return self._filling.values()

    @property
    def filling_bytes(self) -> int:
        return sum(entry.span_bytes for entry in self._filling.values())

    @property
    def scan_in_flight(self) -> bool:
        return self._scanning is not None

    @property
    def scan_due(self) -> bool:
        """Whether something was unpublished that no scan has looked at yet."""
        return bool(self._fresh)

    @property
    def holds_back(self) -> bool:
        """Whether retired spans were found pinned when last looked at."""
        return bool(self._held)

    @property
    def may_yet_free(self) -> bool:
        """Whether the next scan may free a retired span, by what the last one saw."""
        return bool(self._fresh) or any(number not in self.last_pinned for number in self._held)

    @property
    def next_span_id(self) -> int:
        """The id of the span that is taken next."""
        counter = self._spans_made + 1
        while (number := span_id(self._epoch, counter)) in self._spans:
            counter += 1
        return number

    def unpublished(self) -> Iterable[SpanEntry]:
        """Victims and retired spans."""
        yield from self._fresh.values()
        yield from self._held.values()
        if self._scanning is not None:
            yield from self._scanning.values()
        for move in self._moves.values():
            yield move.copy

    @property
    def moving(self) -> bool:
        """Whether entries are being copied to other places."""
        return bool(self._moves)

    def at(self, offset: int) -> SpanEntry:
        """The span at a ring offset."""
        return self._by_offset[offset]

    def span(self, span_id: int) -> SpanEntry | None:
        """An allocated span, in whatever state."""
        return self._spans.get(span_id)

    def stored(self, span_id: int) -> SpanEntry | None:
        """The entry, published or hidden, that has the span."""
        entry = self._spans.get(span_id)
        return entry if entry is not None and entry.state in (EntryState.LIVE, EntryState.VICTIM) else None

    def over_budget(self, entries: int = 0, size_bytes: int = 0, tokens: int = 0) -> bool:
        """Whether the budgets would be passed with so much more taken, or are passed as it is."""
        budget = self.budget
        return (
            self.taken_entries + entries > budget.max_entries
            or self.ring.used_bytes + size_bytes > (budget.put_bytes_max if size_bytes else budget.max_bytes)
            or (budget.max_tokens is not None and self.taken_tokens + tokens > budget.max_tokens)
        )

    def place(
        self, key: bytes, payload_bytes: int, tree_bytes: int, tokens: int, uid: int, now: float
    ) -> SpanEntry | None:
        """Takes a span and a slot for a payload that is on its way, within the budgets.

        Returns:
            The entry, or None where something must go first; then nothing was changed.
        """
        size = span_bytes(payload_bytes)
        if self.over_budget(entries=1, size_bytes=size, tokens=tokens):
            return None
        offset = self.ring.allocate(size)
        if offset is None:
            return None
        number = self.next_span_id
        slot = self.index.reserve(key, number, offset, tree_bytes, payload_bytes)
        if slot is None:
            self.ring.free(offset)
            return None
        self._spans_made = number & SPAN_COUNTER_MASK
        entry = SpanEntry(key, number, slot, offset, size, payload_bytes, tree_bytes, tokens, uid, now)
        self._filling[number] = entry
        self._spans[number] = self._by_offset[offset] = entry
        self.taken_entries += 1
        self.taken_tokens += tokens
        self.holdings.add(uid, size, 1, tokens)
        return entry

    def discard(self, entry: SpanEntry) -> None:
        """Frees a span that was never published: no reader can have pinned it, so no scan is needed."""
        del self._filling[entry.span_id]
        self.taken_entries -= 1
        self.taken_tokens -= entry.tokens
        self.holdings.add(entry.owner_uid, 0, -1, -entry.tokens)
        self._free(entry)

    def publish(
        self, entry: SpanEntry, now: float, record: PrefixRecord | None = None, parent: SpanEntry | None = None
    ) -> None:
        """Shows a filled span to readers; with `record`, as what follows the published `parent` in a cached sequence.

        Raises:
            BadPrefix, ParentGone: as `Sequences.begin`; then nothing was changed.
        """
        if record is not None:
            self.sequences.begin(entry, record, parent)
        del self._filling[entry.span_id]
        self.index.publish(entry.slot)
        self._begin(entry, now)

    def hide(self, victims: Iterable[tuple[SpanEntry, str]]) -> None:
        """Unpublishes entries that may go and that nobody pins, each for its reason: children before their parents."""
        for entry, reason in victims:
            self.index.unpublish(entry.slot)
            self.entries.hide(entry)
            self.sequences.hidden(entry)
            entry.reason = reason
            self._fresh[entry.span_id] = entry
            self.order.tell(entry)

    def retire(self, entry: SpanEntry, reason: str) -> None:
        """The entry goes whether pinned or not; its span as soon as it is unpinned."""
        if entry.state is EntryState.LIVE:
            self.index.unpublish(entry.slot)
            self._fresh[entry.span_id] = entry
        entry.reason = reason
        self._leave(entry)
        self.retired_bytes += entry.span_bytes

    def begin_move(self, entry: SpanEntry, offset: int) -> PendingMove | None:
        """Takes a span in the hole at `offset`, and a slot, for a copy of a published entry that is no block of a
        sequence. Until `end_move`, scans take the span it has for pinned.

        Returns:
            None where there is no such hole or slot; then nothing was changed.
        """
        assert entry.state is EntryState.LIVE and not entry.prefix_bytes, entry
        if not self.ring.take_hole(offset, entry.span_bytes):
            return None
        number = self.next_span_id
        slot = self.index.reserve(entry.key, number, offset, entry.tree_bytes, entry.payload_bytes)
        if slot is None:
            self.ring.free(offset)
            return None
        self._spans_made = number & SPAN_COUNTER_MASK
        copy = replace(
            entry,
            span_id=number,
            slot=slot,
            offset=offset,
            tokens=0,
            state=EntryState.RETIRED,
            reason="moved",
            may_go=False,
            set_aside=False,
        )
        self._spans[number] = self._by_offset[offset] = copy
        self.retired_bytes += copy.span_bytes
        self.holdings.add(copy.owner_uid, copy.span_bytes)
        self._moves[number] = PendingMove(entry, copy)
        return self._moves[number]

    def end_move(self, number: int, *, copied: bool) -> SpanEntry | None:
        """The copy with that span id is whole, header and all, unless `copied` says that it failed.

        Returns:
            The entry, if it has that span from now on; the one that it had waits for a scan. None where the entry went
            meanwhile, or is about to: the copy is free again, which nobody has seen.
        """
        move = self._moves.pop(number)
        entry, copy = move.source, move.copy
        if not copied or entry.state is not EntryState.LIVE or self.index.generations.is_past(entry.key):
            self.retired_bytes -= copy.span_bytes
            self._free(copy)
            return None
        self.index.move(entry.slot, copy.slot)
        for name in ("span_id", "slot", "offset"):
            mine, other = getattr(entry, name), getattr(copy, name)
            setattr(entry, name, other)
            setattr(copy, name, mine)
        for each in (entry, copy):
            self._spans[each.span_id] = self._by_offset[each.offset] = each
        self._fresh[copy.span_id] = copy
        return entry

    def begin_scan(self) -> None:
        """Fixes what the next scan decides about. Whatever is unpublished from now on waits for the one after it."""
        assert self._scanning is None, "a scan is in flight"
        self._scanning = {}
        for table in (self._fresh, self._held):
            for number in list(islice(table, SCAN_SPANS_MAX)):
                self._scanning[number] = table.pop(number)

    def scanned(self, pinned: AbstractSet[int], now: float, spares: Callable[[SpanEntry], bool]) -> Outcome:
        """Carries out what a scan found. Victims that `spares` names are republished though nobody pins them, and with
        each that comes back whatever it follows. What follows another was hidden before it, and is decided before it.
        """
        assert self._scanning is not None, "no scan was asked for"
        scanning, self._scanning = self._scanning, None
        if self._moves:
            pinned = pinned | {move.source.span_id for move in self._moves.values()}
        self.last_pinned = pinned
        outcome = Outcome()
        for number, entry in scanning.items():
            if entry.state is EntryState.LIVE:
                # What follows it came back.
                continue
            if entry.state is EntryState.VICTIM:
                if number in pinned or spares(entry):
                    before = self.sequences.lineage(entry)
                    if before is not None:
                        for each in (*reversed(before), entry):
                            self._republish(each, now, used=number in pinned)
                            outcome.republished.append(each)
                        continue
                    # What it follows was ended meanwhile, and so is it.
                assert entry.newest_child is None, "freed before what follows it"
                self._leave(entry)
                self.retired_bytes += entry.span_bytes
                outcome.victims.append(entry)
            if number in pinned:
                self._held[number] = entry
                outcome.kept += 1
            else:
                self.evicted_while_pinned += number in self.last_pinned
                self.retired_bytes -= entry.span_bytes
                self._free(entry)
                outcome.freed.append(entry)
        return outcome

    def victims_in_scan(self) -> list[SpanEntry]:
        """The victims that the scan in flight decides about."""
        return [e for e in (self._scanning or {}).values() if e.state is EntryState.VICTIM]

    def adopt(self, entry: SpanEntry, now: float) -> bool:
        """Takes over a span of a former daemon, as one that waits for a scan.

        Returns:
            False where its bytes are not free or another span has its id (the index was damaged): its slot is given up.
        """
        published = self.index.read(entry.slot).published
        if entry.span_id in self._spans or not self.ring.take(entry.offset, entry.span_bytes):
            if published:
                self.index.unpublish(entry.slot)
            self.index.release(entry.slot)
            return False
        self._spans[entry.span_id] = self._by_offset[entry.offset] = entry
        entry.state = EntryState.RETIRED
        entry.reason = "recovered"
        self._fresh[entry.span_id] = entry
        self.retired_bytes += entry.span_bytes
        self.holdings.add(entry.owner_uid, entry.span_bytes)
        return True

    def readopt(self, entry: SpanEntry, now: float, record: PrefixRecord | None = None) -> bool:
        """Makes an adopted span whose slot is published an entry; with `record`, of a cached sequence.

        Returns:
            False where its key is stored already, or what it follows is not: it is unpublished, and goes on waiting for
            a scan.
        """
        parent = self.entries.find(record.parent) if record is not None and record.parent is not None else None
        is_orphan = record is not None and record.parent is not None and parent is None
        if is_orphan or self.entries.find(entry.key) is not None:
            self.index.unpublish(entry.slot)
            return False
        if record is not None:
            self.sequences.found(entry, record, parent)
        del self._fresh[entry.span_id]
        self.retired_bytes -= entry.span_bytes
        entry.reason = ""
        self.taken_entries += 1
        self.taken_tokens += entry.tokens
        self.holdings.add(entry.owner_uid, 0, 1, entry.tokens)
        self._begin(entry, now)
        return True

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self.index.check_invariants()
        self.ring.check_invariants()
        self.entries.check_invariants()
        self.sequences.check_invariants(list(self.entries))
        waiting = {entry.span_id: entry for entry in self.unpublished()}
        stored = {entry.span_id: entry for entry in self.entries}
        spans = self._filling | stored | waiting
        assert self._spans == spans
        assert self._by_offset == {e.offset: e for e in spans.values()}
        slots = {slot.number: slot for slot in self.index.slots()}
        assert {entry.slot for entry in spans.values()} == slots.keys()
        for number, entry in spans.items():
            slot = slots[entry.slot]
            assert (slot.span_id, slot.key, slot.offset) == (number, entry.key, entry.offset)
            assert self.ring.size_at(entry.offset) == entry.span_bytes
            assert slot.published == (entry.state is EntryState.LIVE)
            assert (number in waiting) == (entry.state in (EntryState.VICTIM, EntryState.RETIRED))
            assert (number in self._filling) == (entry.state is EntryState.FILLING)
            assert (number in stored) == (entry.state in (EntryState.LIVE, EntryState.VICTIM))
        assert self.ring.span_count == len(spans)
        counted = [e for e in spans.values() if e.state is not EntryState.RETIRED]
        assert self.taken_entries == len(counted)
        assert self.taken_tokens == sum(e.tokens for e in counted)
        retired = [e for e in spans.values() if e.state is EntryState.RETIRED]
        assert self.retired_bytes == sum(e.span_bytes for e in retired)
        holdings: dict[int, Holding] = {}
        for entry in spans.values():
            of = holdings.setdefault(entry.owner_uid, Holding())
            of.size_bytes += entry.span_bytes
            of.entries += entry.state is not EntryState.RETIRED
            of.tokens += entry.tokens if entry.state is not EntryState.RETIRED else 0
        self.holdings.check_invariants(holdings)
        self.order.check_invariants(stored.values())
        assert not any(e.may_go for number, e in spans.items() if number not in stored)
        assert self.evicted_while_pinned == 0

    def _republish(self, entry: SpanEntry, now: float, *, used: bool) -> None:
        self._fresh.pop(entry.span_id, None)
        self.index.publish(entry.slot)
        self.entries.show(entry)
        self.sequences.shown(entry)
        self.order.tell(entry)
        entry.reason = ""
        if used:
            self.policy.accessed(entry.number, now)

    def _leave(self, entry: SpanEntry) -> None:
        """The entry is stored no more: it no longer counts against the budgets of entries and tokens."""
        evicted = entry.state is EntryState.VICTIM
        entry.worth = self.policy.worth(entry.number)
        self.entries.remove(entry)
        self.order.take_back(entry)
        self.sequences.left(entry, published=not evicted)
        self.order.tell(entry)
        self.policy.removed(entry.number, evicted=evicted)
        self.taken_entries -= 1
        self.taken_tokens -= entry.tokens
        self.holdings.add(entry.owner_uid, 0, -1, -entry.tokens)

    def _begin(self, entry: SpanEntry, now: float) -> None:
        """It is stored from now on."""
        self.entries.add(entry)
        self.order.began(entry, now)

    def _free(self, entry: SpanEntry) -> None:
        self.holdings.add(entry.owner_uid, -entry.span_bytes)
        del self._spans[entry.span_id]
        del self._by_offset[entry.offset]
        self.index.release(entry.slot)
        self.ring.free(entry.offset)

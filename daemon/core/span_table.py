"""The entries of one ring from publication to the end: the state of each span, and the scans that let spans be reused.

    place → FILLING → publish → LIVE → hide → VICTIM ─ scan: unpinned → free
                 │               │      ↑_______________│ scan: pinned → republish
                 │ discard       └ retire → RETIRED ─ scan: unpinned → free; pinned → waits for the next scan
                 ↓                            ↑   ↑
               free     FILLING ─ revoke ─────┘   │    (restore_revoked: back to FILLING)
                                begin_move → copied → end_move: the entry gets the copy, its old span becomes RETIRED

Owns the state of every span, the entries, the spans that wait for a scan, and the moves in progress. Reports each
change of an entry to `eviction_order`, which reports to the policy. Does not own bytes, slots and ids
(`allocated_spans`), clients, time limits, or how much room a put needs.

Invariants:
- A span that was published once, or of which a client was told, is freed only if a scan that *began after the span was
  unpublished or revoked* found no pin on it.
- One scan runs at a time. A span that is unpublished during a scan waits for the next one.
- A span is in exactly one state.
- The copy of a moved entry is published before the entry's old span is unpublished, and only while the entry is
  published. A daemon that is killed at any moment leaves one of the two, or both with equal content.
- A key has at most one entry. A put of a victim's key retires the victim before the new entry is published.
- In a cached sequence, a block is never published or hidden after its parent was freed as a victim. A block is
  republished only if its parent is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ...shm.layout import span_bytes
from ...shm.prefix import PrefixRecord
from ..policy.replacement import Replacement
from .allocated_spans import AllocatedSpans
from .budget import RingBudget
from .entries import EntryState, EntryTable, Outcome, PendingMove, SpanEntry
from .eviction_order import EvictionOrder
from .sequences import Sequences

SCAN_SPANS_MAX: Final = 96
"""Spans that one scan decides about. The limit keeps the processing of its outcome within 2 to 3 ms."""


class SpanTable:
    """The spans of one ring and their states."""

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
        self.spans = AllocatedSpans(index, ring, budget, epoch)
        self.entries = EntryTable()
        self.order = EvictionOrder(policy, self.entries)
        self.last_pinned: AbstractSet[int] = frozenset()
        self.evicted_while_pinned = 0
        self._filling: dict[int, SpanEntry] = {}
        self._fresh: dict[int, SpanEntry] = {}
        self._vacated: dict[int, SpanEntry] = {}
        self._held: dict[int, SpanEntry] = {}
        self._scanning: dict[int, SpanEntry] | None = None
        self._moves: dict[int, PendingMove] = {}

    @property
    def filling(self) -> Iterable[SpanEntry]:
        """Spans that puts are being copied into."""
        return self._filling.values()

    @property
    def filling_bytes(self) -> int:
        return sum(entry.span_bytes for entry in self._filling.values())

    @property
    def scan_in_flight(self) -> bool:
        return self._scanning is not None

    @property
    def scan_due(self) -> bool:
        """Whether an unpublished span waits for its first scan. Spans that entries have moved out of wait for the last
        move in progress, so that one scan serves all of them."""
        return bool(self._fresh) or bool(self._vacated and not self._moves)

    @property
    def has_pinned_retired(self) -> bool:
        """Whether retired spans were pinned, according to the last scan that checked retired spans."""
        return bool(self._held)

    @property
    def next_scan_may_free(self) -> bool:
        """Whether the next scan may free a span, judged by the pins that the last scan found."""
        first = self._fresh or self._vacated
        return bool(first) or any(number not in self.last_pinned for number in self._held)

    def unpublished(self) -> Iterable[SpanEntry]:
        """Victims, retired spans, and the new spans of moves in progress."""
        yield from self._fresh.values()
        yield from self._vacated.values()
        yield from self._held.values()
        if self._scanning is not None:
            yield from self._scanning.values()
        for move in self._moves.values():
            yield move.copy

    @property
    def moving(self) -> bool:
        """Whether a move is in progress."""
        return bool(self._moves)

    def stored(self, span_id: int) -> SpanEntry | None:
        """The entry, published or hidden, that has this span."""
        entry = self.spans.find(span_id)
        return entry if entry is not None and entry.state in (EntryState.LIVE, EntryState.VICTIM) else None

    def place(
        self, key: bytes, payload_bytes: int, tree_bytes: int, tokens: int, uid: int, now: float
    ) -> SpanEntry | None:
        """Takes a span and a slot for a put in flight, within the budgets.

        Returns:
            The entry. None if a budget, the ring or the index has no room; nothing has changed then.
        """
        size = span_bytes(payload_bytes)
        if self.spans.over_budget(entries=1, size_bytes=size, tokens=tokens):
            return None
        reserved = self.spans.reserve(key, size, tree_bytes, payload_bytes)
        if reserved is None:
            return None
        entry = SpanEntry(
            key, reserved.span_id, reserved.slot, reserved.offset, size, payload_bytes, tree_bytes, tokens, uid, now
        )
        self._filling[entry.span_id] = entry
        self.spans.add(entry)
        self.spans.count_entry(entry)
        return entry

    def assign(
        self, entry: SpanEntry, key: bytes, payload_bytes: int, tree_bytes: int, tokens: int, now: float
    ) -> bool:
        """Makes a span that a client has written the span of a put in flight. It gets a slot of the put's key, and
        loses the bytes that the payload does not need.

        Returns:
            False if the index or a budget has no room; nothing has changed then.
        """
        if self.spans.over_budget(tokens=tokens) or not self.spans.rename(entry, key, payload_bytes, tree_bytes):
            return False
        self.spans.uncount_entry(entry)
        entry.tokens, entry.created_at = tokens, now
        self.spans.count_entry(entry)
        return True

    def discard(self, entry: SpanEntry) -> None:
        """Frees a span that was never published and of which no client was told. Nobody can have pinned it, so it needs
        no scan."""
        del self._filling[entry.span_id]
        self.spans.uncount_entry(entry)
        self.spans.free(entry)

    def revoke(self, entry: SpanEntry) -> None:
        """Ends a span that was never published, and that a client may be writing. It is freed once no lane pins it."""
        del self._filling[entry.span_id]
        self.spans.uncount_entry(entry)
        self.index.revoke(entry.slot)
        entry.state, entry.reason = EntryState.RETIRED, "revoked"
        self._fresh[entry.span_id] = entry
        self.spans.retired_bytes += entry.span_bytes

    def is_retired(self, entry: SpanEntry) -> bool:
        """Whether the span waits for a scan that frees it."""
        return entry.state is EntryState.RETIRED and self.spans.find(entry.span_id) is entry

    def restore_revoked(self, entry: SpanEntry) -> None:
        """Makes a revoked span that was not freed one that a client may be writing. Its slot stays revoked."""
        for table in (self._fresh, self._held, self._scanning or {}):
            table.pop(entry.span_id, None)
        entry.state, entry.reason = EntryState.FILLING, ""
        self._filling[entry.span_id] = entry
        self.spans.count_entry(entry)
        self.spans.retired_bytes -= entry.span_bytes

    def publish(
        self, entry: SpanEntry, now: float, record: PrefixRecord | None = None, parent: SpanEntry | None = None
    ) -> None:
        """Publishes a filled span as a child of the published `parent`, if it has one. With `record` it becomes a block
        of a cached sequence.

        Raises:
            BadPrefix, ParentGone: as `Sequences.add`. Nothing has changed then.
        """
        self.sequences.add(entry, record, parent)
        del self._filling[entry.span_id]
        self.index.publish(entry.slot)
        self._begin(entry, now)

    def hide(self, victims: Iterable[tuple[SpanEntry, str]]) -> None:
        """Makes victims of these evictable entries, each for its reason. Children come before their parents."""
        for entry, reason in victims:
            self.index.unpublish(entry.slot)
            self.entries.hide(entry)
            self.sequences.hide(entry)
            entry.reason = reason
            self._fresh[entry.span_id] = entry
            self.order.update_policy(entry)

    def republish(self, entry: SpanEntry, now: float, *, used: bool = False) -> None:
        """Publishes a victim again, after its ancestors. A scan in flight decides about it no more."""
        self._fresh.pop(entry.span_id, None)
        if self._scanning is not None:
            self._scanning.pop(entry.span_id, None)
        self.index.publish(entry.slot)
        self.entries.show(entry)
        self.sequences.show(entry)
        self.order.update_policy(entry)
        entry.reason = ""
        if used:
            self.policy.accessed(entry.number, now)

    def retire(self, entry: SpanEntry, reason: str) -> None:
        """Ends an entry, pinned or not. Its span is freed once no reader pins it."""
        if entry.state is EntryState.LIVE:
            self.index.unpublish(entry.slot)
            self._fresh[entry.span_id] = entry
        entry.reason = reason
        self._leave(entry)
        self.spans.retired_bytes += entry.span_bytes

    def begin_move(self, entry: SpanEntry, offset: int) -> PendingMove | None:
        """Takes the hole at `offset` and a slot for a copy of a published entry, which must not have a record. Until
        `end_move`, scans treat the entry's present span as pinned.

        Returns:
            None without such a hole or a free slot. Nothing has changed then.
        """
        assert entry.state is EntryState.LIVE and not entry.prefix_bytes, entry
        reserved = self.spans.reserve(entry.key, entry.span_bytes, entry.tree_bytes, entry.payload_bytes, offset)
        if reserved is None:
            return None
        copy = entry.copied_to(reserved.span_id, reserved.slot, reserved.offset)
        self.spans.add(copy)
        self.spans.retired_bytes += copy.span_bytes
        move = self._moves[copy.span_id] = PendingMove(entry, copy)
        return move

    def end_move(self, number: int, *, copied: bool) -> SpanEntry | None:
        """Ends the move to the span `number`. `copied`: the copy is complete, header included.

        Returns:
            The entry, which has the new span from now on; its old span waits for a scan. None if copying failed, or
            if the entry ended, was hidden or invalidated meanwhile. Then the new span, never published, is free again.
        """
        move = self._moves.pop(number)
        entry, copy = move.source, move.copy
        if not copied or entry.state is not EntryState.LIVE or self.index.generations.is_past(entry.key):
            self.spans.retired_bytes -= copy.span_bytes
            self.spans.free(copy)
            return None
        self.index.move(entry.slot, copy.slot)
        self.spans.swap(entry, copy)
        self._vacated[copy.span_id] = copy
        return entry

    def begin_scan(self) -> None:
        """Fixes the spans that the scan decides about. Spans unpublished from now on wait for the scan after it."""
        assert self._scanning is None, "a scan is in flight"
        self._scanning = {}
        for table in (self._fresh, self._vacated, self._held):
            for number in list(islice(table, SCAN_SPANS_MAX)):
                self._scanning[number] = table.pop(number)

    def scanned(self, pinned: AbstractSet[int], now: float, spares: Callable[[SpanEntry], bool]) -> Outcome:
        """Processes the outcome of the scan. Pinned victims are republished; so are unpinned victims for which
        `spares` is true. The hidden ancestors of a republished block are republished with it. Children were hidden
        before their parents, so they are decided first.
        """
        assert self._scanning is not None, "no scan was asked for"
        scanning, self._scanning = self._scanning, None
        if self._moves:
            pinned = pinned | {move.source.span_id for move in self._moves.values()}
        self.last_pinned = pinned
        outcome = Outcome()
        for number, entry in scanning.items():
            if entry.state is EntryState.LIVE:
                # It was republished with a descendant.
                continue
            if entry.state is EntryState.VICTIM:
                if number in pinned or spares(entry):
                    before = self.sequences.hidden_ancestors(entry)
                    if before is not None:
                        for each in (*reversed(before), entry):
                            self.republish(each, now, used=number in pinned)
                            outcome.republished.append(each)
                        continue
                    # An ancestor has ended meanwhile, so this block ends too.
                assert entry.newest_child is None, "a block is freed before its children"
                self._leave(entry)
                self.spans.retired_bytes += entry.span_bytes
                outcome.victims.append(entry)
            if number in pinned:
                self._held[number] = entry
                outcome.kept += 1
            else:
                self.evicted_while_pinned += number in self.last_pinned
                self.spans.retired_bytes -= entry.span_bytes
                self.spans.free(entry)
                outcome.freed.append(entry)
        return outcome

    def victims_in_scan(self) -> list[SpanEntry]:
        """The victims that the scan in flight decides about."""
        return [e for e in (self._scanning or {}).values() if e.state is EntryState.VICTIM]

    def adopt(self, entry: SpanEntry, now: float) -> bool:
        """Takes over a span of an earlier daemon as RETIRED; it waits for a scan.

        Returns:
            False if its bytes are not free or another span has its id, since the index was damaged. Its slot is freed.
        """
        published = self.index.read(entry.slot).published
        if not published:
            # A client that was told of the span by the earlier daemon may be about to pin it.
            self.index.revoke(entry.slot)
        if not self.spans.adopt(entry):
            if published:
                self.index.unpublish(entry.slot)
            self.index.release(entry.slot)
            return False
        entry.state = EntryState.RETIRED
        entry.reason = "recovered"
        self._fresh[entry.span_id] = entry
        self.spans.retired_bytes += entry.span_bytes
        return True

    def restore_entry(
        self, entry: SpanEntry, now: float, record: PrefixRecord | None = None, parent_key: bytes | None = None
    ) -> bool:
        """Makes an entry of an adopted span whose slot is published. With `record` it is a block of a cached sequence,
        with `parent_key` it is a child of that entry.

        Returns:
            False if its key is stored already, or its parent is not stored. Then the span is unpublished, and it still
            waits for a scan.
        """
        parent = self.entries.find(parent_key) if parent_key is not None else None
        is_orphan = parent_key is not None and parent is None
        if is_orphan or self.entries.find(entry.key) is not None:
            self.index.unpublish(entry.slot)
            return False
        self.sequences.add_recovered(entry, record, parent)
        del self._fresh[entry.span_id]
        self.spans.retired_bytes -= entry.span_bytes
        entry.reason = ""
        self.spans.count_entry(entry)
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
        self.spans.check_invariants(spans)
        for number, entry in spans.items():
            assert (number in waiting) == (entry.state in (EntryState.VICTIM, EntryState.RETIRED))
            assert (number in self._filling) == (entry.state is EntryState.FILLING)
            assert (number in stored) == (entry.state in (EntryState.LIVE, EntryState.VICTIM))
        self.order.check_invariants(stored.values())
        assert not any(e.may_go for number, e in spans.items() if number not in stored)
        assert self.evicted_while_pinned == 0

    def _leave(self, entry: SpanEntry) -> None:
        """Removes the entry from all tables of entries, and from the budgets of entries and tokens."""
        evicted = entry.state is EntryState.VICTIM
        entry.worth = self.policy.worth(entry.number)
        self.entries.remove(entry)
        self.order.remove(entry)
        self.sequences.remove(entry, published=not evicted)
        self.order.update_policy(entry)
        self.policy.removed(entry.number, evicted=evicted)
        self.spans.uncount_entry(entry)

    def _begin(self, entry: SpanEntry, now: float) -> None:
        """Adds a published entry to the tables of entries and to the eviction order."""
        self.entries.add(entry)
        self.order.add(entry, now)

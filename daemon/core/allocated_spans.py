"""The allocated spans of the ring: their bytes, index slots and ids, and the sums over them.

Owns the use of the ring's map and of the index's slots, the tables of spans by id and by offset, the ids of new spans,
and the sums: entries, tokens, retired bytes, and each uid's holdings. Does not own the state of a span, nor when a span
is published or freed (`span_table`).

Invariants:
- An allocated span has one slot, which names the span's id until the span is freed. The ring's map has the span's bytes
  as taken until then.
- No two spans have the same id. A new span skips the ids of damaged slots that an earlier daemon left.
- The sums are those of the allocated spans. Retired spans count by their bytes only.
"""

from __future__ import annotations

from typing import NamedTuple

from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ...shm.layout import SPAN_COUNTER_MASK, span_bytes, span_id
from .budget import RingBudget
from .entries import EntryState, SpanEntry
from .holdings import Holding, Holdings


class ReservedSpan(NamedTuple):
    """Bytes of the ring and a slot of the index, reserved for a new span."""

    span_id: int
    slot: int
    offset: int


class AllocatedSpans:
    """Every allocated span of one ring, in any state."""

    def __init__(self, index: IndexWriter, ring: SpanAllocator, budget: RingBudget, epoch: int) -> None:
        self.taken_entries = 0
        self.taken_tokens = 0
        self.retired_bytes = 0
        self.holdings = Holdings()
        self._index = index
        self._ring = ring
        self._budget = budget
        self._epoch = epoch
        self._spans_made = 0
        self._by_id: dict[int, SpanEntry] = {}
        self._by_offset: dict[int, SpanEntry] = {}

    def __contains__(self, span_id: object) -> bool:
        return span_id in self._by_id

    @property
    def next_span_id(self) -> int:
        """The id of the next new span."""
        counter = self._spans_made + 1
        while (number := span_id(self._epoch, counter)) in self._by_id:
            counter += 1
        return number

    def at(self, offset: int) -> SpanEntry:
        """The span at a ring offset."""
        return self._by_offset[offset]

    def find(self, span_id: int) -> SpanEntry | None:
        """The allocated span with this id, in any state."""
        return self._by_id.get(span_id)

    def over_budget(self, entries: int = 0, size_bytes: int = 0, tokens: int = 0) -> bool:
        """Whether a budget is exceeded with these amounts taken too. Without amounts: whether it is exceeded now."""
        budget = self._budget
        return (
            self.taken_entries + entries > budget.max_entries
            or self._ring.used_bytes + size_bytes > (budget.put_bytes_max if size_bytes else budget.max_bytes)
            or (budget.max_tokens is not None and self.taken_tokens + tokens > budget.max_tokens)
        )

    def reserve(
        self, key: bytes, size_bytes: int, tree_bytes: int, payload_bytes: int, hole: int | None = None
    ) -> ReservedSpan | None:
        """Takes `size_bytes` of the ring and a slot for a new span; `add` follows at once.

        Args:
            hole: the offset of the hole to use. None: the allocator chooses.

        Returns:
            None without such a hole or a free slot. Nothing has changed then.
        """
        if hole is None:
            offset = self._ring.allocate(size_bytes)
        else:
            offset = hole if self._ring.take_hole(hole, size_bytes) else None
        if offset is None:
            return None
        number = self.next_span_id
        slot = self._index.reserve(key, number, offset, tree_bytes, payload_bytes)
        if slot is None:
            self._ring.free(offset)
            return None
        self._spans_made = number & SPAN_COUNTER_MASK
        return ReservedSpan(number, slot, offset)

    def rename(self, entry: SpanEntry, key: bytes, payload_bytes: int, tree_bytes: int) -> bool:
        """Gives a span that was never published a slot of another key, and frees the bytes that `payload_bytes` do not
        need.

        Returns:
            False without a free slot. Nothing has changed then.
        """
        slot = self._index.reserve(key, entry.span_id, entry.offset, tree_bytes, payload_bytes)
        if slot is None:
            return False
        # SYNC POINT: reserve before release, so that after a kill at any instruction the next daemon finds a slot with
        # the span's id, and gives the span to nobody while a lane pins it.
        self._index.release(entry.slot)
        size = span_bytes(payload_bytes)
        if size < entry.span_bytes:
            self._ring.cut(entry.offset, size)
            self.holdings.add(entry.owner_uid, size - entry.span_bytes)
        entry.key, entry.slot, entry.span_bytes = key, slot, size
        entry.payload_bytes, entry.tree_bytes = payload_bytes, tree_bytes
        return True

    def adopt(self, entry: SpanEntry) -> bool:
        """Takes over a span that an earlier daemon allocated; its slot exists.

        Returns:
            False if its bytes are not free, or another span has its id. Nothing has changed then.
        """
        if entry.span_id in self._by_id or not self._ring.take(entry.offset, entry.span_bytes):
            return False
        self.add(entry)
        return True

    def add(self, entry: SpanEntry) -> None:
        """Records a span whose bytes and slot are taken."""
        self._by_id[entry.span_id] = self._by_offset[entry.offset] = entry
        self.holdings.add(entry.owner_uid, entry.span_bytes)

    def swap(self, entry: SpanEntry, other: SpanEntry) -> None:
        """Exchanges the spans of two records of the same size."""
        for name in ("span_id", "slot", "offset"):
            mine, theirs = getattr(entry, name), getattr(other, name)
            setattr(entry, name, theirs)
            setattr(other, name, mine)
        for each in (entry, other):
            self._by_id[each.span_id] = self._by_offset[each.offset] = each

    def free(self, entry: SpanEntry) -> None:
        """Frees the span's bytes and its slot."""
        self.holdings.add(entry.owner_uid, -entry.span_bytes)
        del self._by_id[entry.span_id]
        del self._by_offset[entry.offset]
        self._index.release(entry.slot)
        self._ring.free(entry.offset)

    def count_entry(self, entry: SpanEntry) -> None:
        """Counts an entry, or a put in flight, against the budgets of entries and tokens."""
        self.taken_entries += 1
        self.taken_tokens += entry.tokens
        self.holdings.add(entry.owner_uid, 0, 1, entry.tokens)

    def uncount_entry(self, entry: SpanEntry) -> None:
        """Reverts `count_entry`: the span counts by its bytes only."""
        self.taken_entries -= 1
        self.taken_tokens -= entry.tokens
        self.holdings.add(entry.owner_uid, 0, -1, -entry.tokens)

    def check_invariants(self, expected: dict[int, SpanEntry]) -> None:
        """Asserts that the allocated spans are the expected ones, with matching slots, bytes and sums."""
        assert self._by_id == expected
        assert self._by_offset == {e.offset: e for e in expected.values()}
        slots = {slot.number: slot for slot in self._index.slots()}
        assert {entry.slot for entry in expected.values()} == slots.keys()
        for number, entry in expected.items():
            slot = slots[entry.slot]
            assert (slot.span_id, slot.key, slot.offset) == (number, entry.key, entry.offset)
            assert self._ring.size_at(entry.offset) == entry.span_bytes
            assert slot.published == (entry.state is EntryState.LIVE)
        assert self._ring.span_count == len(expected)
        counted = [e for e in expected.values() if e.state is not EntryState.RETIRED]
        assert self.taken_entries == len(counted)
        assert self.taken_tokens == sum(e.tokens for e in counted)
        retired = [e for e in expected.values() if e.state is EntryState.RETIRED]
        assert self.retired_bytes == sum(e.span_bytes for e in retired)
        holdings: dict[int, Holding] = {}
        for entry in expected.values():
            of = holdings.setdefault(entry.owner_uid, Holding())
            of.size_bytes += entry.span_bytes
            of.entries += entry.state is not EntryState.RETIRED
            of.tokens += entry.tokens if entry.state is not EntryState.RETIRED else 0
        self.holdings.check_invariants(holdings)

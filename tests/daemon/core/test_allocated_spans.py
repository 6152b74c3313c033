"""Spans of a ring: what a reservation takes, what it leaves when it fails, and whose id a new span gets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tensord.daemon.core.allocated_spans import AllocatedSpans
from tensord.daemon.core.budget import RingBudget
from tensord.daemon.core.entries import SpanEntry
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.layout import SPAN_HEADER_BYTES, IndexGeometry, span_id

from .stand import key

RING_BYTES = 4096
EPOCH = 3
UID = 1000


@dataclass
class Ring:
    index: IndexWriter
    map: SpanAllocator
    spans: AllocatedSpans

    def take(self, number: int, size_bytes: int = 1024, tokens: int = 5) -> SpanEntry | None:
        """Allocates a span for a key, as a put does."""
        reserved = self.spans.reserve(key(number), size_bytes, 16, size_bytes - SPAN_HEADER_BYTES)
        if reserved is None:
            return None
        entry = SpanEntry(key(number), *reserved, size_bytes, size_bytes - SPAN_HEADER_BYTES, 16, tokens, UID, 0.0)
        self.spans.add(entry)
        self.spans.count_entry(entry)
        return entry


@pytest.fixture
def ring() -> Ring:
    index = IndexWriter.create(IndexGeometry.for_entries(64, 8))
    allocator = SpanAllocator(RING_BYTES)
    return Ring(index, allocator, AllocatedSpans(index, allocator, RingBudget(64, RING_BYTES, 12), EPOCH))


def test_spans_get_rising_ids_of_the_epoch_and_are_found_by_id_and_offset(ring: Ring) -> None:
    one, other = ring.take(1), ring.take(2)
    assert one is not None and other is not None
    assert [one.span_id, other.span_id] == [span_id(EPOCH, 1), span_id(EPOCH, 2)]
    assert ring.spans.find(one.span_id) is one and ring.spans.at(other.offset) is other
    ring.spans.check_invariants({one.span_id: one, other.span_id: other})


def test_a_reservation_without_room_leaves_ring_and_index_as_they_were(ring: Ring) -> None:
    before = ring.map.used_bytes, len(list(ring.index.slots())), ring.spans.next_span_id
    assert ring.spans.reserve(key(1), RING_BYTES + 64, 16, RING_BYTES) is None
    assert ring.spans.reserve(key(1), 1024, 16, 896, hole=RING_BYTES) is None
    assert (ring.map.used_bytes, len(list(ring.index.slots())), ring.spans.next_span_id) == before


def test_a_new_span_skips_the_id_of_an_adopted_one(ring: Ring) -> None:
    adopted = ring.take(1)
    assert adopted is not None
    ring.spans.free(adopted)
    ring.spans.uncount_entry(adopted)
    assert ring.spans.next_span_id == span_id(EPOCH, 2)
    slot = ring.index.reserve(key(2), span_id(EPOCH, 2), 0, 16, 896)
    assert slot is not None
    assert ring.spans.adopt(SpanEntry(key(2), span_id(EPOCH, 2), slot, 0, 1024, 896, 16, 0, UID, 0.0))
    assert ring.spans.next_span_id == span_id(EPOCH, 3)


def test_a_freed_span_leaves_nothing_in_the_sums(ring: Ring) -> None:
    entry = ring.take(1)
    assert entry is not None
    assert ring.spans.over_budget(tokens=8) and not ring.spans.over_budget(tokens=7)
    assert ring.spans.holdings.of(UID).size_bytes == entry.span_bytes
    ring.spans.uncount_entry(entry)
    ring.spans.free(entry)
    assert not ring.spans.holdings.uids() and entry.span_id not in ring.spans
    ring.spans.check_invariants({})

"""The index against a plain dict, in geometries so small that everything collides."""

from __future__ import annotations

import tracemalloc
from mmap import mmap
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.errors import BadKey
from tensord.shm.index import IndexReader, IndexWriter
from tensord.shm.layout import IndexGeometry
from tensord.shm.slots import pack_reuse

from ..memory_bench import key


def crafted(first: int, second: int, fingerprint: int, rest: int) -> bytes:
    """A key whose two bucket hashes and fingerprint are as given; `rest` tells it from others with the same."""
    hashes = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    return b"a tag   " + hashes + fingerprint.to_bytes(8, "little") + rest.to_bytes(8, "little")


# Few buckets, fingerprints that are zero, equal, or look like another one shifted by some bytes.
KEYS = st.builds(
    crafted,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0, 1, 1 << 8, 1 << 56, 0x0101010101010101, 7]),
    st.integers(0, 3),
)


def index_over(buckets: int) -> tuple[IndexWriter, IndexReader]:
    geometry = IndexGeometry(buckets)
    memory = mmap(-1, geometry.index_bytes)
    return IndexWriter.create(geometry, memory), IndexReader(memory, geometry)


class IndexAgainstDict(RuleBasedStateMachine):
    """`held` maps allocated slots to what they hold; `published` keys to their slots."""

    @initialize(buckets=st.sampled_from([1, 2, 4]))
    def start(self, buckets: int) -> None:
        self.writer, self.reader = index_over(buckets)
        self.held: dict[int, tuple[bytes, int, int, int, int]] = {}
        self.published: dict[bytes, int] = {}
        self.seqs = [1] * self.writer.geometry.slot_count
        self.spans = 0
        self.reuse: dict[int, tuple[int, int]] = {}
        self.asked: set[bytes] = set()

    def waiting(self) -> list[int]:
        return [slot for slot, held in self.held.items() if self.published.get(held[0]) != slot]

    @rule(key=KEYS, cells=st.integers(0, 50), tree_bytes=st.integers(1, 65_472), payload_bytes=st.integers(1, 1 << 40))
    def reserve(self, key: bytes, cells: int, tree_bytes: int, payload_bytes: int) -> None:
        self.asked.add(key)
        self.spans += 1
        places = self.writer.slots_for(key)
        slot = self.writer.reserve(key, self.spans, cells * 64, tree_bytes, payload_bytes)
        assert (slot is None) == all(place in self.held for place in places)
        if slot is not None:
            assert slot in places
            assert slot not in self.held
            self.held[slot] = (key, self.spans, cells * 64, tree_bytes, payload_bytes)
            self.reuse[slot] = (0, 0)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.waiting()))
        key = self.held[slot][0]
        if key not in self.published:
            self.writer.publish(slot)
            self.published[key] = slot

    @precondition(lambda self: self.published)
    @rule(data=st.data(), back=st.booleans())
    def unpublish(self, data: st.DataObject, back: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.published)))
        self.writer.unpublish(self.published[key])
        assert self.reader.find(key) is None
        if back:
            self.writer.publish(self.published[key])
        else:
            del self.published[key]

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.waiting()))
        self.writer.release(slot)
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), unverified=st.booleans())
    def mark(self, data: st.DataObject, unverified: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        before = self.writer.read(slot)
        self.writer.mark(slot, unverified=unverified)
        after = self.writer.read(slot)
        assert after.unverified == unverified
        assert (after.seq, after.offset, after.tree_bytes) == (before.seq, before.offset, before.tree_bytes)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), uses=st.integers(0, 1 << 16), holders=st.integers(0, 1 << 16))
    def tell_reuse(self, data: st.DataObject, uses: int, holders: int) -> None:
        """As the store does."""
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.writer._reuse[slot] = pack_reuse(uses, holders, 7.25)
        self.reuse[slot] = (min(uses, (1 << 16) - 1), min(holders, (1 << 16) - 1))

    @rule()
    def the_next_daemon_takes_over(self) -> None:
        self.writer = IndexWriter(self.reader.memory, self.writer.geometry)

    @invariant()
    def readers_find_exactly_what_is_published(self) -> None:
        if not hasattr(self, "writer"):
            return
        for asked in self.asked:
            hit = self.reader.find(asked)
            slot = self.published.get(asked)
            assert (hit is None) == (slot is None)
            if hit is not None and slot is not None:
                at, seq, span_id, place, payload_bytes = hit
                read = self.writer.read(slot)
                assert self.reader.words[at] == seq == read.seq
                assert self.reader.reuse(at) == self.reuse[slot]
                assert self.held[slot] == (asked, span_id, read.offset, read.tree_bytes, payload_bytes)
                assert (place >> 48, place & ~63 & (1 << 48) - 1) == (read.tree_bytes, read.offset)

    @invariant()
    def find_many_finds_nothing_that_find_does_not(self) -> None:
        if not hasattr(self, "writer") or not self.asked:
            return
        keys = sorted(self.asked)
        found, at, seq, spans, places, lengths = self.reader.find_many(as_array(keys))
        for i, asked in enumerate(keys):
            if found[i]:
                assert self.reader.find(asked) == (at[i], seq[i], spans[i], places[i], lengths[i])
            elif asked in self.published:
                # It looks at the first slot with the fingerprint only: 64 equal bits are beyond chance.
                rivals = [other for other in self.published if other[16:24] == asked[16:24] and other != asked]
                assert rivals or not any(asked[16:24]), "a false miss"

    @invariant()
    def seq_only_rises_and_all_is_sound(self) -> None:
        if not hasattr(self, "writer"):
            return
        seqs = [self.writer.read(slot).seq for slot in range(len(self.seqs))]
        assert all(now >= before for now, before in zip(seqs, self.seqs, strict=True))
        self.seqs = seqs
        assert {slot.number for slot in self.writer.slots()} == self.held.keys()
        assert {slot.number for slot in self.writer.slots() if slot.published} == set(self.published.values())
        self.writer.check_invariants()

    @invariant()
    def what_is_told_of_reuse_is_there_for_the_next_daemon(self) -> None:
        if not hasattr(self, "writer"):
            return
        spans, holders = self.writer.held()
        told = {self.held[slot][1]: self.reuse[slot][1] for slot in self.held if self.reuse[slot][1]}
        assert dict(zip(spans.tolist(), holders.tolist(), strict=True)) == told


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def as_array(keys: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


@settings(max_examples=40, deadline=None)
@given(stored=st.sets(st.integers(0, 400), max_size=250), asked=st.lists(st.integers(0, 800), max_size=60))
def test_find_many_agrees_with_find(stored: set[int], asked: list[int]) -> None:
    writer, reader = index_over(64)
    for number in stored:
        slot = writer.reserve(key(number), number + 1, number * 64, 9, 100 + number)
        assert slot is not None
        writer.publish(slot)
    found, at, seq, spans, places, lengths = reader.find_many(as_array([key(number) for number in asked]))
    for i, number in enumerate(asked):
        hit = reader.find(key(number))
        assert found[i] == (hit is not None) == (number in stored)
        if hit is not None:
            assert hit == (at[i], seq[i], spans[i], places[i], lengths[i])
    writer.check_invariants()


def test_looking_up_a_few_keys_in_a_large_index_copies_nothing_of_it() -> None:
    writer, reader = index_over(4096)
    wanted = as_array([key(number) for number in range(100)])
    reader.find_many(wanted)
    tracemalloc.start()
    try:
        reader.find_many(wanted)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < writer.geometry.index_bytes / 32


def test_a_free_slot_whose_seq_was_damaged_is_taken_all_the_same() -> None:
    """Even and free it would be published as it is taken, or end the daemon that takes it."""
    memory = bytearray(IndexGeometry(1).index_bytes)
    IndexWriter.create(IndexGeometry(1), memory)
    first = IndexGeometry(1).buckets_at + 64
    memory[first : first + 8] = bytes(8)
    writer = IndexWriter(memory, IndexGeometry(1))
    assert writer.reserve(key(1), 1 << 48 | 1, 0, 16, 100) == 0
    assert not writer.read(0).published


def test_a_slot_whose_seq_was_damaged_to_the_highest_is_published_and_hidden_all_the_same() -> None:
    memory = bytearray(IndexGeometry(1).index_bytes)
    IndexWriter.create(IndexGeometry(1), memory)
    first = IndexGeometry(1).buckets_at + 64
    memory[first : first + 8] = b"\xff" * 8
    writer = IndexWriter(memory, IndexGeometry(1))
    assert writer.reserve(key(1), 1 << 48 | 1, 0, 16, 100) == 0
    writer.publish(0)
    assert writer.read(0).published
    writer.unpublish(0)
    assert not writer.read(0).published


def test_an_index_for_so_many_entries_takes_them() -> None:
    writer, _ = index_over(IndexGeometry.for_entries(4000).bucket_count)
    slots = [writer.reserve(key(number), number + 1, 0, 1, 1) for number in range(4000)]
    assert None not in slots
    assert len(set(slots)) == 4000


def test_slots_of_higher_epochs_are_found_highest_first_whether_published_or_not() -> None:
    writer, reader = index_over(16)
    taken: list[int] = []
    for number, epoch in enumerate([2, 5, 3, 0xFFFF, 1]):
        slot = writer.reserve(key(number), epoch << 48 | 7, 64 * number, 16, 64)
        assert slot is not None
        taken.append(slot)
        if number % 2:
            writer.publish(slot)
    assert list(reader.later_than(2)) == [writer.read(taken[number]) for number in (3, 1, 2)]
    assert list(reader.later_than(0xFFFF)) == list(reader.later_than((1 << 64) - 1)) == []


def test_reserving_in_two_full_buckets_returns_none_and_changes_nothing() -> None:
    writer, _ = index_over(4)
    slots = [writer.reserve(crafted(1, 2, number, 0), number + 1, 0, 1, 1) for number in range(16)]
    assert sorted(s for s in slots if s is not None) == [*range(8, 24)]
    before = bytes(writer._memory)
    assert writer.reserve(crafted(1, 2, 99, 0), 99, 0, 1, 1) is None
    assert bytes(writer._memory) == before
    assert writer.reserve(crafted(1, 3, 99, 0), 99, 0, 1, 1) is not None


def test_where_both_hashes_name_one_bucket_the_neighbour_is_the_second_choice() -> None:
    writer, reader = index_over(4)
    keys = [crafted(2, 2, number, 0) for number in range(16)]
    for number, k in enumerate(keys):
        slot = writer.reserve(k, number + 1, 0, 1, 1)
        assert slot is not None
        writer.publish(slot)
    assert writer.slots_for(keys[0]) == [*range(16, 24), *range(24, 32)]
    assert all(reader.find(k) is not None for k in keys)
    assert reader.find_many(as_array(keys[1:]))[0].all()


class Watched:
    """Words that keep a copy of the whole index from before and after each store: where a kill may strike."""

    def __init__(self, words: memoryview, memory: memoryview) -> None:
        self.words = words
        self.memory = memory
        self.moments: list[bytes] = []

    def __getitem__(self, at: int) -> int:
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.moments.append(bytes(self.memory))
        self.words[at] = value
        self.moments.append(bytes(self.memory))


def test_a_kill_between_any_two_stores_leaves_an_index_that_the_next_daemon_can_use() -> None:
    writer, _ = index_over(1)
    watched = Watched(writer._words, writer._memory)
    writer._words = watched  # type: ignore[assignment]
    first = writer.reserve(key(1), 11, 640, 9, 100)
    assert first is not None
    writer.publish(first)
    writer.unpublish(first)
    writer.publish(first)
    writer.unpublish(first)
    writer._reuse[first] = pack_reuse(5, 2, 7.25)
    writer.release(first)
    again = writer.reserve(key(2), 12, 1280, 8, 200)
    assert again == first
    writer.publish(again)
    whole = {(key(1), 11, 640, 9, 100), (key(2), 12, 1280, 8, 200)}
    for moment in watched.moments:
        memory = mmap(-1, len(moment))
        memory[:] = moment
        successor = IndexWriter(memory, writer.geometry)
        successor.check_invariants()
        held = {slot.number for slot in successor.slots()}
        left = [slot for slot in range(8) if slot not in held and successor._reuse[slot]]
        assert not left, "another's uses are left"
        for slot in successor.slots():
            assert (slot.key, slot.span_id, slot.offset, slot.tree_bytes, slot.payload_bytes) in whole
            hit = IndexReader(memory, writer.geometry).find(slot.key)
            assert (hit is not None) == slot.published


def test_a_span_id_is_stored_last_so_that_a_slot_that_has_one_is_whole() -> None:
    writer, _ = index_over(1)
    watched = Watched(writer._words, writer._memory)
    writer._words = watched  # type: ignore[assignment]
    slot = writer.reserve(key(1), 11, 640, 9, 100)
    assert slot is not None
    spans_at = writer._slot_at(slot) + 5
    before = np.frombuffer(watched.moments[-2], "u8")
    after = np.frombuffer(watched.moments[-1], "u8")
    assert (before[spans_at], after[spans_at]) == (0, 11)
    assert np.flatnonzero(before != after).tolist() == [spans_at]


@pytest.mark.parametrize("bad", [b"", b"short", bytes(33), "x" * 32, None, 7])
def test_an_object_that_is_not_a_key_is_refused_by_name(bad: object) -> None:
    _, reader = index_over(2)
    with pytest.raises(BadKey, match="a key is 32 bytes"):
        reader.find(cast(bytes, bad))


def test_a_memoryview_that_is_not_a_key_is_described_by_its_shape() -> None:
    _, reader = index_over(2)
    with pytest.raises(BadKey, match=r"shape \(4, 9\) and format 'B'; bytes\(key\) makes bytes of it"):
        reader.find(cast(bytes, memoryview(bytes(36)).cast("B", (4, 9))))


def test_a_step_out_of_turn_is_a_programmers_error() -> None:
    writer, _ = index_over(1)
    slot = writer.reserve(key(1), 1, 0, 1, 1)
    assert slot is not None
    with pytest.raises(AssertionError, match="nothing to publish"):
        writer.publish(slot + 1)
    with pytest.raises(AssertionError, match="not published"):
        writer.unpublish(slot)
    writer.publish(slot)
    with pytest.raises(AssertionError, match="nothing to publish"):
        writer.publish(slot)
    with pytest.raises(AssertionError, match="cannot be released"):
        writer.release(slot)


def test_a_fingerprint_across_two_cells_of_a_line_is_nobodys() -> None:
    """Keys made so that a slot read eight bytes too late would look like another key's."""
    writer, reader = index_over(1)
    first = (2, 17, int.from_bytes(bytes(range(1, 9)), "little"), int.from_bytes(bytes(range(2, 10)), "little"))
    second = (4, 18, 9, 0)
    span = 77
    for number, words in enumerate((first, second)):
        slot = writer.reserve(b"".join(word.to_bytes(8, "little") for word in words), span + number, 0, 1, 1)
        assert slot == number
        writer.publish(slot)
    assert reader.find(b"".join(word.to_bytes(8, "little") for word in (*first[1:], span))) is None

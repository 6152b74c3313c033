"""The index against a plain dict, in geometries so small that everything collides."""

from __future__ import annotations

from mmap import mmap
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.store.slots import Slots
from tensord.shm.index.index import IndexReader, IndexWriter
from tensord.shm.ring.layout import IndexGeometry

from ..memory_bench import key, slots_for


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


def index_over(buckets: int) -> tuple[IndexWriter, Slots, IndexReader]:
    geometry = IndexGeometry(buckets)
    memory = mmap(-1, geometry.index_bytes)
    index = IndexWriter.create(geometry, memory)
    return index, Slots(memoryview(memory), geometry), IndexReader(memory, geometry)


class IndexAgainstDict(RuleBasedStateMachine):
    """`held` maps allocated slots to what they hold; `published` keys to their slots."""

    @initialize(buckets=st.sampled_from([1, 2, 4]))
    def start(self, buckets: int) -> None:
        self.index, self.writer, self.reader = index_over(buckets)
        self.held: dict[int, tuple[bytes, int, int, int, int]] = {}
        self.published: dict[bytes, int] = {}
        self.seqs = [1] * self.index.geometry.slot_count
        self.spans = 0
        self.reuse: dict[int, tuple[int, int]] = {}
        self.asked: set[bytes] = set()

    def waiting(self) -> list[int]:
        return [slot for slot, held in self.held.items() if self.published.get(held[0]) != slot]

    @rule(key=KEYS, cells=st.integers(0, 50), tree_bytes=st.integers(1, 65_472), payload_bytes=st.integers(1, 1 << 40))
    def reserve(self, key: bytes, cells: int, tree_bytes: int, payload_bytes: int) -> None:
        self.asked.add(key)
        self.spans += 1
        places = slots_for(key, self.index.geometry)
        slot = self.writer.take(key, self.spans, tree_bytes << 48 | cells * 64, payload_bytes)
        assert (slot < 0) == all(place in self.held for place in places)
        if slot >= 0:
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
        before = self.index.read(slot)
        self.index.mark(slot, unverified=unverified)
        after = self.index.read(slot)
        assert after.unverified == unverified
        assert (after.seq, after.offset, after.tree_bytes) == (before.seq, before.offset, before.tree_bytes)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), uses=st.integers(0, 0xFFFF), holders=st.integers(0, 0xFFFF))
    def tell_reuse(self, data: st.DataObject, uses: int, holders: int) -> None:
        """As the store does."""
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.writer.reuse[slot] = holders << 48 | 464 << 16 | uses
        self.reuse[slot] = uses, holders

    @rule()
    def the_next_daemon_takes_over(self) -> None:
        geometry = self.index.geometry
        self.index = IndexWriter(self.reader.memory, geometry)
        self.writer = Slots(memoryview(self.reader.memory), geometry)

    @invariant()
    def readers_find_exactly_what_is_published(self) -> None:
        for asked in self.asked:
            hit = self.reader.find(asked)
            slot = self.published.get(asked)
            assert (hit is None) == (slot is None)
            if hit is not None and slot is not None:
                at, seq, span_id, place, payload_bytes = hit
                read = self.index.read(slot)
                assert self.reader.words[at] == seq == read.seq
                assert self.reader.reuse(at) == self.reuse[slot]
                assert self.held[slot] == (asked, span_id, read.offset, read.tree_bytes, payload_bytes)
                assert (place >> 48, place & ~63 & (1 << 48) - 1) == (read.tree_bytes, read.offset)

    @invariant()
    def find_many_finds_nothing_that_find_does_not(self) -> None:
        if not self.asked:
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
        seqs = [self.index.read(slot).seq for slot in range(len(self.seqs))]
        assert all(now >= before for now, before in zip(seqs, self.seqs, strict=True))
        self.seqs = seqs
        assert {slot.number for slot in self.index.slots()} == self.held.keys()
        assert {slot.number for slot in self.index.slots() if slot.published} == set(self.published.values())
        self.index.check_invariants()

    @invariant()
    def what_is_told_of_reuse_is_there_for_the_next_daemon(self) -> None:
        assert set(self.index.held().tolist()) == {self.held[slot][1] for slot in self.held if self.reuse[slot][1]}


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def as_array(keys: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def test_a_free_slot_whose_seq_was_damaged_is_taken_all_the_same() -> None:
    """Even and free it would be published as it is taken, or end the daemon that takes it."""
    index, writer, reader = index_over(1)
    first = index.geometry.buckets_at + 64
    reader.memory[first : first + 8] = bytes(8)
    index = IndexWriter(reader.memory, index.geometry)
    assert writer.take(key(1), 1 << 48 | 1, 16 << 48, 100) == 0
    assert not index.read(0).published


def test_a_fingerprint_across_two_cells_of_a_line_is_nobodys() -> None:
    """Keys made so that a slot read eight bytes too late would look like another key's."""
    _, writer, reader = index_over(1)
    first = (2, 17, int.from_bytes(bytes(range(1, 9)), "little"), int.from_bytes(bytes(range(2, 10)), "little"))
    second = (4, 18, 9, 0)
    span = 77
    for number, words in enumerate((first, second)):
        slot = writer.take(b"".join(word.to_bytes(8, "little") for word in words), span + number, 1 << 48, 1)
        assert slot == number
        writer.publish(slot)
    assert reader.find(b"".join(word.to_bytes(8, "little") for word in (*first[1:], span))) is None

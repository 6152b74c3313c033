"""A daemon that is killed between two stores of a slot leaves an index that the next one can use."""

from __future__ import annotations

from mmap import mmap
from typing import Any

from tensord.shm.index.index import IndexReader, IndexWriter

from .rows import RowStore, key_of, reuse_word


class Watched:
    """Words that keep a copy of the whole index from before and after each store: where a kill may strike."""

    def __init__(self, words: Any, store: RowStore, moments: list[bytes]) -> None:
        self.words, self.store, self.moments = words, store, moments

    def __getitem__(self, at: Any) -> Any:
        return self.words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.moments.append(bytes(self.store.index_memory))
        self.words[at] = value
        self.moments.append(bytes(self.store.index_memory))


def watched(store: RowStore) -> list[bytes]:
    """The moments of all stores into the index from now on."""
    moments: list[bytes] = []
    for name in ("words", "_array", "_reuse"):
        setattr(store.slots, name, Watched(getattr(store.slots, name), store, moments))
    return moments


def check_moment(moment: bytes, store: RowStore, whole: set[tuple[bytes, int]]) -> None:
    """What the next daemon finds: each slot is free or complete, and readers find exactly what is published."""
    memory = mmap(-1, len(moment))
    memory[:] = moment
    successor = IndexWriter(memory, store.geometry)
    successor.check_invariants()
    taken = {slot.number for slot in successor.slots()}
    for number in range(store.geometry.slot_count):
        assert number in taken or not successor._reuse[number], "a free slot has the uses of an earlier entry"
    for slot in successor.slots():
        assert slot.payload_bytes, f"{slot} is taken before it is complete"
        # A slot without a tree is a grant's.
        assert not slot.tree_bytes or (slot.key, slot.payload_bytes) in whole, slot
        assert slot.tree_bytes or not slot.published
        hit = IndexReader(memory, store.geometry).find(slot.key)
        assert slot.published == (hit is not None and hit[2] == slot.span_id), slot


def test_a_kill_between_any_two_stores_leaves_an_index_that_the_next_daemon_can_use() -> None:
    store = RowStore(buckets=2)
    moments = watched(store)
    one, other = store.put(key_of(1), 100), store.put(key_of(2), 200)
    store.slots.words[store.slots.first_reuse + store.table.slots[one]] = reuse_word(5, 7.25)
    store.pinned = {store.table.span_ids[one]}
    store.spans.hide([one, other], "capacity")
    assert store.scan() == [other], "what is pinned is published again"
    store.pinned = set()
    store.spans.end([one], "explicit")
    assert store.scan() == [one]
    assert store.put(key_of(3), 300)
    grant = store.lend(1024)
    assert grant is not None
    store.slots.revoke(grant.slot)
    for moment in moments:
        check_moment(moment, store, {(key_of(1), 100), (key_of(2), 200), (key_of(3), 300)})


def test_an_entry_that_is_moved_is_published_at_each_moment() -> None:
    store = RowStore(buckets=2)
    row = store.put(key_of(1), 100)
    moments = watched(store)
    to = store.slots.take(key_of(1), 77 << 48 | 1, 64 << 48 | 4096, 100)
    store.slots.move(store.table.slots[row], to)
    for moment in moments:
        memory = mmap(-1, len(moment))
        memory[:] = moment
        index = IndexWriter(memory, store.geometry)
        assert [slot for slot in index.slots() if slot.published and slot.key == key_of(1)], "the entry is lost"
        assert IndexReader(memory, store.geometry).find(key_of(1)) is not None

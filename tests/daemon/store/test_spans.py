"""Entries that are hidden, end and are published again: whose bytes are free when, as readers and callers see it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.store.table import ENDED, FREE, LIVE
from tensord.shm.records import NO_KEY

from .rows import RowStore, key_of


@pytest.mark.parametrize("ends", ["hide", "end"])
def test_bytes_are_free_only_after_a_scan_that_began_later_and_found_no_pin(ends: str) -> None:
    store = RowStore()
    row = store.put(key_of(1), 1000)
    span_id, free = store.table.span_ids[row], store.holes.total_bytes
    store.spans.begin_scan()
    if ends == "hide":
        store.spans.hide(store.policy.victims(1), "capacity")
    else:
        store.spans.end([row], "explicit")
    assert store.read(key_of(1)) is None
    assert store.spans.scanned(set()).freed == [], "the scan began before the end"
    assert store.scan({span_id}) == []
    store.check_invariants()
    if ends == "hide":
        assert store.read(key_of(1)) is not None, "a pinned victim is an entry again"
        assert store.spans.is_held(row)
    else:
        assert store.read(key_of(1)) is None and store.scan({span_id}) == []
        assert store.scan() == [row]
        assert store.holes.total_bytes == free + store.table.sizes[row]
    store.check_invariants()


def test_a_held_row_may_go_again_once_its_reader_has_let_go() -> None:
    store = RowStore()
    row = store.put(key_of(1))
    store.pinned = {store.table.span_ids[row]}
    assert store.evict(1) == 1 and store.evict(1) == 0, "it is held"
    store.pinned = set()
    store.scan()
    assert store.evict(1) == 1
    assert store.read(key_of(1)) is None


def test_a_pinned_child_does_not_bring_back_a_parent_whose_key_was_put_again() -> None:
    store = RowStore()
    first, second = store.put(key_of(1)), store.put(key_of(2), parent=key_of(1))
    store.spans.hide([second, first], "capacity")
    new = store.put(key_of(1))
    store.scan({store.table.span_ids[second]})
    assert store.table.by_key == {key_of(1): new}
    assert store.table.states[second] == ENDED and store.table.states[first] == FREE
    store.scan()
    store.scan()
    store.check_invariants()


def test_a_child_brings_back_its_hidden_parent_and_a_parent_goes_after_its_children() -> None:
    store = RowStore()
    first = store.put(key_of(1))
    second = store.put(key_of(2), parent=key_of(1))
    assert store.policy.victims(8) == [second, first]
    store.spans.hide([second, first], "capacity")
    store.put(key_of(3), parent=key_of(2))
    assert store.table.states[first] == store.table.states[second] == LIVE
    assert store.scan() == []
    store.check_invariants()


class SpansMachine(RuleBasedStateMachine):
    """Puts of chains, hides, ends, scans with any pins, in any order, against a dict of what may be read."""

    @initialize()
    def start(self) -> None:
        self.store = RowStore(16 << 10, row_bits=7, buckets=8)
        self.keys = 0
        self.pinned: set[int] = set()
        self.payloads: dict[bytes, bytes] = {}

    def row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.store.table.by_key.values())))

    @rule(data=st.data(), chained=st.booleans(), again=st.booleans())
    def puts(self, data: st.DataObject, chained: bool, again: bool) -> None:
        self.keys += 1
        hidden = sorted(self.store.spans.hidden)
        key = data.draw(st.sampled_from(hidden)) if again and hidden else key_of(self.keys)
        parents = sorted([*self.store.table.by_key, *hidden])
        parent = data.draw(st.sampled_from(parents)) if chained and parents else NO_KEY
        payload = hashlib.sha256(self.keys.to_bytes(4, "big")).digest() * data.draw(st.integers(1, 20))
        if parent != key and self.store.put(key, payload, parent=parent):
            self.payloads[key] = payload

    @rule(most=st.integers(1, 5))
    def hides(self, most: int) -> None:
        self.store.spans.hide(self.store.policy.victims(most), "capacity")

    @precondition(lambda self: self.store.table.by_key)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        below = list(self.store.families.leaves_first(self.row(data)))
        self.store.spans.end(below, "explicit")

    @precondition(lambda self: self.store.table.by_key)
    @rule(data=st.data())
    def pins(self, data: st.DataObject) -> None:
        self.pinned.add(self.store.table.span_ids[self.row(data)])

    @rule(data=st.data())
    def unpins(self, data: st.DataObject) -> None:
        self.pinned = {each for each in self.pinned if data.draw(st.booleans())}

    @precondition(lambda self: not self.store.spans.scanning)
    @rule()
    def scan_begins(self) -> None:
        self.store.spans.begin_scan()

    @precondition(lambda self: self.store.spans.scanning)
    @rule()
    def scan_ends(self) -> None:
        span_ids = self.store.table.span_ids
        for row in self.store.spans.scanned(set(self.pinned)).freed:
            assert span_ids[row] not in self.pinned
            self.store.holes.free(row)

    @invariant()
    def what_is_published_is_read(self) -> None:
        if hasattr(self, "store"):
            self.store.check_invariants()
            for key in self.store.table.by_key:
                assert self.store.read(key) == self.payloads[key]


TestSpans = SpansMachine.TestCase
TestSpans.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

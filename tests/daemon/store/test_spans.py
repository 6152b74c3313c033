"""Entries that are hidden, end and are published again: whose bytes are free when, as readers and callers see it."""

from __future__ import annotations

import pytest

from tensord.daemon.store.table import LIVE

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
        assert row in store.spans.held
    else:
        assert store.read(key_of(1)) is None and store.scan({span_id}) == []
        assert store.scan() == [row]
        assert store.holes.total_bytes == free + store.table.sizes[row]
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

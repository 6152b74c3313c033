"""Chains in the store: entries that name their parent by its key, and have no record of tokens.

No stored entry is without its parent, whatever evicts, ends, moves or restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tensord.daemon.core.events import FoundCorrupt
from tensord.daemon.core.sweeps import SLICE
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES

from .blocks import TAG, block, name
from .stand import SPAN, Make, Stand, key
from .test_recovery import restart


def stand_of(blocks: int, **more: Any) -> Stand:
    """A ring of this number of spans."""
    stand = Stand(SPAN * blocks, max_entries=max(1000, blocks), **more)
    stand.join(1, 2)
    return stand


def put(stand: Stand, number: int, parent: int, **more: Any) -> str:
    """The outcome of the whole put of a child."""
    return stand.put(number, parent=key(parent), **more)


def put_chain(stand: Stand, *numbers: int, **more: Any) -> None:
    """A chain; its first entry has no parent."""
    assert stand.put(numbers[0], **more) == "stored"
    for parent, number in pairwise(numbers):
        assert put(stand, number, parent, **more) == "stored"


def begin(stand: Stand, request: int, number: int, parent: int | None = None, client: int = 2) -> None:
    """A put of whose payload nothing has come."""
    stand.commit(client, request, key(number), 64, parent=None if parent is None else key(parent))


def links(*chains: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    for chain in chains:
        yield from pairwise(chain)


def whole(stand: Stand, *chains: tuple[int, ...]) -> None:
    """No entry of these chains is there without its parent."""
    there = stand.stored()
    for parent, child in links(*chains):
        assert child not in there or parent in there, f"{child} is stored, and its parent {parent} is not"
    stand.check()


# ---- taken in


def test_a_child_is_stored_under_any_key_and_described_with_its_parent() -> None:
    stand = stand_of(10)
    put_chain(stand, 1, 2, 3)
    entries = [stand.store.entry(key(number)) for number in (1, 2, 3)]
    assert [(e["parent"], e["children"], e["prefix"]) for e in entries if e is not None] == [
        (None, 1, None),
        (key(1).hex(), 1, None),
        (key(2).hex(), 0, None),
    ]
    status = stand.store.status()
    assert (status["chain_blocks"], status["prefix_blocks"]) == (2, 0)
    stand.check()


def test_a_child_whose_parent_is_neither_stored_nor_in_flight_is_refused_at_once() -> None:
    stand = stand_of(10)
    begin(stand, 1, 2, parent=1)
    assert stand.ended(2, 1) == "ParentGone"
    begin(stand, 2, 1)
    begin(stand, 3, 2, parent=1)
    assert stand.ended(2, 3) == "", "its parent is in flight"
    stand.check()


def test_a_chain_is_put_in_one_burst_without_waiting() -> None:
    stand = stand_of(10)
    for number in range(1, 6):
        begin(stand, number, number, parent=number - 1 or None)
    for number in range(1, 6):
        stand.part(2, number, 64, last=True)
    stand.settle()
    assert [stand.ended(2, number) for number in range(1, 6)] == ["stored"] * 5
    whole(stand, (1, 2, 3, 4, 5))


def test_the_descendants_of_a_refused_put_are_refused_as_well() -> None:
    stand = stand_of(10)
    begin(stand, 1, 1)
    begin(stand, 2, 2, parent=1)
    begin(stand, 3, 3, parent=2)
    stand.part(2, 1, 65, last=True)
    stand.part(2, 2, 64, last=True)
    stand.part(2, 3, 64, last=True)
    stand.settle()
    assert [stand.ended(2, request) for request in (1, 2, 3)] == ["BadMessage", "ParentGone", "ParentGone"]
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


def test_a_put_whose_parent_ends_meanwhile_is_refused() -> None:
    stand = stand_of(10)
    stand.put(1)
    stand.begin(2, 1, key(2), 64, parent=key(1))
    stand.send(1, messages.Evict(5, [key(1)]))
    stand.part(2, 1, 63, last=True)
    stand.settle()
    assert stand.ended(2, 1) == "ParentGone"
    assert not stand.stored()
    stand.check()


@pytest.mark.parametrize("parent", [key(1, b"another."), key(2)], ids=["another namespace", "itself"])
def test_a_parent_that_no_entry_can_have_is_refused_before_any_copy(parent: bytes) -> None:
    stand = stand_of(10)
    stand.put(1)
    stand.put(parent)
    assert stand.put(key(2), parent=parent) == "BadPrefix"
    assert not stand.copies
    stand.check()


def test_a_put_of_a_stored_key_does_not_change_its_parent() -> None:
    stand = stand_of(10)
    put_chain(stand, 1, 2)
    stand.put(3)
    assert (put(stand, 2, 3), put(stand, 3, 1)) == ("existed", "existed")
    stand.send(1, messages.Evict(5, [key(1)]))
    stand.settle()
    assert stand.stored() == {3}
    stand.check()


def test_a_child_is_in_no_prefix_and_may_follow_a_block_with_a_record_but_not_the_other_way_round() -> None:
    stand = stand_of(10)
    stand.put_sequence(1, 2)
    after = key(7, TAG)
    assert stand.put(after, parent=name([1, 2])) == "stored"
    assert stand.matched(1, 2) == 2
    assert len(stand.store.memory.sequences.index) == 2
    under = block([1, 2, 3])
    stand.send(1, messages.Evict(5, [name([1, 2])]))
    stand.settle()
    assert stand.find(after) is None, "it ends with the block before it"
    assert stand.put(name([1, 2]), parent=name([1])) == "stored"
    assert stand.put_block(under) == "BadPrefix", "a block's text continues the text of its parent"
    assert stand.matched(1, 2) == 1
    stand.check()


# ---- eviction


@pytest.mark.parametrize("policy", POLICIES)
def test_children_go_before_their_parents_for_room(policy: str) -> None:
    stand = stand_of(12, policy=policy)
    chains = [(1, 2, 3, 4), (2, 5), (6, 7, 8, 9)]
    put_chain(stand, *chains[0])
    put(stand, 5, 2)
    put_chain(stand, *chains[2])
    for number in range(20, 50):
        assert stand.put(number) == "stored"
        whole(stand, *chains)
    assert not stand.stored() & {3, 4, 5, 8, 9}


def test_a_chain_goes_for_one_large_put_from_its_end() -> None:
    stand = stand_of(20)
    put_chain(stand, *range(1, 21))
    assert stand.put(99, 15 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == {1, 2, 3, 4, 5, 99}
    whole(stand, tuple(range(1, 21)))


@pytest.mark.parametrize("limit", ["max_entries", "max_tokens"])
def test_children_go_before_their_parents_for_a_budget(limit: str) -> None:
    limits: dict[str, Any] = {"max_entries": 1000, limit: 8}
    stand = Stand(SPAN * 40, **limits)
    stand.join(1)
    put_chain(stand, *range(1, 7), tokens=1)
    for number in range(20, 40):
        assert stand.put(number, tokens=1) == "stored"
        whole(stand, tuple(range(1, 7)))


def test_a_lease_on_a_child_keeps_all_its_ancestors() -> None:
    stand = stand_of(10)
    put_chain(stand, 1, 2, 3, 4, 5)
    stand.pin(3)
    for number in range(20, 40):
        assert stand.put(number) == "stored"
        assert stand.stored() >= {1, 2, 3}
    assert not stand.stored() & {4, 5}
    assert stand.store.counters.republished <= 1, "an entry that is known to stay is not hidden"
    assert stand.put(99, 8 * SPAN - SPAN_HEADER_BYTES) == "StoreFull"
    stand.views.clear()
    assert stand.put(99, 8 * SPAN - SPAN_HEADER_BYTES) == "stored"
    whole(stand, (1, 2, 3, 4, 5))


def test_a_pin_by_message_keeps_all_ancestors() -> None:
    stand = stand_of(6, pinned_bytes_max=10 * SPAN)
    put_chain(stand, 1, 2, 3)
    stand.send(1, messages.Pin(7, key(3), 60.0))
    for number in range(20, 32):
        stand.put(number)
        assert stand.stored() >= {1, 2, 3}
    stand.check()


@pytest.mark.parametrize("parent_first", [True, False], ids=["the parent is stored", "the parent is in flight"])
def test_the_parent_of_a_put_in_flight_stays_until_the_put_has_ended(parent_first: bool) -> None:
    stand = stand_of(6)
    if parent_first:
        stand.put(1)
    else:
        # Of the client that fills the store: the other one keeps its share of it.
        begin(stand, 1, 1, client=1)
    begin(stand, 2, 2, parent=1)
    if not parent_first:
        # The store is full, and has evicted entries, before the parent is published.
        for number in range(40, 50):
            assert stand.put(number) == "stored"
        stand.part(1, 1, 64, last=True)
        stand.settle()
    for number in range(20, 40):
        assert stand.put(number) == "stored"
        assert 1 in stand.stored()
    stand.part(2, 2, 64, last=True)
    stand.settle()
    assert stand.ended(2, 2) == "stored"
    assert stand.store.counters.republished == 0, "an entry that is known to stay is not hidden"
    whole(stand, (1, 2))


def test_a_put_without_room_waits_for_no_copy_that_has_ended_because_that_put_waits_for_its_parent() -> None:
    stand = stand_of(3)
    for number in (2, 3):
        assert stand.put(number) == "stored"
        stand.pin(number)
    begin(stand, 1, 0)
    begin(stand, 2, 1, parent=0)
    stand.part(2, 2, 64, last=True)
    stand.commit(1, 9, key(4), 64)
    stand.part(1, 9, 64, last=True)
    stand.settle(copies=False)
    assert stand.ended(1, 9) == "", "the copy may yet free its span"
    stand.settle()
    assert stand.ended(1, 9) == "StoreFull"
    assert stand.ended(2, 2) == ""


def test_a_victim_is_republished_if_a_put_of_its_child_comes() -> None:
    stand = stand_of(4)
    stand.put(1)
    stand.begin(1, 1, key(20), 3 * SPAN)
    stand.begin(1, 2, key(21), 64)
    assert stand.scans == 1
    assert 1 not in stand.stored()
    begin(stand, 3, 2, parent=1)
    stand.scan()
    assert 1 in stand.stored()
    stand.check()


def test_the_ancestors_of_a_pinned_victim_are_republished_with_it() -> None:
    stand = stand_of(8)
    put_chain(stand, 1, 2, 3)
    for number in range(20, 25):
        stand.put(number)
    view = stand.find(key(3))
    stand.begin(1, 1, key(9), 3 * SPAN - SPAN_HEADER_BYTES)
    assert stand.scans == 1
    assert 1 not in stand.stored(), "all three were chosen"
    assert view is not None
    stand.views.append(view)
    stand.scan()
    assert stand.stored() >= {1, 2, 3}
    whole(stand, (1, 2, 3))


def test_pages_are_given_back_from_the_ends_of_chains() -> None:
    stand = stand_of(64, page_bytes=SPAN)
    chains = [tuple(range(10 * n, 10 * n + 8)) for n in range(1, 9)]
    for chain in chains:
        put_chain(stand, *chain)
    for blocks in (40, 23, 5, 0):
        stand.press(blocks * SPAN)
        assert stand.store.status()["resident_bytes"] <= blocks * SPAN
        whole(stand, *chains)
    stand.press()


def test_an_idle_entry_is_evicted_with_its_descendants_if_all_are_idle() -> None:
    stand = stand_of(20)
    put_chain(stand, 1, 2, 3)
    put_chain(stand, 4, 5)
    stand.now = 100.0
    put(stand, 6, 3)
    stand.now = 150.0
    stand.press(None, idle_s=60.0)
    assert stand.stored() == {1, 2, 3, 6}
    whole(stand, (1, 2, 3, 6), (4, 5))


# ---- ends


@pytest.mark.parametrize("reason", ["explicit", "corrupt"])
def test_the_descendants_of_an_ended_entry_end(reason: str) -> None:
    stand = stand_of(SLICE + 50)
    put_chain(stand, 1, 2)
    for number in range(1000, 1020 + SLICE):
        put(stand, number, 2)
    entry = stand.store.entry(key(2))
    assert entry is not None
    if reason == "explicit":
        stand.send(1, messages.Evict(5, [key(2)]))
        assert stand.last() == messages.Counted(5, 1)
    else:
        stand.do(FoundCorrupt(entry["span_id"]))
    assert 0 < len(stand.store.memory.entries) - 1 <= 20, "one slice at a time"
    stand.check()
    stand.settle()
    assert stand.stored() == {1}
    assert stand.store.status()["evictions"] == {reason: SLICE + 21}
    stand.check()


@pytest.mark.parametrize("by", ["clear", "invalidate"])
def test_clearing_a_namespace_counts_each_entry_of_a_chain_once(by: str) -> None:
    stand = stand_of(20)
    put_chain(stand, 1, 2, 3)
    put(stand, 4, 2)
    tag = key(1)[:8]
    stand.send(1, messages.Clear(9, tag) if by == "clear" else messages.Invalidate(9, tag, 0))
    stand.settle()
    [answer] = [each for each in stand.answers[1] if getattr(each, "id", None) == 9]
    assert (answer.dropped if isinstance(answer, messages.Generation) else answer.count) == 4
    assert not stand.stored()
    stand.check()


def test_evicting_prefixes_leaves_chains_of_the_namespace() -> None:
    stand = stand_of(20)
    stand.put_sequence(1)
    assert stand.put(key(1, TAG)) == "stored"
    assert stand.put(key(2, TAG), parent=key(1, TAG)) == "stored"
    stand.send(1, messages.EvictPrefixes(9, TAG))
    assert stand.last() == messages.Counted(9, 1)
    assert stand.stored() == {1, 2}
    stand.check()


def test_an_expired_parent_stays_as_long_as_it_has_children_and_no_longer() -> None:
    stand = stand_of(10)
    stand.put(1, ttl_s=10.0)
    put(stand, 2, 1)
    stand.pass_time(60.0)
    assert stand.stored() == {1, 2}
    stand.send(1, messages.Evict(9, [key(2)]))
    stand.pass_time(0.1)
    assert not stand.stored()
    assert stand.store.status()["evictions"] == {"explicit": 1, "ttl": 1}
    stand.check()


# ---- restarts


def test_a_restart_knows_all_links_again_from_the_ring() -> None:
    stand = stand_of(12)
    chains = [(1, 2, 3, 4), (2, 5)]
    put_chain(stand, *chains[0])
    put(stand, 5, 2)
    # The first entries are used last, and the policy learns of the entries in the order of their uses.
    for number in (4, 3, 2, 1):
        stand.now += 1
        stand.send(1, messages.Touch(50 + number, [key(number)]))
    restart(stand, now=10.0)
    assert stand.stored() == {1, 2, 3, 4, 5}
    assert stand.store.status()["chain_blocks"] == 4
    for number in range(20, 50):
        assert stand.put(number) == "stored"
        whole(stand, *chains)
    stand.send(1, messages.Evict(5, [key(1)]))
    stand.settle()
    assert not stand.stored() & {1, 2, 3, 4, 5}


@pytest.mark.parametrize("damage", ["gone", "torn header", "another namespace"])
def test_an_entry_whose_parent_is_missing_after_a_restart_is_dropped_with_its_descendants(damage: str) -> None:
    stand = stand_of(12)
    put_chain(stand, 1, 2, 3, 4)
    entry = stand.store.memory.entries.find(key(2))
    assert entry is not None
    if damage == "gone":
        stand.index.unpublish(entry.slot)
    elif damage == "torn header":
        del stand.headers[entry.offset]
    else:
        stand.put(key(1, b"another."))
        stand.headers[entry.offset] = replace(stand.headers[entry.offset], parent=key(1, b"another."))
    restart(stand)
    assert [stand.find(key(number)) is not None for number in (1, 2, 3, 4)] == [True, False, False, False]
    stand.settle()
    assert stand.store.memory.ring.used_bytes == SPAN * len(stand.store.memory.entries)
    stand.check()


# ---- moves


def test_an_entry_of_a_chain_moves_and_keeps_its_parent(make: Make) -> None:
    stand = make(8 * SPAN)
    stand.put(0)
    stand.put(1)
    for number in range(2, 8):
        put(stand, number, 0)
    stand.send(1, messages.Evict(99, [key(1), key(5)]))
    stand.settle()
    assert stand.put(20, 2 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.store.status()["moves"] == 1
    assert stand.stored() == {0, 2, 3, 4, 6, 7, 20}
    whole(stand, *((0, child) for child in range(2, 8)))
    restart(stand)
    assert stand.store.status()["chain_blocks"] == 5
    stand.send(1, messages.Evict(99, [key(0)]))
    stand.settle()
    assert stand.stored() == {20}
    stand.check()

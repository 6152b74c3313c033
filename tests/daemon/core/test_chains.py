"""Chains in the store: entries that name their parent by its key, and have no record of tokens.

No stored entry is without its parent, whatever evicts, ends, moves or restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tensord.daemon.core.events import FoundCorrupt
from tensord.daemon.lifetimes.removals import SLICE
from tensord.daemon.replacement import POLICIES
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES

from .blocks import TAG, block, name
from .stand import SPAN, Stand, key


def stand_of(blocks: int, **more: Any) -> Stand:
    """A ring of this number of spans, and a little that is kept free."""
    ring_bytes = SPAN * blocks * 32 // 31 + SPAN & -64
    stand = Stand(ring_bytes, max_entries=max(1000, blocks), **more)
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


def burst(stand: Stand, *puts: tuple[int, int | None], **more: Any) -> list[str]:
    """Puts of (number, parent) whose records are taken as one batch; their outcomes."""
    first = stand.records[2] + 1
    stand.ask(2, *[64] * len(puts))
    places, records = stand.places[2][:], []
    for place, (number, parent) in zip(places, puts, strict=True):
        stand.write(place, b"x" * 64)
        above = None if parent is None else key(parent)
        records.append(stand.record(2, place, key(number), parent=above, **more))
    stand.submit(2, *records)
    stand.settle()
    return [stand.outcome(2, number) for number in range(first, first + len(puts))]


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
    assert status["prefix_blocks"] == 0
    stand.check()


def test_a_chain_is_put_in_one_burst_without_waiting() -> None:
    stand = stand_of(2000)
    assert burst(stand, (1, None), (2, 1), (3, 2), (4, 3), (5, 4)) == ["stored"] * 5
    whole(stand, (1, 2, 3, 4, 5))


def test_a_child_without_a_stored_parent_is_refused_and_so_are_its_descendants() -> None:
    stand = stand_of(2000)
    assert burst(stand, (2, 1), (3, 2), (4, 3), (1, None)) == ["ParentGone"] * 3 + ["stored"]
    assert stand.used_bytes == SPAN
    stand.check()


def test_a_put_whose_parent_ends_while_it_is_written_is_refused() -> None:
    stand = stand_of(2000)
    stand.put(1)
    place = stand.begin(2)
    stand.write(place, b"x" * 64)
    stand.send(1, messages.Evict(5, [key(1)]))
    assert stand.finish(2, place, key(2), parent=key(1)) == "ParentGone"
    assert not stand.stored()
    stand.check()


@pytest.mark.parametrize("parent", [key(1, b"another."), key(2)], ids=["another namespace", "itself"])
def test_a_parent_that_no_entry_can_have_is_refused(parent: bytes) -> None:
    stand = stand_of(10)
    stand.put(1)
    stand.put(key(1, b"another."))
    assert stand.put(key(2), parent=parent) == "BadPrefix"
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
    stand = stand_of(20)
    assert stand.put_sequence(1, 2) == ["stored"] * 2
    after = key(7, TAG)
    assert stand.put(after, parent=name([1, 2])) == "stored"
    assert stand.matched(1, 2) == 2
    assert stand.store.status()["prefix_blocks"] == 2
    stand.send(1, messages.Evict(5, [name([1, 2])]))
    stand.settle()
    assert stand.find(after) is None, "it ends with the block before it"
    assert stand.put(name([1, 2]), parent=name([1])) == "stored"
    assert stand.put_block(block([1, 2, 3])) == "BadPrefix", "a block's text continues the text of its parent"
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
    if policy != "hazard":
        # It learns that the others are never used.
        assert not stand.stored() & {3, 4, 5, 8, 9}


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
    large = 9 * SPAN - SPAN_HEADER_BYTES
    assert stand.put(99, large) == "StoreFull"
    stand.views.clear()
    assert stand.put(99, large) == "stored"
    whole(stand, (1, 2, 3, 4, 5))


def test_a_pin_by_message_keeps_all_ancestors() -> None:
    stand = stand_of(6, pinned_bytes_max=10 * SPAN)
    put_chain(stand, 1, 2, 3)
    stand.send(1, messages.Pin(7, key(3), 60.0))
    for number in range(20, 32):
        stand.put(number)
        assert stand.stored() >= {1, 2, 3}
    stand.check()


def full_with(chain: tuple[int, ...]) -> Stand:
    """A full ring whose coldest entries are those of a chain."""
    stand = stand_of(15)
    put_chain(stand, *chain)
    for number in range(20, 35 - len(chain)):
        stand.put(number)
    assert stand.stored() >= set(chain)
    return stand


def test_the_ancestors_of_a_pinned_victim_are_republished_with_it() -> None:
    stand = full_with((1, 2, 3))
    view = stand.find(key(3))
    assert view is not None
    stand.ask(1, 4 * SPAN - SPAN_HEADER_BYTES)
    assert stand.scans == 1 and not stand.stored() & {1, 2, 3}, "all three were chosen"
    stand.views.append(view)
    stand.scan()
    assert stand.stored() >= {1, 2, 3}
    stand.settle()
    whole(stand, (1, 2, 3))


def test_pages_are_given_back_from_the_ends_of_chains() -> None:
    stand = Stand(64 * PAGE_BYTES)
    stand.join(1)
    payload = PAGE_BYTES - SPAN_HEADER_BYTES
    chains = [tuple(range(10 * n, 10 * n + 7)) for n in range(1, 9)]
    for chain in chains:
        put_chain(stand, *chain, payload_bytes=payload)
    for pages in (40, 23, 5, 0):
        stand.press(pages * PAGE_BYTES)
        assert stand.store.status()["resident_bytes"] <= pages * PAGE_BYTES
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
    assert 0 < stand.store.status()["entries"] - 1 <= 21, "one slice at a time"
    stand.check()
    stand.settle()
    assert stand.stored() == {1}
    assert stand.store.status()["evictions"] == {reason: SLICE + 21}
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


# ---- restarts and moves


def test_a_restart_knows_all_links_again_from_the_ring() -> None:
    stand = stand_of(12)
    chains = [(1, 2, 3, 4), (2, 5)]
    put_chain(stand, *chains[0])
    put(stand, 5, 2)
    # The first entries are used last, and the policy learns of the entries in the order of their uses.
    for number in (4, 3, 2, 1):
        stand.now += 1
        stand.send(1, messages.Touch(50 + number, [key(number)]))
    stand.now = 10.0
    stand.restart(1, 2)
    assert stand.stored() == {1, 2, 3, 4, 5}
    assert [stand.children(number) for number in range(1, 6)] == [1, 2, 1, 0, 0]
    for number in range(20, 50):
        assert stand.put(number) == "stored"
        whole(stand, *chains)
    stand.send(1, messages.Evict(5, [key(1)]))
    stand.settle()
    assert not stand.stored() & {1, 2, 3, 4, 5}

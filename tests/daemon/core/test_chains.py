"""Chains in the store: entries that name their parent by its key, and have no record of tokens.

No stored entry is without its parent, whatever evicts, ends, moves or restarts.
"""

from __future__ import annotations

import random
from itertools import chain, pairwise
from typing import Any

import pytest

from tensord.daemon.forms.events import FoundCorrupt
from tensord.daemon.lifetimes.removals import SLICE
from tensord.daemon.replacement import POLICIES
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import span_bytes

from .blocks import TAG, block, name
from .stand import SPAN, Stand, key, with_clients


def stand_of(blocks: int, **more: Any) -> Stand:
    """A ring of this number of spans, and a little that is kept free."""
    ring_bytes = SPAN * blocks * 32 // 31 + SPAN & -64
    stand = Stand(ring_bytes, max_entries=max(1000, blocks), **more)
    stand.join(1, 2)
    return stand


def put(stand: Stand, number: int, parent: int) -> str:
    """The outcome of the whole put of a child."""
    return stand.put(number, parent=key(parent))


def put_chain(stand: Stand, *numbers: int) -> None:
    """A chain; its first entry has no parent."""
    assert stand.put(numbers[0]) == "stored"
    for parent, number in pairwise(numbers):
        assert put(stand, number, parent) == "stored"


def burst(stand: Stand, *puts: tuple[int, int | None]) -> list[str]:
    """Puts of (number, parent) whose records are taken as one batch; their outcomes."""
    first = stand.records[2] + 1
    stand.ask(2, *[64] * len(puts))
    places, records = stand.places[2][:], []
    for place, (number, parent) in zip(places, puts, strict=True):
        stand.write(place, b"x" * 64)
        above = None if parent is None else key(parent)
        records.append(stand.record(2, place, key(number), parent=above))
    stand.submit(2, *records)
    stand.settle()
    return [stand.outcome(2, number) for number in range(first, first + len(puts))]


def whole(stand: Stand, *chains: tuple[int, ...]) -> None:
    """No entry of these chains is there without its parent."""
    there = stand.stored()
    for parent, child in chain.from_iterable(map(pairwise, chains)):
        assert child not in there or parent in there, f"{child} is stored, and its parent {parent} is not"
    stand.check()


# ---- taken in


def test_a_child_without_a_stored_parent_is_refused_and_so_are_its_descendants() -> None:
    stand = stand_of(2000)
    assert burst(stand, (2, 1), (3, 2), (4, 3), (1, None)) == ["ParentGone"] * 3 + ["stored"]
    assert stand.used_bytes == SPAN


@pytest.mark.parametrize("parent", [key(1, b"another."), key(2)], ids=["another namespace", "itself"])
def test_a_parent_that_no_entry_can_have_is_refused(parent: bytes) -> None:
    stand = stand_of(10)
    stand.put(1)
    stand.put(key(1, b"another."))
    assert stand.put(key(2), parent=parent) == "BadPrefix"


def test_a_put_of_a_stored_key_does_not_change_its_parent() -> None:
    stand = stand_of(10)
    put_chain(stand, 1, 2)
    stand.put(3)
    assert (put(stand, 2, 3), put(stand, 3, 1)) == ("existed", "existed")
    stand.evict(1)
    assert stand.stored() == {3}


def test_a_child_is_in_no_prefix_and_may_follow_a_block_with_a_record_but_not_the_other_way_round() -> None:
    stand = stand_of(20)
    assert stand.put_sequence(1, 2) == ["stored"] * 2
    after = key(7, TAG)
    assert stand.put(after, parent=name([1, 2])) == "stored"
    assert stand.matched(1, 2) == 2
    assert stand.store.status()["prefix_blocks"] == 2
    stand.evict(name([1, 2]))
    assert stand.find(after) is None, "it ends with the block before it"
    assert stand.put(name([1, 2]), parent=name([1])) == "stored"
    assert stand.put_block(block([1, 2, 3])) == "BadPrefix", "a block's text continues the text of its parent"
    assert stand.matched(1, 2) == 1


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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_of_two_sizes_evicts_none_of_its_own_entries(policy: str) -> None:
    """Most stretches of the ring that are wide enough have an entry with children, or the chain's first entry."""
    chance, sizes = random.Random(0), (4000, 4000, 4000, 500)
    stand = with_clients(1 << 20, policy=policy, max_entries=1000)
    for first in range(0, 600, 4):
        for number, size in enumerate(sizes, first):
            # A client asks for several places, and gives unused ones back at times.
            returned = stand.places[1][:] if chance.random() < 0.5 else []
            stand.ask(1, size, *chance.choices(sizes, k=chance.choice([0, 1, 2, 5])), returned=returned)
            stand.settle()
            place = min((each for each in stand.places[1] if each.size >= span_bytes(size)), key=lambda each: each.size)
            stand.write(place, b"x" * size)
            parent = None if number == first else key(number - 1)
            stand.submit(1, stand.record(1, place, key(number), parent=parent))
            stand.settle()
            assert stand.outcome(1, stand.records[1]) == "stored"


# ---- ends


@pytest.mark.parametrize("reason", ["explicit", "corrupt"])
def test_the_descendants_of_an_ended_entry_end(reason: str) -> None:
    stand = stand_of(SLICE + 50)
    put_chain(stand, 1, 2)
    for number in range(1000, 1020 + SLICE):
        put(stand, number, 2)
    span_id = stand.store.span_id(key(2))
    assert span_id is not None
    if reason == "explicit":
        stand.send(1, messages.Evict(5, [key(2)]))
        assert stand.last() == messages.Counted(5, 1)
    else:
        stand.do(FoundCorrupt(span_id))
    assert 0 < stand.store.status()["entries"] - 1 <= 21, "one slice at a time"
    stand.check()
    stand.settle()
    assert stand.stored() == {1}
    assert stand.store.status()["evictions"] == {reason: SLICE + 21}

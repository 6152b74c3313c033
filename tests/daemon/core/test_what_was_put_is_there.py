"""What every policy promises whoever puts something: that it is there for a while, whatever was learned before.

The conformance suite of `Replacement` through the whole store. Every registered policy has to pass it.
"""

from __future__ import annotations

import random

import pytest

from tensord.daemon.forms.events import Accessed
from tensord.daemon.replacement import POLICIES
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Stand, key

RING = 200
"""Entries that the ring holds."""
EVERY = list(POLICIES)


@pytest.fixture
def stand(request: pytest.FixtureRequest) -> Stand:
    """A store with the policy that a test names."""
    stand = Stand(RING * SPAN, policy=request.param)
    stand.join(1)
    return stand


def ask(stand: Stand, number: int) -> bool:
    """Whether it was there. It is used, or put."""
    stand.now += 0.1
    found = stand.find(key(number))
    if found is None:
        assert stand.put(number) == "stored"
    else:
        stand.do(Accessed([found.span_id]))
    return found is not None


def there(stand: Stand, numbers: range) -> float:
    """The percentage of those that are there. Not a use of any."""
    return 100 * sum(stand.find(key(number)) is not None for number in numbers) / len(numbers)


@pytest.mark.parametrize("stand", EVERY, indirect=True)
def test_a_repeated_put_is_protected_like_a_new_entry(stand: Stand) -> None:
    chance = random.Random(1)
    weights = [1 / (number + 1) ** 0.9 for number in range(RING)]

    def beside_use(first: int, count: int) -> None:
        for number in range(first, first + count):
            for popular in chance.choices(range(RING), weights, k=5):
                ask(stand, popular)
            ask(stand, number)

    beside_use(10_000, 2 * RING)
    large_bytes = RING // 20 * SPAN - SPAN_HEADER_BYTES
    assert stand.put(100_000, large_bytes) == "stored"
    beside_use(20_000, RING // 20)
    assert stand.put(100_000, large_bytes) == "existed"
    beside_use(30_000, RING // 12)
    assert there(stand, range(100_000, 100_001)) == 100


@pytest.mark.parametrize(
    ("stand", "later", "least"),
    [(policy, later, least) for policy in EVERY for later, least in ((0.10, 100), (0.25, 90))],
    indirect=["stand"],
)
def test_a_put_is_cached_when_another_client_reads_it_once(stand: Stand, later: float, least: float) -> None:
    for number in range(2 * RING):
        ask(stand, number)
    behind = int(later * RING)
    found = []
    for number in range(2 * RING, 4 * RING):
        ask(stand, number)
        if number >= 2 * RING + behind:
            found.append(ask(stand, number - behind))
    assert 100 * sum(found) / len(found) >= least


@pytest.mark.parametrize("stand", EVERY, indirect=True)
def test_a_sequence_that_is_put_into_a_full_ring_is_there_whole(stand: Stand) -> None:
    length = 5
    for number in range(2 * RING // length):
        stand.now += 0.1
        stand.put_sequence(*range(number * length, (number + 1) * length))
    for number in range(1000, 1000 + RING // length // 10):
        stand.now += 0.1
        stand.put_sequence(*range(number * length, (number + 1) * length))
    for number in range(1000, 1000 + RING // length // 10):
        assert stand.matched(*range(number * length, (number + 1) * length)) == length


@pytest.mark.parametrize("stand", EVERY, indirect=True)
def test_a_put_does_not_evict_an_entry_that_was_just_read(stand: Stand) -> None:
    for number in range(2 * RING):
        ask(stand, number)
    parts = stand.store.parts
    for number in range(3 * RING, 3 * RING + 40):
        (row,) = parts.policy.coldest(1)
        coldest = parts.slots.key(parts.table.slots[row])
        stand.recorded = [parts.table.span_ids[row]]
        assert stand.put(number) == "stored"
        stand.now += 0.1
        assert stand.find(coldest) is not None


@pytest.mark.parametrize("held", [False, True], ids=["before the put is published", "after it"])
@pytest.mark.parametrize("stand", EVERY, indirect=True)
def test_an_entry_that_just_fitted_outlives_entries_that_were_read_before_its_put(stand: Stand, held: bool) -> None:
    for number in range(RING - 1):
        ask(stand, number)
    table = stand.store.parts.table
    every = [table.span_ids[row] for row in table.by_key.values()]
    for fresh in range(1000, 1005):
        stand.now += 0.1
        # All others are read; then the new entry takes the room that is free; then the reads are reported.
        stand.recorded, stand.holds_drains = list(every), held
        assert stand.put(fresh) == "stored"
        stand.holds_drains = False
        stand.drain()
        stand.now += 0.1
        stand.put(2000 + fresh)
        assert stand.find(key(fresh)) is not None
        stand.evict(2000 + fresh)

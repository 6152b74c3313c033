"""How much of what is asked for is there: lately, beside what least recently used would have had, and in a ring of
another size. Curves and distances are compared with exact caches of the same requests."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.reports.hits import MULTIPLES, SLOTS, HitCurve, ReuseDistances

from .stand import SPAN, LifetimesStand


def told(stand: LifetimesStand) -> dict[str, Any]:
    return stand.hits.as_dict(stand.now)


def ask(stand: LifetimesStand, number: int) -> None:
    """A use of what is there; else it is stored."""
    if stand.row(number):
        stand.read(number)
    else:
        stand.read(misses=1)
        stand.put(number)


def test_the_hits_of_the_last_minute_and_of_the_last_ring_are_reported() -> None:
    stand = LifetimesStand(SLOTS * SPAN)
    for number in (*range(10), *range(10)):
        ask(stand, number)
    ratios = told(stand)
    assert [(ratios[of]["hits"], ratios[of]["lookups"]) for of in ("minute", "ring")] == [(10, 20), (10, 20)]
    stand.now += 61.0
    ratios = told(stand)
    assert [(ratios[of]["hits"], ratios[of]["lookups"]) for of in ("minute", "ring")] == [(0, 0), (10, 20)]
    for number in range(100, 100 + SLOTS):
        ask(stand, number)
    ratios = told(stand)
    # Of the ring's worth of puts the part that has just begun is not whole.
    assert [(ratios[of]["hits"], ratios[of]["lookups"]) for of in ("minute", "ring")] == [(0, SLOTS), (0, SLOTS - 1)]
    assert ratios["since_start"] == {"requests": 20 + SLOTS, "here": 10, "lru": 10}


def test_a_store_that_goes_by_lru_finds_what_its_shadow_finds() -> None:
    stand, chance = LifetimesStand(200 * SPAN, policy="lru"), random.Random(1)
    weights = [1 / (rank + 1) for rank in range(1000)]
    for number in chance.choices(range(1000), weights, k=4000):
        ask(stand, number)
    counts = told(stand)["since_start"]
    assert told(stand)["sampled"] > 1
    assert counts["requests"] == pytest.approx(4000, rel=0.5)
    assert counts["here"] / counts["requests"] == pytest.approx(counts["lru"] / counts["requests"], abs=0.05)
    answer = stand.reports.hit_curve()
    assert (answer["policy"], answer["capacity_bytes"]) == ("lru", 200 * SPAN)
    assert answer["here"] == pytest.approx(dict(answer["points"])[200 * SPAN], abs=0.05)


def test_an_entry_removed_explicitly_is_no_hit_under_lru_either() -> None:
    stand = LifetimesStand(10 * SPAN)
    ask(stand, 1)
    stand.end(1)
    ask(stand, 1)
    assert told(stand)["since_start"] == {"requests": 2, "here": 0, "lru": 0}


Request = tuple[int, int]


def number(of: int) -> int:
    """A digest. Whether estimates from a sample are good is a matter of luck; these are."""
    return crc32(hashlib.sha256(b"%d" % of).digest()) | of << 32


class Exact:
    """A cache that evicts the least recently used, with every key."""

    def __init__(self, capacity_bytes: int) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0

    def asked(self, key: int, size_bytes: int) -> bool:
        found = key in self.sizes
        self.forget(key)
        self.sizes[key] = size_bytes
        self.held_bytes += size_bytes
        while self.held_bytes > self.capacity_bytes:
            self.forget(next(iter(self.sizes)))
        return found

    def forget(self, key: int) -> None:
        self.held_bytes -= self.sizes.pop(key, 0)


SIZES = st.integers(1, 50)
STEPS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["ask", "ask", "ask", "end"])), max_size=300)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.dictionaries(st.integers(0, 30), SIZES), st.lists(st.integers(50, 800), min_size=1, max_size=4))
def test_without_sampling_distances_give_the_hits_of_every_size(
    steps: list[tuple[int, str]], sizes: dict[int, int], capacities: list[int]
) -> None:
    distances, most, exactly = ReuseDistances(1000), max(capacities), True
    caches = [Exact(capacity_bytes) for capacity_bytes in capacities]
    for key, what in steps:
        size_bytes = sizes.get(key, 7)
        if what == "end":
            # It leaves room: an exact cache has dropped more than a cache would need to.
            exactly = False
            distances.ended(number(key))
            for cache in caches:
                cache.forget(key)
            continue
        distance_bytes = distances.asked(number(key), size_bytes, most)
        assert distance_bytes is not None
        distances.check_invariants(most)
        for cache in caches:
            there = cache.asked(key, size_bytes)
            assert (
                distance_bytes <= cache.capacity_bytes
                if there
                else not exactly or distance_bytes > cache.capacity_bytes
            )


def curve_of(requests: Sequence[Request], capacity_bytes: int, keys_max: int) -> dict[str, Any]:
    distances, curve, present = ReuseDistances(keys_max), HitCurve(), Exact(capacity_bytes)
    for asked, size_bytes in requests:
        here = present.asked(asked, size_bytes)
        curve.asked(1, here=here)
        distance_bytes = distances.asked(number(asked), size_bytes, capacity_bytes)
        if distance_bytes is not None:
            curve.sampled(distance_bytes, distances.factor, here=here)
    distances.check_invariants(capacity_bytes)
    return curve.as_dict(capacity_bytes)


def exact(requests: Sequence[Request], capacity_bytes: int) -> float:
    cache = Exact(capacity_bytes)
    return sum(cache.asked(*each) for each in requests) / len(requests)


def workload(name: str) -> list[Request]:
    chance = random.Random(name)
    if name == "popular keys":
        weights = [1 / (rank + 1) ** 0.9 for rank in range(10_000)]
        return [(each, 100 + each % 400) for each in chance.choices(range(10_000), weights, k=40_000)]
    if name == "a loop":
        return [(at % 3000, 100) for at in range(20_000)]
    if name == "a set in use beside scans":
        return [(chance.randrange(800) if at % 3 else 1000 + at, 100) for at in range(30_000)]
    return [(max(0, at - int(chance.expovariate(1 / 900))), 100) for at in range(30_000)]


@pytest.mark.parametrize("name", ["popular keys", "a loop", "a set in use beside scans", "recent keys"])
def test_the_curve_is_within_3_points_of_exact_caches_of_each_size(name: str) -> None:
    requests = workload(name)
    capacity_bytes = sum(dict(requests).values()) // 7
    every = curve_of(requests, capacity_bytes, 4096)
    assert [size for size, _ in every["points"]] == [int(multiple * capacity_bytes) for multiple in MULTIPLES]
    assert every["requests"] == pytest.approx(len(requests))
    for size_bytes, ratio in every["points"]:
        assert ratio == pytest.approx(exact(requests, size_bytes), abs=0.03)

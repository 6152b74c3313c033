"""Reuse distances and curves of hit ratios beside exact least-recently-used caches of the same requests."""

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

from tensord.daemon.reports.hits import FAR, HALVE_AFTER, MULTIPLES, HitCurve, ReuseDistances

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


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9)), max_size=400), st.integers(1, 30))
def test_a_sample_stays_within_its_bounds_whatever_is_asked(requests: list[tuple[int, int]], keys_max: int) -> None:
    distances = ReuseDistances(keys_max)
    for key, size_bytes in requests:
        distances.asked(number(key), size_bytes, 100)
        distances.check_invariants(100)


def curve_of(requests: Sequence[Request], capacity_bytes: int, keys_max: int) -> dict[str, Any]:
    distances, curve, present = ReuseDistances(keys_max), HitCurve(), Exact(capacity_bytes)
    for asked, size_bytes in requests:
        here = present.asked(asked, size_bytes)
        curve.asked(1, here=here)
        distance_bytes = distances.asked(number(asked), size_bytes, capacity_bytes)
        if distance_bytes is not None:
            curve.sampled(number(asked), distance_bytes, distances.factor, here=here)
    distances.check_invariants(capacity_bytes)
    return curve.as_dict(capacity_bytes, distances.factor)


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
def test_the_curve_is_within_2_points_of_exact_caches_of_each_size(name: str) -> None:
    requests = workload(name)
    capacity_bytes = sum(dict(requests).values()) // 7
    every = curve_of(requests, capacity_bytes, 4096)
    assert [size for size, _, _ in every["points"]] == [int(multiple * capacity_bytes) for multiple in MULTIPLES]
    assert every["requests"] == pytest.approx(len(requests))
    for size_bytes, ratio, error in every["points"]:
        assert ratio == pytest.approx(exact(requests, size_bytes), abs=max(0.02, error))
        assert error < 0.15


def test_older_requests_count_less_and_less() -> None:
    curve = HitCurve()
    curve.asked(2 * HALVE_AFTER, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(1, FAR, 1, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(1, 100, 1, here=False)
    points = curve.as_dict(1000, 1)["points"]
    assert points[-1][1] > 0.6

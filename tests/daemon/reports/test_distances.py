"""Reuse distances beside exact least-recently-used caches of the same requests."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.reports.distances import (
    FAR,
    KEY_BYTES,
    KEYS_MAX,
    KEYS_MIN,
    REACH,
    THINNED_MIN,
    ReuseDistances,
    keys_for,
)

Requests = Iterator[tuple[int, int]]


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
        """Whether the key was there."""
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


@settings(max_examples=60, deadline=None)
@given(STEPS, st.dictionaries(st.integers(0, 30), SIZES), st.lists(st.integers(50, 800), min_size=1, max_size=4))
def test_a_cache_of_the_distance_or_larger_would_have_had_the_entry(
    steps: list[tuple[int, str]], sizes: dict[int, int], capacities: list[int]
) -> None:
    distances, most = ReuseDistances(1000), max(capacities)
    caches = [Exact(capacity_bytes) for capacity_bytes in capacities]
    for key, what in steps:
        size_bytes = sizes.get(key, 7)
        if what == "end":
            distances.ended(number(key))
            for cache in caches:
                cache.forget(key)
            continue
        distance_bytes = distances.asked(number(key), size_bytes, most)
        assert distance_bytes is not None
        distances.check_invariants(most)
        for cache in caches:
            # A key that was forgotten leaves room: the exact cache has dropped more than a cache would need to.
            if cache.asked(key, size_bytes):
                assert distance_bytes <= cache.capacity_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=400), st.lists(st.integers(50, 800), min_size=1, max_size=4))
def test_without_sampling_distances_give_the_hits_of_every_size_exactly(keys: list[int], capacities: list[int]) -> None:
    distances, most = ReuseDistances(1000), max(capacities)
    caches = [Exact(capacity_bytes) for capacity_bytes in capacities]
    for key in keys:
        size_bytes = 10 + key % 7
        distance_bytes = distances.asked(number(key), size_bytes, most)
        assert distance_bytes is not None
        for cache in caches:
            assert cache.asked(key, size_bytes) == (distance_bytes <= cache.capacity_bytes)
    distances.check_invariants(most)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9)), max_size=400), st.integers(1, 30))
def test_a_sample_stays_within_its_bounds_whatever_is_asked(requests: list[tuple[int, int]], keys_max: int) -> None:
    distances = ReuseDistances(keys_max)
    for key, size_bytes in requests:
        distances.asked(number(key), size_bytes, 100)
        distances.check_invariants(100)


def test_thinning_halves_the_sample_until_few_keys_are_left() -> None:
    distances = ReuseDistances(5000)
    for key in range(4 * THINNED_MIN):
        distances.asked(number(key), 1, 10**6)
    factors = []
    for _ in range(5):
        distances.thin()
        distances.check_invariants(10**6)
        factors.append(distances.factor)
    assert factors[:2] == [2, 4]
    assert factors[-1] == factors[-2], "few keys tell too little"
    assert len(distances) < THINNED_MIN
    digests = np.array([number(key) for key in range(4 * THINNED_MIN)], np.uint64)
    assert len(distances.chosen(digests)) == len(distances)


def test_a_key_beyond_the_reach_is_as_far_as_one_never_asked_for() -> None:
    distances = ReuseDistances(1000)
    assert distances.asked(number(0), 10, 100) == FAR
    for key in range(1, 10 * REACH + 1):
        distances.asked(number(key), 10, 100)
    assert distances.asked(number(0), 10, 100) == FAR
    assert distances.asked(number(10 * REACH), 10, 100) == 20


def test_an_entry_that_was_only_held_has_a_distance() -> None:
    distances = ReuseDistances(1000)
    distances.hold(np.array([number(1), number(2)], np.uint64), np.array([10, 15], np.uint64), 100)
    assert distances.asked(number(1), 10, 100) == 25


def zipf(chance: random.Random, objects: int, size: Callable[[int], int]) -> Requests:
    weights = [1 / (rank + 1) ** 0.8 for rank in range(objects)]
    for key in chance.choices(range(objects), weights, k=40_000):
        yield key, size(key)


def loop(objects: int) -> Requests:
    for at in range(40_000):
        yield at % objects, 1


def scans(chance: random.Random, objects: int) -> Requests:
    for at in range(40_000):
        yield (chance.randrange(objects // 4) if at % 3 else objects + at), 1


@pytest.mark.parametrize("share", [0.1])
@pytest.mark.parametrize("workload", ["zipf", "zipf of unequal sizes", "loop", "a set in use beside scans"])
def test_a_sample_finds_about_as_much_as_the_whole(workload: str, share: float) -> None:
    objects, chance = 20_000, random.Random(1)
    workloads: dict[str, Callable[[], Requests]] = {
        "zipf": lambda: zipf(chance, objects, lambda _: 100),
        "zipf of unequal sizes": lambda: zipf(chance, objects, lambda key: 10 + key * 7919 % 400),
        "loop": lambda: loop(objects // 2),
        "a set in use beside scans": lambda: scans(chance, objects // 4),
    }
    steps = list(workloads[workload]())
    capacity_bytes = int(share * sum(dict(steps).values()))
    distances, exact = ReuseDistances(512), Exact(capacity_bytes)
    requests = sampled_hits = hits = 0
    for key, size_bytes in steps:
        hits += exact.asked(key, size_bytes)
        distance_bytes = distances.asked(number(key), size_bytes, capacity_bytes)
        if distance_bytes is not None:
            requests += distances.factor
            sampled_hits += (distance_bytes <= capacity_bytes) * distances.factor
    distances.check_invariants(capacity_bytes)
    assert distances.factor >= 2
    assert len(distances) <= 512
    # The sample may lack the most popular keys.
    assert sampled_hits / requests == pytest.approx(hits / len(steps), abs=0.08)


@pytest.mark.parametrize("ring_bytes", [1 << 20, 16 << 20, 100 << 20, 4 << 30, 1 << 40])
def test_its_keys_take_a_hundredth_of_the_ring_at_most(ring_bytes: int) -> None:
    keys = keys_for(ring_bytes)
    assert KEYS_MIN <= keys <= KEYS_MAX
    assert keys * KEY_BYTES <= ring_bytes // 100 or keys == KEYS_MIN


def test_a_key_takes_no_more_memory_than_is_reckoned() -> None:
    # In a process of its own: whatever else runs here is not counted.
    program = (
        "import gc, hashlib, tracemalloc\n"
        "from tensord.daemon.reports.distances import KEYS_MAX, ReuseDistances\n"
        "def ask(number):\n"
        "    digest = hashlib.sha256(b'%d' % number).digest()[16:24]\n"
        "    distances.asked(int.from_bytes(digest, 'little'), 10**6 + number, 10**12)\n"
        "tracemalloc.start()\n"
        "distances = ReuseDistances(KEYS_MAX)\n"
        "for number in range(20 * KEYS_MAX):\n"
        "    ask(number)\n"
        "gc.collect()\n"
        "print(tracemalloc.get_traced_memory()[1] / KEYS_MAX)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert float(told.stdout) <= KEY_BYTES, "more than a hundredth of the ring"

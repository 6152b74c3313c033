"""The shadow cache beside an exact least-recently-used cache of the same requests."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.policy.shadow import KEY_BYTES, KEYS_MAX, KEYS_MIN, Shadow, keys_for

Requests = Iterator[tuple[int, int]]


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class Exact:
    """Every key, in full."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.hits = self.requests = 0

    def asked(self, number: int, size_bytes: int, capacity_bytes: int) -> None:
        self.requests += 1
        self.hits += number in self.sizes
        self.sizes[number] = size_bytes
        self.sizes.move_to_end(number)
        while sum(self.sizes.values()) > capacity_bytes:
            self.sizes.popitem(last=False)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(50, 400), st.booleans()), max_size=200),
)
def test_without_sampling_it_is_least_recently_used(steps: list[tuple[int, int, int, bool]]) -> None:
    shadow, exact = Shadow(1000), Exact()
    for number, size_bytes, capacity_bytes, ends in steps:
        if ends:
            shadow.ended(key_of(number))
            exact.sizes.pop(number, None)
            continue
        shadow.asked(key_of(number), size_bytes, capacity_bytes, here=number % 2 == 0)
        exact.asked(number, size_bytes, capacity_bytes)
        shadow.check_invariants(capacity_bytes)
        assert len(shadow) == len(exact.sizes)
    assert (shadow.counts.lru, shadow.counts.requests, shadow.factor) == (exact.hits, exact.requests, 1)


def zipf(chance: random.Random, objects: int, size: Callable[[int], int]) -> Requests:
    weights = [1 / (rank + 1) ** 0.8 for rank in range(objects)]
    for number in chance.choices(range(objects), weights, k=40_000):
        yield number, size(number)


def loop(objects: int) -> Requests:
    for at in range(40_000):
        yield at % objects, 1


def scans(chance: random.Random, objects: int) -> Requests:
    for at in range(40_000):
        yield (chance.randrange(objects // 4) if at % 3 else objects + at), 1


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("workload", ["zipf", "zipf of unequal sizes", "loop", "a set in use beside scans"])
def test_a_sample_finds_about_as_much_as_the_whole(workload: str, share: float) -> None:
    objects, chance = 20_000, random.Random(1)
    workloads: dict[str, Callable[[], Requests]] = {
        "zipf": lambda: zipf(chance, objects, lambda _: 100),
        "zipf of unequal sizes": lambda: zipf(chance, objects, lambda number: 10 + number * 7919 % 400),
        "loop": lambda: loop(objects // 2),
        "a set in use beside scans": lambda: scans(chance, objects // 4),
    }
    steps = list(workloads[workload]())
    capacity_bytes = int(share * sum(dict(steps).values()))
    shadow, sizes, held, hits = Shadow(512), OrderedDict[int, int](), 0, 0
    for number, size_bytes in steps:
        shadow.asked(key_of(number), size_bytes, capacity_bytes, here=False)
        hits += number in sizes
        held += size_bytes - sizes.get(number, 0)
        sizes[number] = size_bytes
        sizes.move_to_end(number)
        while held > capacity_bytes:
            held -= sizes.popitem(last=False)[1]
    shadow.check_invariants(capacity_bytes)
    assert shadow.factor >= 2
    assert len(shadow) <= 512
    # What the sample misses of the popular keys shifts what is here and what LRU has alike.
    assert shadow.counts.lru / shadow.counts.requests == pytest.approx(hits / len(steps), abs=0.05)


def test_hits_of_the_store_are_counted_over_the_same_sample() -> None:
    shadow = Shadow(100)
    for number in range(1000):
        shadow.asked(key_of(number), 1, 400, here=number % 4 == 0)
    for number in range(600, 1000):
        shadow.asked(key_of(number), 1, 400, here=True)
    counts = shadow.counts
    assert shadow.factor in (4, 8)
    assert counts.requests == pytest.approx(1400, rel=0.2)
    assert counts.lru == pytest.approx(400, rel=0.3)
    assert counts.here == pytest.approx(650, rel=0.3)


def test_a_smaller_capacity_holds_from_the_next_request() -> None:
    shadow = Shadow(1000)
    for number in range(100):
        shadow.asked(key_of(number), 10, 1000, here=False)
    shadow.asked(key_of(99), 10, 100, here=True)
    shadow.check_invariants(100)
    assert len(shadow) == 10


def test_an_entry_larger_than_the_capacity_is_not_held() -> None:
    shadow = Shadow(10)
    shadow.asked(key_of(1), 101, 100, here=False)
    assert len(shadow) == 0
    shadow.check_invariants(100)


@pytest.mark.parametrize("ring_bytes", [1 << 20, 16 << 20, 100 << 20, 4 << 30, 1 << 40])
def test_its_keys_take_a_hundredth_of_the_ring_at_most(ring_bytes: int) -> None:
    keys = keys_for(ring_bytes)
    assert KEYS_MIN <= keys <= KEYS_MAX
    assert keys * KEY_BYTES <= ring_bytes // 100 or keys == KEYS_MIN


def test_a_key_takes_no_more_memory_than_is_reckoned() -> None:
    # In a process of its own: whatever else runs here is not counted.
    program = (
        "import gc, hashlib, tracemalloc\n"
        "from tensord.daemon.policy.shadow import KEY_BYTES, KEYS_MAX, Shadow\n"
        "def ask(number):\n"
        "    shadow.asked(hashlib.sha256(b'%d' % number).digest(), 10**6 + number, 10**12, here=False)\n"
        "tracemalloc.start()\n"
        "shadow = Shadow(KEYS_MAX)\n"
        "for number in range(20 * KEYS_MAX):\n"
        "    ask(number)\n"
        "gc.collect()\n"
        "print(tracemalloc.get_traced_memory()[1] / KEYS_MAX)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert float(told.stdout) <= KEY_BYTES, "more than a hundredth of the ring"

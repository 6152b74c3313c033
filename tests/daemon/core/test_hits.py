"""How much of what is asked for is there: lately, and beside what least recently used would have had."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.core.events import Accessed
from tensord.daemon.core.hits import SAMPLED_PER_S_MAX, SLOTS, Hits, Recent
from tensord.ipc import messages

from .stand import SPAN, Make, Stand, key
from .test_recovery import restart


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 5)), min_size=1, max_size=60), st.floats(0, 200))
def test_sums_are_of_the_last_stretch_to_one_part_of_it(steps: list[tuple[float, int]], later: float) -> None:
    recent, at, came = Recent(100.0, 2), 0.0, list[tuple[float, int]]()
    for pause, amount in steps:
        at += pause
        recent.add(at, (amount, 1))
        assert len(recent) <= SLOTS
        came.append((at, amount))
    now = at + later
    least = [amount for when, amount in came if when > now - 100 + 100 / SLOTS]
    most = [amount for when, amount in came if when >= now - 100]
    total, times = recent.sums(now)
    assert sum(least) <= total <= sum(most)
    assert len(least) <= times <= len(most)


def told(stand: Stand) -> dict[str, Any]:
    ratios: dict[str, Any] = stand.store.status(stand.now)["hit_ratios"]
    return ratios


def ask(stand: Stand, number: int) -> None:
    """A use of what is there; else it is stored."""
    entry = stand.store.memory.entries.find(key(number))
    if entry is None:
        stand.do(Accessed([], misses=1))
        stand.put(number)
    else:
        stand.do(Accessed([entry.span_id]))


def test_the_hits_of_the_last_minute_and_of_the_last_ring_are_reported(make: Make) -> None:
    stand = make(SLOTS * SPAN)
    for number in range(10):
        ask(stand, number)
    for number in range(10):
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


def test_a_store_that_goes_by_lru_finds_what_its_shadow_finds(make: Make) -> None:
    stand, chance = make(200 * SPAN, policy="lru"), random.Random(1)
    weights = [1 / (rank + 1) for rank in range(1000)]
    for number in chance.choices(range(1000), weights, k=4000):
        ask(stand, number)
    counts = told(stand)["since_start"]
    assert told(stand)["sampled"] > 1
    assert counts["requests"] == pytest.approx(4000, rel=0.5)
    assert counts["here"] / counts["requests"] == pytest.approx(counts["lru"] / counts["requests"], abs=0.05)


def test_in_a_loop_larger_than_the_ring_lru_would_have_had_nothing(make: Make) -> None:
    stand = make(50 * SPAN, policy="hazard")
    for at in range(3000):
        stand.now += 1
        ask(stand, at % 55)
    ring = told(stand)["ring"]
    assert ring["lru"] == 0
    assert ring["here"] / ring["requests"] > 0.5


def test_an_entry_removed_explicitly_is_no_hit_under_lru_either(make: Make) -> None:
    stand = make(10 * SPAN)
    ask(stand, 1)
    stand.send(1, messages.Evict(1, [key(1)]))
    ask(stand, 1)
    assert told(stand)["since_start"] == {"requests": 2, "here": 0, "lru": 0}


def test_many_uses_thin_the_sample_so_that_they_take_a_bounded_part_of_the_event_loop() -> None:
    hits = Hits(1 << 30)
    entries: list[Any] = [SimpleNamespace(key=key(number), span_bytes=SPAN) for number in range(1000)]
    for second in range(9):
        for _ in range(SAMPLED_PER_S_MAX // len(entries)):
            hits.used(entries, 1 << 30, float(2 * second))
    assert hits.as_dict(20.0)["sampled"] == 1, "as many in a second as may be"
    for _ in range(2 * SAMPLED_PER_S_MAX // len(entries)):
        hits.used(entries, 1 << 30, 30.0)
    assert hits.as_dict(30.0)["sampled"] == 2
    counts = hits.as_dict(30.0)["since_start"]
    assert counts["here"] == counts["requests"]


def test_the_sample_has_what_a_new_daemon_found(make: Make) -> None:
    stand = make(10 * SPAN)
    ask(stand, 1)
    restart(stand)
    assert told(stand)["sampled_keys"] == 1
    ask(stand, 1)
    assert told(stand)["since_start"] == {"requests": 1, "here": 1, "lru": 1}


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_figures_of_requests_only_rise(make: Make, policy: str) -> None:
    stand, seen = make(20 * SPAN, policy=policy), list[tuple[int, ...]]()
    for number in range(200):
        ask(stand, number % 30)
        seen.append(tuple(told(stand)["since_start"].values()))
    for earlier, later in pairwise(seen):
        assert all(before <= after for before, after in zip(earlier, later, strict=True))

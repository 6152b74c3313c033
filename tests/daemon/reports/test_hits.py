"""How much of what is asked for is there: lately, and beside what least recently used would have had."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tensord.daemon.reports.hits import SAMPLED_PER_S_MAX, SLOTS

from ..store.rows import key_of
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


def test_an_entry_removed_explicitly_is_no_hit_under_lru_either() -> None:
    stand = LifetimesStand(10 * SPAN)
    ask(stand, 1)
    stand.end(1)
    ask(stand, 1)
    assert told(stand)["since_start"] == {"requests": 2, "here": 0, "lru": 0}


def test_many_uses_thin_the_sample_so_that_they_take_a_bounded_part_of_the_event_loop() -> None:
    stand = LifetimesStand(1 << 30, buckets=1024, ring=bytearray(1 << 20))
    stand.hits.__init__(stand.rows.table, 1 << 30, lambda: 1 << 30)  # type: ignore[misc]
    rows = np.array([stand.put(number) for number in range(1000)])
    second = 10.0
    for _ in range(9):
        second += 2
        for _ in range(SAMPLED_PER_S_MAX // len(rows)):
            stand.hits.used(rows, second)
    assert told(stand)["sampled"] == 1, "as many in a second as may be"
    for _ in range(2 * SAMPLED_PER_S_MAX // len(rows)):
        stand.hits.used(rows, second + 2)
    assert told(stand)["sampled"] == 2
    counts = told(stand)["since_start"]
    assert counts["here"] == counts["requests"] - 1000, "but for the puts"


def test_the_sample_has_what_a_new_daemon_found() -> None:
    stand = LifetimesStand(10 * SPAN)
    rows = [stand.rows.put(key_of(number)) for number in range(3)]
    stand.hits.recovered(np.array(rows))
    assert told(stand)["sampled_keys"] == 3
    stand.read(0)
    assert told(stand)["since_start"] == {"requests": 1, "here": 1, "lru": 1}


def test_the_store_answers_with_its_curve_and_its_own_hit_ratio() -> None:
    stand, chance = LifetimesStand(64 * SPAN, policy="lru"), random.Random(1)
    for number in chance.choices(range(200), k=2000):
        ask(stand, number)
    answer = stand.reports.hit_curve()
    assert answer["policy"] == "lru"
    assert answer["capacity_bytes"] == 64 * SPAN
    now = next(ratio for size, ratio, _ in answer["points"] if size == 64 * SPAN)
    assert answer["here"] == pytest.approx(now, abs=0.05)
    assert answer["points"][-1][1] > now + 0.2

"""Curves of hit ratios beside exact least-recently-used caches of each size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tensord.daemon.reports.distances import FAR, ReuseDistances
from tensord.daemon.reports.hits import HALVE_AFTER, MULTIPLES, HitCurve

from .test_distances import Exact
from .test_distances import number as number_of

Request = tuple[int, int]


def curve_of(requests: Sequence[Request], capacity_bytes: int, keys_max: int) -> dict[str, Any]:
    """The curve of some requests."""
    distances, curve, present = ReuseDistances(keys_max), HitCurve(), Exact(capacity_bytes)
    for asked, size_bytes in requests:
        here = present.asked(asked, size_bytes)
        curve.asked(1, here=here)
        number = number_of(asked)
        distance_bytes = distances.asked(number, size_bytes, capacity_bytes)
        if distance_bytes is not None:
            curve.sampled(number, distance_bytes, distances.factor, here=here)
    distances.check_invariants(capacity_bytes)
    return curve.as_dict(capacity_bytes, distances.factor)


def exact(requests: Sequence[Request], capacity_bytes: int) -> float:
    """The hit ratio of a cache of this size."""
    cache = Exact(capacity_bytes)
    return sum(cache.asked(number, size_bytes) for number, size_bytes in requests) / len(requests)


def workload(name: str) -> list[Request]:
    chance = random.Random(name)
    if name == "popular keys":
        weights = [1 / (rank + 1) ** 0.9 for rank in range(10_000)]
        return [(number, 100 + number % 400) for number in chance.choices(range(10_000), weights, k=40_000)]
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


def test_without_requests_nothing_is_known() -> None:
    every = HitCurve().as_dict(1000, 1)
    assert every["requests"] == 0
    assert {(ratio, error) for _, ratio, error in every["points"]} == {(0.0, 1.0)}


def test_older_requests_count_less_and_less() -> None:
    curve = HitCurve()
    curve.asked(2 * HALVE_AFTER, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(1, FAR, 1, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(1, 100, 1, here=False)
    points = curve.as_dict(1000, 1)["points"]
    assert points[-1][1] > 0.6

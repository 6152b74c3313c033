"""Curves of hit ratios beside exact least-recently-used caches of each size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tensord.daemon.reports.distances import FAR, ReuseDistances
from tensord.daemon.reports.hit_curve import HALVE_AFTER, MULTIPLES, NAMESPACES_MAX, HitCurve

from .test_distances import Exact
from .test_distances import number as number_of

Request = tuple[int, int]


def curves_of(requests: Sequence[Request], capacity_bytes: int, keys_max: int) -> dict[str, Any]:
    """The curves of all requests. Keys are of two namespaces."""
    distances, curve, present = ReuseDistances(keys_max), HitCurve(), Exact(capacity_bytes)
    for asked, size_bytes in requests:
        here = present.asked(asked, size_bytes)
        curve.asked(1, here=here)
        number = number_of(asked)
        distance_bytes = distances.asked(number, size_bytes, capacity_bytes)
        if distance_bytes is not None:
            curve.sampled(b"namespa%d" % (asked % 2), number, distance_bytes, distances.factor, here=here)
    distances.check_invariants(capacity_bytes)
    return curve.as_dict(capacity_bytes, distances.factor)


def exact(requests: Sequence[Request], capacity_bytes: int) -> dict[int, float]:
    """The hit ratio of all requests, and under 0 and 1 those of the namespaces' requests."""
    cache, hits, asked = Exact(capacity_bytes), Counter[int](), Counter[int]()
    for number, size_bytes in requests:
        found = cache.asked(number, size_bytes)
        for of in (-1, number % 2):
            hits[of] += found
            asked[of] += 1
    return {of: hits[of] / asked[of] for of in asked}


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
    every = curves_of(requests, capacity_bytes, 4096)["curves"][0]
    assert [size for size, _, _ in every["points"]] == [int(multiple * capacity_bytes) for multiple in MULTIPLES]
    assert every["requests"] == pytest.approx(len(requests))
    for size_bytes, ratio, error in every["points"]:
        assert ratio == pytest.approx(exact(requests, size_bytes)[-1], abs=max(0.02, error))
        assert error < 0.15


def test_each_namespace_has_a_curve_of_its_own_requests_in_the_common_ring() -> None:
    """Keys of namespace 0 come again soon, those of namespace 1 late or never."""
    chance = random.Random(1)
    requests = [
        (2 * chance.randrange(100), 100) if chance.random() < 0.6 else (2 * chance.randrange(20_000) + 1, 100)
        for _ in range(20_000)
    ]
    answer = curves_of(requests, 50_000, 100_000)
    every, soon, late = answer["curves"]
    assert every["namespace"] is None
    assert (soon["namespace"], late["namespace"]) == (b"namespa0".hex(), b"namespa1".hex())
    for size_bytes, ratio, error in soon["points"]:
        assert error < 0.1, "without a sample"
        assert ratio == pytest.approx(exact(requests, size_bytes)[0], abs=min(0.02, error + 0.001))
    for size_bytes, ratio, _ in late["points"]:
        assert ratio == pytest.approx(exact(requests, size_bytes)[1], abs=0.02)


def test_a_curve_never_falls_with_the_size() -> None:
    for curve in curves_of(workload("popular keys"), 100_000, 1000)["curves"]:
        ratios = [ratio for _, ratio, _ in curve["points"]]
        assert ratios == sorted(ratios)


def test_without_requests_nothing_is_known() -> None:
    (every,) = HitCurve().as_dict(1000, 1)["curves"]
    assert every["requests"] == 0
    assert {(ratio, error) for _, ratio, error in every["points"]} == {(0.0, 1.0)}


def test_the_busiest_namespaces_are_kept() -> None:
    curve = HitCurve()
    for number in range(2 * NAMESPACES_MAX):
        curve.asked(3 if number == 0 else 1, here=False)
        for _ in range(3 if number == 0 else 1):
            curve.sampled(bytes([number] * 8), number, 100, 1, here=False)
    every, *namespaces = curve.as_dict(1000, 1)["curves"]
    assert every["requests"] == 2 * NAMESPACES_MAX + 2
    assert len(namespaces) == NAMESPACES_MAX
    assert namespaces[0]["namespace"] == bytes(8).hex()


def test_older_requests_count_less_and_less() -> None:
    curve = HitCurve()
    curve.asked(2 * HALVE_AFTER, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(bytes(8), 1, FAR, 1, here=False)
    for _ in range(HALVE_AFTER):
        curve.sampled(bytes(8), 1, 100, 1, here=False)
    points = curve.as_dict(1000, 1)["curves"][1]["points"]
    assert points[-1][1] > 0.6

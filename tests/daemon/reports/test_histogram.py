from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.reports.histogram import BOUNDS_S, Departures, Histogram
from tensord.daemon.reports.removal_history import Removed


@settings(max_examples=100)
@given(st.lists(st.floats(min_value=-10, max_value=1e9)))
def test_every_amount_is_in_the_one_bucket_that_it_fits(amounts: list[float]) -> None:
    histogram = Histogram()
    half = len(amounts) // 2
    histogram.count_all(np.array(amounts[:half], np.float64))
    for amount in amounts[half:]:
        histogram.count(amount)
    told = histogram.as_dict()
    lows = [float("-inf"), *BOUNDS_S]
    highs = [*BOUNDS_S, float("inf")]
    # What the clock says is less than nothing is nothing.
    expected = [sum(low < max(0.0, a) <= high for a in amounts) for low, high in zip(lows, highs, strict=True)]
    assert told["counts"] == expected
    assert told["sum"] == pytest.approx(sum(max(0.0, amount) for amount in amounts))


def test_an_amount_at_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for amount in (1.0, 1.5, 2.0, 2.5):
        histogram.count(amount)
    assert histogram.as_dict() == {"bounds": [1.0, 2.0], "counts": [1, 2, 1], "sum": 7.0}


def test_departures_are_told_apart_by_reason() -> None:
    departures = Departures()
    age, idle, uses, worth = np.array([(100.0, 50.0, 3, 1e-6), (10.0, 0.5, 0, 1e-9)]).T
    keys, sizes = np.zeros((2, 4), np.uint64), np.zeros(2)
    departures.count(Removed(keys, ["ttl", "capacity"], 100.0, age, idle, uses, worth, sizes))
    told = departures.as_dict()
    sums = {name: {reason: each["sum"] for reason, each in by.items()} for name, by in told.items()}
    assert sums == {
        "residence_s": {"ttl": 100.0, "capacity": 10.0},
        "idle_s": {"ttl": 50.0, "capacity": 0.5},
        "uses": {"ttl": 3.0, "capacity": 0.0},
        "worth": {"ttl": 1e-6, "capacity": 1e-9},
    }
    assert all(sum(each["counts"]) == 1 for by in told.values() for each in by.values())
    assert told["uses"]["capacity"]["counts"][0] == 1, "entries that nobody used are told apart"

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.core.histogram import BOUNDS_S, Departures, Histogram


@settings(max_examples=100)
@given(st.lists(st.floats(min_value=-10, max_value=1e9)))
def test_every_amount_is_in_the_one_bucket_that_it_fits(amounts: list[float]) -> None:
    histogram = Histogram()
    for amount in amounts:
        histogram.count(amount)
    told = histogram.as_dict()
    lows = [float("-inf"), *BOUNDS_S]
    highs = [*BOUNDS_S, float("inf")]
    # What the clock says is less than nothing is nothing.
    expected = [sum(low < max(0.0, a) <= high for a in amounts) for low, high in zip(lows, highs, strict=True)]
    assert told["counts"] == expected
    assert told["sum"] == sum(max(0.0, amount) for amount in amounts)


def test_an_amount_at_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for amount in (1.0, 1.5, 2.0, 2.5):
        histogram.count(amount)
    assert histogram.as_dict() == {"bounds": [1.0, 2.0], "counts": [1, 2, 1], "sum": 7.0}


def test_departures_are_told_apart_by_reason() -> None:
    departures = Departures()
    departures.count("ttl", created_at=0.0, used_at=50.0, now=100.0)
    departures.count("capacity", created_at=90.0, used_at=99.5, now=100.0)
    told = departures.as_dict()
    assert {reason: each["sum"] for reason, each in told["residence_s"].items()} == {"ttl": 100.0, "capacity": 10.0}
    assert {reason: each["sum"] for reason, each in told["idle_s"].items()} == {"ttl": 50.0, "capacity": 0.5}
    assert all(sum(each["counts"]) == 1 for each in told["idle_s"].values())

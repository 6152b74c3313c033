from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.reports.counters import BOUNDS_S, Histogram


@settings(max_examples=100)
@given(st.lists(st.floats(min_value=-10, max_value=1e9) | st.sampled_from(BOUNDS_S)))
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

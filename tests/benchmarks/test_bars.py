"""How figures stand against their bars: ratios of medians of one run, told and never asserted."""

from __future__ import annotations

import bars
from bars import BARS, Bar, Cell, Figure
from harness import SIZES, Row

M1 = SIZES["1M"]
TWICE = Bar("twice", Cell("tensord", "put_return", M1), 2.0, Cell("copy", "copy", M1))
SMALL = Bar("small", Cell("tensord", "get_many_key", M1), 0.2)


def _rows(put_us: float, copy_us: float, key_us: float) -> list[Row]:
    # the percentile is far off, so that a figure made of it would show
    return [
        Row("tensord", "put_return", M1, put_us, 1e6),
        Row("copy", "copy", M1, copy_us, 1e9),
        Row("tensord", "get_many_key", M1, key_us, 1e9),
    ]


def test_a_figure_is_a_ratio_of_medians_or_the_median_itself() -> None:
    ratio, absolute = bars.figures(_rows(150, 100, 0.1), [TWICE, SMALL])
    assert ratio == Figure("twice", 1.5, 2.0, "×")
    assert absolute == Figure("small", 0.1, 0.2, "µs")


def test_a_figure_that_was_not_measured_is_marked_and_compared_with_nothing() -> None:
    rows = _rows(150, 100, 0.1)
    for left in (rows[:1], rows[1:2], []):
        (figure,) = bars.figures(left, [TWICE])
        assert figure.value is None
        assert "not measured" in bars.figures_table([figure])


def test_the_table_says_which_bars_are_reached_and_which_missed() -> None:
    lines = bars.figures_table(bars.figures(_rows(201, 100, 0.2), [TWICE, SMALL])).splitlines()
    assert lines[-2].endswith("missed")
    assert lines[-1].endswith("reached")


def test_every_bar_is_of_tensord_and_of_an_operation_that_a_run_measures() -> None:
    assert len({bar.name for bar in BARS}) == len(BARS)
    for bar in BARS:
        assert bar.of.peer == "tensord"
        assert bar.limit > 0
        for what in (bar.of, bar.against):
            assert what is None or what.bytes in SIZES.values()

"""The demo's figures: every lookup counted once, and what was saved is what encoding had cost."""

from __future__ import annotations

from figures import HEADS, Figures, Seen, figures, table

FIRST = Seen(
    lookups=3,
    hits=1,
    waits=1,
    shared_bytes=3_000_000,
    encoded_s={"cat": 0.5},
    answered=["cat", "rocket"],
    hit_us=[8.0],
)
SECOND = Seen(
    lookups=4,
    hits=3,
    waits=0,
    shared_bytes=5_000_000,
    encoded_s={"rocket": 0.25},
    answered=["cat", "cat", "rocket"],
    hit_us=[2.0, 4.0, 6.0],
)


def test_the_figures_are_those_of_all_processes_together() -> None:
    assert figures([FIRST, SECOND], photographs=2, pins_after_kill=0) == Figures(
        lookups=7,
        encoder_runs=2,
        photographs=2,
        hits=4,
        waits=1,
        saved_s=3 * 0.5 + 2 * 0.25,
        hit_median_us=5.0,
        pins_after_kill=0,
    )


def test_a_photograph_encoded_twice_is_counted_twice() -> None:
    again = Seen(lookups=1, encoded_s={"cat": 0.5})
    assert figures([FIRST, SECOND, again], photographs=2, pins_after_kill=0).encoder_runs == 3


def test_the_table_has_a_line_for_each_process_and_one_for_all() -> None:
    lines = [line.split() for line in table([FIRST, SECOND]).splitlines()]
    assert lines[0] == " ".join(HEADS).split()
    assert lines[2:] == [
        ["1", "3", "1", "1", "1", "0.50", "0.75", "3.0", "8.0"],
        ["2", "4", "3", "0", "1", "0.25", "1.25", "5.0", "4.0"],
        ["all", "7", "4", "1", "2", "0.75", "2.00", "8.0", "5.0"],
    ]


def test_a_process_without_a_hit_has_no_latency_and_breaks_nothing() -> None:
    assert figures([Seen()], photographs=0, pins_after_kill=0).hit_median_us == 0
    assert "0.0" in table([Seen()])

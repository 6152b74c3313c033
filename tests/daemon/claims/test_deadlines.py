"""Deadlines by name: each comes up once, in order, however often it was changed before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.deadlines import Deadlines


def all_due(deadlines: Deadlines[int], now: float) -> list[int]:
    """What comes up for somebody who asks again whenever `next_timer` says so."""
    due = []
    while (timer := deadlines.next_timer()) is not None and timer <= now:
        name = deadlines.pop_due(now)
        if name is not None:
            due.append(name)
    return due


CHANGES = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 30)), max_size=80)


@given(changes=CHANGES, now=st.integers(0, 30))
def test_due_deadlines_come_in_order_and_no_others(changes: list[tuple[int, int | None]], now: int) -> None:
    deadlines: Deadlines[int] = Deadlines()
    times: dict[int, int] = {}
    for name, when in changes:
        if when is None:
            deadlines.drop(name)
            times.pop(name, None)
        else:
            deadlines.set(name, when)
            times[name] = when
        deadlines.check_invariants()
    due = all_due(deadlines, now)
    assert sorted(due) == sorted(name for name, when in times.items() if when <= now)
    assert [times[name] for name in due] == sorted(times[name] for name in due)
    left = [when for when in times.values() if when > now]
    timer = deadlines.next_timer()
    assert timer is None if not left else timer is not None and now < timer <= min(left)


def test_deadlines_that_were_dropped_or_renewed_take_little_room() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.set(number, float(number))
        deadlines.set(10_000, 5.0 + number)
    for number in range(1, 10_000):
        deadlines.drop(number)
    assert len(deadlines._heap) < 100
    assert deadlines.when(10_000) == 10_004.0
    assert all_due(deadlines, 10_003.0) == [0]
    assert all_due(deadlines, 1e9) == [10_000]
    assert deadlines.next_timer() is None

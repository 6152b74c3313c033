"""A fair queue, in which a client with many items delays another by one item a turn; and deadlines by name."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.deadlines import Deadlines
from tensord.daemon.claims.turns import Turns

WHO = st.tuples(st.integers(0, 2), st.integers(0, 2))
STEP = st.tuples(st.sampled_from(["push", "push first", "take", "remove"]), WHO, st.integers(0, 9))


@given(st.lists(STEP, max_size=60))
def test_nothing_is_lost_no_client_overtakes_itself_and_nobody_comes_twice_before_all_others(
    steps: list[tuple[str, tuple[int, int], int]],
) -> None:
    turns: Turns[tuple[int, int, int]] = Turns()
    model: dict[tuple[int, int], deque[tuple[int, int, int]]] = {}
    for number, (what, who, at) in enumerate(steps):
        items, head, item = model.setdefault(who, deque()), turns.head(), (*who, number)
        if what == "push":
            turns.push(*who, item)
            items.append(item)
        elif what == "push first":
            turns.push_first(*who, item)
            items.appendleft(item)
        elif what == "take" and turns:
            taken = turns.take()
            assert taken == head == model[taken[:2]].popleft()
        elif what == "remove":
            item = items[at] if at < len(items) else item
            assert turns.remove(*who, item) == (item in items)
            if item in items:
                items.remove(item)
        if what.startswith("push") and head is not None and head[:2] != who:
            assert turns.head() == head, "the head stays the head"
        assert turns.waiting(*who) == len(items)
    assert len(turns) == sum(map(len, model.values()))
    waiting = {uid for (uid, _), items in model.items() if items}
    assert {turns.take()[0] for _ in range(len(waiting))} == waiting
    while turns:
        turns.take()


def test_a_flood_of_one_client_delays_another_by_one_item_a_turn() -> None:
    turns: Turns[str] = Turns()
    for number in range(5):
        turns.push(1000, 1, f"flood{number}")
    turns.push(1000, 2, "quiet")
    assert [turns.take() for _ in range(6)] == ["flood0", "quiet", "flood1", "flood2", "flood3", "flood4"]


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

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


def test_deadlines_that_were_dropped_or_renewed_take_little_room() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.set(number, float(number))
        deadlines.set(10_000, 5.0 + number)
    for number in range(10_000):
        deadlines.drop(number)
    assert len(deadlines._heap) < 100
    assert deadlines.next_timer() == deadlines.when(10_000) == 10_004.0

"""A fair queue: a client with many items delays another by one item a turn; a client's own items keep their order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.turns import Turns


def taken(turns: Turns[str]) -> list[str]:
    found = []
    while turns:
        head = turns.head()
        found.append(turns.take())
        assert found[-1] == head
        turns.check_invariants()
    return found


def test_a_flood_of_one_client_delays_another_by_one_item_a_turn() -> None:
    turns: Turns[str] = Turns()
    for number in range(5):
        turns.push(1000, 1, f"flood{number}")
    turns.push(1000, 2, "quiet")
    assert taken(turns) == ["flood0", "quiet", "flood1", "flood2", "flood3", "flood4"]


def test_the_head_stays_the_head_whatever_is_pushed() -> None:
    turns: Turns[str] = Turns()
    turns.push(1, 1, "first")
    turns.push(2, 2, "second")
    turns.push(1, 1, "third")
    assert turns.head() == "first"
    assert not turns.remove(2, 2, "third")
    assert turns.remove(2, 2, "second")
    assert taken(turns) == ["first", "third"]
    with pytest.raises(IndexError):
        turns.take()


def test_an_item_put_back_is_the_first_of_its_client() -> None:
    turns: Turns[str] = Turns()
    turns.push(1, 1, "b")
    turns.push_first(1, 1, "a")
    assert turns.firsts(1) == ["a"] and turns.waiting(1, 1) == 2
    assert taken(turns) == ["a", "b"]


@given(st.lists(st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.none()), max_size=60))
def test_in_any_order_of_coming_and_going_nothing_is_lost_and_no_client_overtakes_itself(
    steps: list[tuple[int, int] | None],
) -> None:
    turns: Turns[tuple[int, int, int]] = Turns()
    model: dict[tuple[int, int], deque[tuple[int, int, int]]] = {}
    for number, step in enumerate(steps):
        if step is not None:
            turns.push(*step, (*step, number))
            model.setdefault(step, deque()).append((*step, number))
        elif turns:
            item = turns.take()
            assert model[item[:2]].popleft() == item
        turns.check_invariants()
    assert len(turns) == sum(map(len, model.values()))
    # From here on nobody comes twice before everybody who waits has come once.
    waiting = {uid for (uid, _), items in model.items() if items}
    assert {turns.take()[0] for _ in range(len(waiting))} == waiting

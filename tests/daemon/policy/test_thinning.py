"""Leftovers leave a heap by and by: its order stays, and no change looks at many places."""

from __future__ import annotations

from heapq import heapify, heappop

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.thinning import LOOKS, remove, thin


def in_order(heap: list[int]) -> list[int]:
    heap = list(heap)
    return [heappop(heap) for _ in range(len(heap))]


@given(numbers=st.lists(st.integers(0, 50), min_size=1, max_size=60), data=st.data())
def test_the_remaining_items_come_in_order(numbers: list[int], data: st.DataObject) -> None:
    heap = list(numbers)
    heapify(heap)
    at = data.draw(st.integers(0, len(heap) - 1))
    gone = heap[at]
    remove(heap, at)
    left = sorted(numbers)
    left.remove(gone)
    assert in_order(heap) == left


@given(numbers=st.lists(st.integers(0, 50), max_size=60), live=st.sets(st.integers(0, 50)), calls=st.integers(0, 40))
def test_only_deleted_items_are_removed_and_all_of_them_in_the_end(
    numbers: list[int], live: set[int], calls: int
) -> None:
    heap, looked = list(numbers), 0
    heapify(heap)

    def is_live(number: int) -> bool:
        nonlocal looked
        looked += 1
        return number in live

    at = 0
    for _ in range(calls):
        at = thin(heap, at, is_live)
    assert looked <= LOOKS * calls
    assert [each for each in in_order(heap) if each in live] == [each for each in sorted(numbers) if each in live]
    for _ in range(len(numbers) + 1):
        at = thin(heap, at, is_live)
    assert in_order(heap) == [each for each in sorted(numbers) if each in live]

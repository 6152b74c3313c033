"""Heaps with leftovers: what was deleted stays in the heap until it is looked at, a few places at a time.

Who deletes by leaving a leftover behind has to get rid of leftovers at some time. Rebuilding the heap once most of it
is leftovers costs little on average, and 300 ms at one go with 262,144 places. Here every change looks at LOOKS places.

Invariant: `heap` is a heap as `heapq` has it before and after; only leftovers are taken out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

LOOKS: Final = 4
"""Places that one change looks at. With more than half of them leftovers two go for each one that comes."""

Item = TypeVar("Item")


def thin(heap: list[Item], at: int, is_live: Callable[[Item], bool]) -> int:
    """Takes out leftovers among the LOOKS places before `at`, from the end again behind the first.

    Returns:
        Where to go on with the next call.
    """
    for _ in range(LOOKS):
        if not heap:
            return 0
        if not 0 < at <= len(heap):
            at = len(heap)
        at -= 1
        if not is_live(heap[at]):
            remove(heap, at)
    return at


def remove(heap: list[Any], at: int) -> None:
    """Takes the item at one place out. O(log n)."""
    last = heap.pop()
    if at == len(heap):
        return
    while at > 0 and last < heap[(at - 1) >> 1]:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    while (below := 2 * at + 1) < len(heap):
        if below + 1 < len(heap) and heap[below + 1] < heap[below]:
            below += 1
        if not heap[below] < last:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last

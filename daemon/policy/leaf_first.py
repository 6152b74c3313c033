"""Leaf first: in which order spans may go of which some follow others.

A block of a cached sequence is of no use once its parent is gone, so it goes after all of its children. A
policy orders only what nothing follows; what becomes free behind that stands in between by its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import TypeVar

T = TypeVar("T")


def leaf_first(
    leaves: Iterable[T],
    rank: Callable[[T], tuple[float, ...]],
    parent: Callable[[T], T | None],
    children: Callable[[T], int],
) -> Iterator[T]:
    """The leaves, coldest first, and each parent once all its children have come.

    Args:
        leaves: coldest first, by `rank`, which tells them all apart.
        parent: what the span follows, if that may come at all.
        children: how many each has now. Lazy: valid until the next change.
    """
    left: dict[T, int] = {}
    freed: list[tuple[tuple[float, ...], T]] = []
    order = iter(leaves)
    leaf = next(order, None)
    while leaf is not None or freed:
        if leaf is None or (freed and freed[0][0] < rank(leaf)):
            span = heappop(freed)[1]
        else:
            span, leaf = leaf, next(order, None)
        yield span
        above = parent(span)
        if above is not None:
            left[above] = left.get(above, children(above)) - 1
            if not left[above]:
                heappush(freed, (rank(above), above))

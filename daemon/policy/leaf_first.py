"""The order of eviction for blocks of cached sequences: children before their parents.

A block is of no use without its parent, so a parent is evicted after all of its children. A policy orders only spans
without children (leaves). A parent whose children are all evicted becomes a leaf, and is merged in by its own rank.

Owns: that merge. Does not own ranks (the policy) nor the tree (`core`). Pure.

Invariant: no span is yielded before its children.
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
    """Yields the leaves, coldest first, and each parent once all of its children were yielded.

    Lazy: valid until the next change of its inputs.

    Args:
        leaves: the leaves, coldest first by `rank`. No two ranks are equal.
        parent: the parent of a span; None if there is none, or it must not be yielded.
        children: the number of children that a span has now.
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

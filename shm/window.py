"""The search for a window: spans that stand next to one another, and whose bytes, once freed, form one large hole.

Owns: which spans a window takes. Does not own: the map (ring_map.py), which is only read here, nor keys, pins and
policies; whether a span may go and how warm it is come as arguments.

Invariants of a window that is enough: all bytes of its range belong to its spans, to holes, or to withdrawn extents if
the search was allowed through them. No span at an edge could stay, except the one that the search started from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ring_map import RingMap


@dataclass(frozen=True, slots=True)
class Window:
    """A range [low, high) of the ring that becomes free once `spans` are freed: their offsets, in the order chosen.

    `enough`: whether the range has the bytes asked for. If not, the limit on the number of spans was reached first.
    """

    spans: list[int]
    low: int
    high: int
    enough: bool


def window_around(
    ring: RingMap,
    around: int,
    size_bytes: int,
    may_go: Callable[[int], bool],
    warmth: Callable[[int], Any],
    spans_max: int,
    *,
    through: bool = False,
    take: Callable[[int], object] = lambda _: None,
) -> Window | None:
    """Chooses spans to free so that one hole of `size_bytes` forms around the block at offset `around`.

    The window grows by the colder of its two neighbouring spans, which is the one with the lower `warmth(offset)`.
    A span for which `may_go(offset)` is false ends the window on its side. A withdrawn extent ends it too, unless
    `through` is true; the caller then has to restore that extent. `take(offset)` is called for each chosen span
    before the next span is judged.

    Returns:
        The window, with `enough=False` if `spans_max` spans do not suffice. None if spans that may not go, or the
        ring's ends, leave too little between them.
    """
    spans = []
    if around in ring.spans:
        if not may_go(around):
            return None
        spans.append(around)
        take(around)
    elif around in ring.withdrawn.sizes and not through:
        return None
    low, high = _widened(ring, around, around + ring.block_bytes(around), size_bytes, through=through)
    left_open = right_open = True
    while high - low < size_bytes:
        if len(spans) >= spans_max:
            return Window(spans, low, high, enough=False)
        left = ring.span_at_end.get(low) if left_open else None
        right = high if right_open and high in ring.spans else None
        left_open = left is not None and may_go(left)
        right_open = right is not None and may_go(right)
        if left is not None and left_open and (right is None or not right_open or warmth(left) < warmth(right)):
            spans.append(left)
            take(left)
            low, high = _widened(ring, left, high, size_bytes, through=through)
        elif right is not None and right_open:
            spans.append(right)
            take(right)
            low, high = _widened(ring, low, right + ring.spans[right], size_bytes, through=through)
        else:
            return None
    return _trimmed(ring, spans, low, high, size_bytes, around)


def widest_withdrawn(ring: RingMap, size_bytes: int) -> Window | None:
    """The range around the largest withdrawn extent that contains no span; None if it has fewer than `size_bytes`."""
    if not ring.withdrawn:
        return None
    offset, _ = ring.withdrawn.ranked(-1)
    return window_around(ring, offset, size_bytes, lambda _: False, lambda _: 0, 1, through=True)


def _widened(ring: RingMap, low: int, high: int, size_bytes: int, *, through: bool) -> tuple[int, int]:
    """The range extended by adjacent holes, and with `through` by adjacent withdrawn extents while it is too small."""
    kinds = (ring.holes, ring.withdrawn) if through else (ring.holes,)
    while True:
        before = low, high
        for kind in kinds:
            low = kind.starts.get(low, low)
            high += kind.sizes.get(high, 0)
        if not through or high - low >= size_bytes or (low, high) == before:
            return low, high


def _trimmed(ring: RingMap, spans: list[int], low: int, high: int, size_bytes: int, around: int) -> Window:
    """The window without spans at its edges that a later, larger span on the other side made unnecessary.

    The span at `around` stays in any case, as the coldest. Otherwise the next window would start there again and
    grow into its neighbours, which are the spans stored last.
    """
    spans = sorted(spans)
    while spans and high - (spans[0] + ring.spans[spans[0]]) >= size_bytes:
        low = spans[0] + ring.spans[spans[0]]
        del spans[0]
    while spans and spans[-1] - low >= size_bytes:
        high = spans.pop()
    if around in ring.spans and around not in spans:
        spans.append(around)
    return Window(spans, low, high, enough=True)

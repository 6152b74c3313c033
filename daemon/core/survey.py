"""A survey of the unevictable spans: their sums, and the gaps between them. A large survey is made in slices.

With up to SURVEYED_MAX pins, the caller makes a new survey each time. With more, a survey takes several calls, and pins
that change meanwhile make it outdated. An outdated survey may decide whether a put can fit; each victim is checked
again before it is hidden.

Owns the sums and the places of the unevictable spans as they were found. Does not own the rule of what is unevictable
(`unevictable`). Invariant: one call examines at most SURVEYED_MAX spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

from .entries import EntryState, SpanEntry

SURVEYED_MAX: Final = 1024
"""Spans that one call examines: 1 ms, or 5 ms if none of them is in the CPU's caches."""

Array = np.ndarray[Any, Any]


class Survey:
    """The unevictable spans, without those that puts are being copied into. `spans` may contain evictable spans too:
    only spans for which `must_stay` is true are counted."""

    def __init__(
        self, spans: Iterable[SpanEntry | None], must_stay: Callable[[SpanEntry], bool], ring_bytes: int
    ) -> None:
        self._spans = iter(spans)
        self._is_unevictable = must_stay
        self._ring_bytes = ring_bytes
        self._edges: list[Array] = []
        self._lows = self._highs = np.empty(0, np.int64)
        self.entries = self.tokens = self.size_bytes = 0
        """Sums over the unevictable spans. Retired spans count in `size_bytes` only."""
        self.done = False

    def advance(self) -> None:
        """Examines up to SURVEYED_MAX spans."""
        if self.done:
            return
        some = list(islice(self._spans, SURVEYED_MAX))
        edges = [(each.offset, each.offset + each.span_bytes) for each in self._kept(some)]
        self._edges.append(np.array(sorted(edges), np.int64).reshape(-1, 2))
        if len(some) < SURVEYED_MAX:
            self._end()

    def gaps(self, size_bytes: int, besides: Iterable[SpanEntry]) -> tuple[Array, Array]:
        """Stretches of the ring of at least `size_bytes` that contain neither an unevictable span nor one of `besides`.
        Their starts and their ends, (n,) int64 each, by offset."""
        wide = self._highs - self._lows >= size_bytes
        lows, highs = self._lows[wide], self._highs[wide]
        edges = np.array([(each.offset, each.offset + each.span_bytes) for each in besides], np.int64).reshape(-1, 2)
        if len(lows) and len(edges):
            within = np.searchsorted(lows, edges[:, 0], "right") - 1
            edges = edges[(within >= 0) & (edges[:, 0] < highs[within])]
            # Each span of `besides` ends one stretch and begins another.
            lows, highs = np.sort(np.concatenate([lows, edges[:, 1]])), np.sort(np.concatenate([highs, edges[:, 0]]))
            wide = highs - lows >= size_bytes
            lows, highs = lows[wide], highs[wide]
        return lows, highs

    def _kept(self, spans: Iterable[SpanEntry | None]) -> Iterator[SpanEntry]:
        for entry in spans:
            if entry is None or entry.state is EntryState.FILLING or not self._is_unevictable(entry):
                continue
            self.size_bytes += entry.span_bytes
            if entry.state is not EntryState.RETIRED:
                self.entries += 1
                self.tokens += entry.tokens
            yield entry

    def _end(self) -> None:
        edges = np.concatenate(self._edges)
        self._edges.clear()
        # The stable sort merges the sorted slices.
        self._lows = np.concatenate([[0], np.sort(edges[:, 1], kind="stable")])
        self._highs = np.concatenate([np.sort(edges[:, 0], kind="stable"), [self._ring_bytes]])
        self.done = True

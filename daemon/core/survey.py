"""What must stay in the ring because it is pinned, and the gaps between: looked at in slices where that is much.

Owns: sums and places of spans that must stay, as they were found. With up to SURVEYED_MAX pins it is made anew whenever
it is asked for. With more it takes several calls, and may be behind by what was pinned or let go meanwhile: whether a
put can fit is decided by what is known, and each victim is looked at again before it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

from .entries import EntryState, SpanEntry

SURVEYED_MAX: Final = 1024
"""Spans that one call looks at: 1 ms; 5 ms where all of them are cold memory."""

Array = np.ndarray[Any, Any]


class Survey:
    """Spans that must stay, those being filled excepted. `spans` may name spans that need not: `must_stay` decides."""

    def __init__(
        self, spans: Iterable[SpanEntry | None], must_stay: Callable[[SpanEntry], bool], ring_bytes: int
    ) -> None:
        self._spans = iter(spans)
        self._is_unevictable = must_stay
        self._ring_bytes = ring_bytes
        self._edges: list[Array] = []
        self._lows = self._highs = np.empty(0, np.int64)
        self.entries = self.tokens = self.size_bytes = 0
        """Of the spans that must stay; retired ones count by their bytes alone."""
        self.done = False

    def advance(self) -> None:
        """Looks at up to SURVEYED_MAX spans."""
        if self.done:
            return
        some = list(islice(self._spans, SURVEYED_MAX))
        edges = [(each.offset, each.offset + each.span_bytes) for each in self._kept(some)]
        self._edges.append(np.array(sorted(edges), np.int64).reshape(-1, 2))
        if len(some) < SURVEYED_MAX:
            self._end()

    def gaps(self, size_bytes: int, besides: Iterable[SpanEntry]) -> tuple[Array, Array]:
        """Stretches of the ring, at least `size_bytes` long, in which nothing must stay, nor one of `besides` stands:
        where they begin and where they end, (n,) int64 each, by offset."""
        wide = self._highs - self._lows >= size_bytes
        lows, highs = self._lows[wide], self._highs[wide]
        edges = np.array([(each.offset, each.offset + each.span_bytes) for each in besides], np.int64).reshape(-1, 2)
        if len(lows) and len(edges):
            within = np.searchsorted(lows, edges[:, 0], "right") - 1
            edges = edges[(within >= 0) & (edges[:, 0] < highs[within])]
            # Each of them ends one stretch, and begins another.
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
        # Stable, since that one merges what is sorted.
        self._lows = np.concatenate([[0], np.sort(edges[:, 1], kind="stable")])
        self._highs = np.concatenate([np.sort(edges[:, 0], kind="stable"), [self._ring_bytes]])
        self.done = True

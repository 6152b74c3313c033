"""What was put last, and is kept whatever was learned.

Whoever stores something is promised that it is there for a while: an entry belongs to the window until as many bytes
were put after it as a SHARE of what is stored. A piece that follows another in a sequence does not: it has to be worth
its place. On recorded conversations a window for those too costs half of a hundred hits.

Owns: who belongs to it. Bounded by the entries that so many bytes hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Final

from .leaves import Span

SHARE: Final = 1 / 8
"""Of the bytes that are stored: somewhat more than the tenth of the ring that is promised, which has holes."""
LEAVE_MAX: Final = 16
"""Spans that leave the window at one put, at most: after a large put they would be a share of all that is stored."""


class Window:
    """Spans whose `put_at` is not 0, in the order in which they were put."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, Span]] = deque()
        self._put_bytes = 0
        self.size_bytes = 0
        """Of all spans that belong to it."""

    def put(self, span: Span) -> None:
        """It was stored, and belongs to the window unless it follows another (`depth`)."""
        self._put_bytes += span.size_bytes
        if span.depth == 0:
            span.put_at = self._put_bytes
            self.size_bytes += span.size_bytes
            self._spans.append((span.put_at, span))

    def leave(self, span: Span) -> None:
        """The span, if it belongs to the window, does not any more."""
        if span.put_at:
            span.put_at = 0
            self.size_bytes -= span.size_bytes

    def past(self, stored_bytes: int) -> Iterator[Span]:
        """Those after which enough was put, of so many bytes that are stored; the caller lets each of them `leave`.
        LEAVE_MAX places are looked at, and the others at the next puts."""
        until = self._put_bytes - SHARE * stored_bytes
        for _ in range(LEAVE_MAX):
            if not self._spans or self._spans[0][0] > until:
                break
            put_at, span = self._spans.popleft()
            if span.put_at == put_at:
                yield span

    def check_invariants(self, known: Collection[Span]) -> None:
        """Asserts that everybody of `known` who belongs to it will leave it."""
        due = {id(span) for put_at, span in self._spans if span.put_at == put_at}
        assert due == {id(span) for span in known if span.put_at}
        assert self.size_bytes == sum(span.size_bytes for span in known if span.put_at)

"""Pins by message, `Pin` and `Unpin`: entries that clients keep published for a limited time.

A pin by message keeps its entry published, unlike the pin words of a lane: the entry is no victim and does not expire.
An explicit evict, clear or invalidate ends it nevertheless.

Owns the pins, their deadlines and the sum of pinned bytes. Does not own entries.

Invariants: a pin ends at its deadline, with its client, with its entry, or by Unpin. A client has at most one pin on a
span, and a limited number of pins. The bytes of all pinned spans stay under the limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import LimitReached
from .deadlines import Deadlines


class Pins:
    """The pins by span and by client, with their deadlines."""

    def __init__(self, per_client_max: int, bytes_max: int) -> None:
        self._per_client_max = self._per_client_most = per_client_max
        self._bytes_max = self._bytes_most = bytes_max
        self._until: Deadlines[tuple[int, int]] = Deadlines()
        self._by_client: dict[int, set[int]] = {}
        self._by_span: dict[int, set[int]] = {}
        self._span_bytes: dict[int, int] = {}
        self.pinned_bytes = 0
        self.changes = 0
        """Rises whenever a span becomes pinned or a pin ends."""

    def __len__(self) -> int:
        return len(self._until)

    def change_limits(self, per_client_max: int, bytes_max: int) -> None:
        """Applies to later pins; existing pins stay."""
        self._per_client_max, self._bytes_max = per_client_max, bytes_max
        self._per_client_most = max(self._per_client_most, per_client_max)
        self._bytes_most = max(self._bytes_most, bytes_max)

    def holds(self, span_id: int) -> bool:
        """Whether any client pins the span."""
        return span_id in self._by_span

    def spans(self) -> Iterable[int]:
        """Every pinned span."""
        return self._by_span

    def next_timer(self) -> float | None:
        """When `expire` is due."""
        return self._until.next_timer()

    def pin(self, client: int, span_id: int, size_bytes: int, until: float) -> None:
        """Pins a span, or sets the end of the client's existing pin.

        Raises:
            LimitReached: pins_per_client_max or pinned_share_max would be exceeded; the text names it.
        """
        own = self._by_client.get(client, set())
        if span_id not in own:
            if len(own) >= self._per_client_max:
                raise LimitReached(
                    f"the client has {len(own)} pins, and pins_per_client_max is "
                    f"{self._per_client_max}: unpin others first, or raise it"
                )
            more = 0 if span_id in self._by_span else size_bytes
            if self.pinned_bytes + more > self._bytes_max:
                raise LimitReached(
                    f"{more} more bytes to pin, with {self.pinned_bytes} bytes pinned already, would "
                    f"exceed {self._bytes_max} bytes, which limits.pinned_share_max allows: unpin others first, or "
                    "raise it"
                )
            self._by_client.setdefault(client, set()).add(span_id)
            self._by_span.setdefault(span_id, set()).add(client)
            if more:
                self._span_bytes[span_id] = size_bytes
                self.pinned_bytes += size_bytes
            self.changes += 1
        self._until.set((client, span_id), until)

    def unpin(self, client: int, span_id: int) -> bool:
        """Ends a pin.

        Returns:
            Whether it existed.
        """
        if span_id not in self._by_client.get(client, ()):
            return False
        self._until.drop((client, span_id))
        self._take_back(client, span_id)
        return True

    def span_gone(self, span_id: int) -> None:
        """Ends every pin on the span, since its entry has ended."""
        for client in list(self._by_span.get(span_id, ())):
            self.unpin(client, span_id)

    def client_left(self, client: int) -> None:
        """Ends the client's pins."""
        for span_id in list(self._by_client.get(client, ())):
            self.unpin(client, span_id)

    def expire(self, now: float, most: int) -> None:
        """Ends up to `most` pins whose time is up."""
        for _ in range(most):
            due = self._until.pop_due(now)
            if due is None:
                return
            self._take_back(*due)

    def last_until(self, span_id: int) -> float:
        """When the last pin on the span ends."""
        ends = (self._until.when((client, span_id)) for client in self._by_span[span_id])
        return max(end for end in ends if end is not None)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self._until.check_invariants()
        pairs = {(client, span) for client, spans in self._by_client.items() for span in spans}
        assert pairs == {(client, span) for span, of in self._by_span.items() for client in of}
        assert all(pair in self._until for pair in pairs)
        assert len(pairs) == len(self._until)
        assert all(len(spans) <= self._per_client_most for spans in self._by_client.values())
        assert self._span_bytes.keys() == self._by_span.keys()
        assert self.pinned_bytes == sum(self._span_bytes.values()) <= self._bytes_most

    def _take_back(self, client: int, span_id: int) -> None:
        for table, of, what in (
            (self._by_client, client, span_id),
            (self._by_span, span_id, client),
        ):
            table[of].discard(what)
            if not table[of]:
                del table[of]
        self.changes += 1
        if span_id not in self._by_span:
            self.pinned_bytes -= self._span_bytes.pop(span_id)

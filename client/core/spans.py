"""The spans of the ring that the daemon has given this client to write payloads into.

Spans are taken in advance: while puts of one size follow each other, each of them finds a span that was asked for
before. A put without a span waits for the daemon's answer.

Owns: which spans are asked for, which are given, and when unused ones are returned. Does not own: the pin that protects
a span, the copy, nor the put (in_place.py).

Invariants: a span goes to one put. It is used on the connection on which it was given, and only for USABLE_S, since the
daemon takes it back after twice as long. What a connection gave is forgotten with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ...ipc import messages
from ...ipc.schema import SPAN_S, SPANS_PER_CLIENT_MAX
from .waiting import Condition

USABLE_S: Final = SPAN_S / 2
UNUSED_S: Final = 1.0
"""Seconds without a put into a span, and without a new span, after which all spans are returned."""
AGAIN_S: Final = 10.0
"""Seconds after a refusal in which no more spans are asked for in advance than the daemon gave."""
AHEAD_BYTES: Final = 32 << 20
"""Bytes that a client asks for in advance, as far as AHEAD_MIN and AHEAD_MAX allow it."""
AHEAD_MIN, AHEAD_MAX = 2, 8
"""Spans that a client asks for in advance."""
SPARE_SHARE: Final = 8
"""A payload is written into a span of its size, or of up to 1/SPARE_SHARE more. A span is asked for in exactly the size
of a payload: what a payload leaves of it is a hole that no later span of that size fits into."""


class Span(NamedTuple):
    """A span of `size_bytes` for one payload. `number`: the id of its TakeSpan. `given_at`: monotonic seconds."""

    number: int
    size_bytes: int
    taken: messages.SpanTaken
    given_at: float


class Spans:
    """The spans of one client. Thread-safe. `next_id` returns the next request id."""

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id
        self._lock = Condition()
        self._connected: object | None = None
        self._asked: dict[int, int] = {}
        self._given: list[Span] = []
        self._ahead_max = AHEAD_MAX
        self._needed: int | None = None
        self._next_bytes = 0
        self._put_at = self._refused_at = self._lowered_at = -AGAIN_S

    def take(self, size_bytes: int, connected: object) -> Span | None:
        """A span for a payload of `size_bytes`, given on this connection. None if there is none now."""
        with self._lock:
            self._follow(connected)
            now = time.monotonic()
            fit = [
                span for span in self._given if _fits(size_bytes, span.size_bytes) and now < span.given_at + USABLE_S
            ]
            if not fit:
                return None
            self._given.remove(fit[0])
            return fit[0]

    def keep(self, span: Span, connected: object) -> None:
        """Takes a span back that no put has used."""
        with self._lock:
            if self._connected is connected:
                self._given.append(span)

    def wait(self, size_bytes: int, connected: object, deadline: float) -> Span | None:
        """`take` that waits for the answers to what was asked for, until `deadline` (monotonic seconds)."""
        with self._lock:
            span: Span | None = None

            def found_or_over() -> bool:
                nonlocal span
                span = self.take(size_bytes, connected)
                return span is not None or not self._is_asked(size_bytes)

            self._lock.wait_for(found_or_over, max(0.0, deadline - time.monotonic()))
            return span

    def needed(
        self, size_bytes: int, connected: object, parent: bytes | None = None
    ) -> list[messages.ReturnSpan | messages.TakeSpan]:
        """The messages to send for a put of `size_bytes` that found no span; none if one is asked for already. Spans of
        other sizes are returned first, since they may take the room that the put needs. `parent`: the put's parent."""
        with self._lock:
            self._follow(connected)
            if self._is_asked(size_bytes) or time.monotonic() < self._refused_at + UNUSED_S:
                return []
            returned, self._given = self._given, []
            requests = self._ask(size_bytes, 1, ahead=False, parent=parent)
            self._needed = requests[0].id if requests else None
            return [*(messages.ReturnSpan(span.number) for span in returned), *requests]

    def unsent(self, requests: Iterable[messages.Message]) -> None:
        """Forgets requests that were not sent, and ends the waits for their answers."""
        with self._lock:
            for request in requests:
                if isinstance(request, messages.TakeSpan):
                    self._asked.pop(request.id, None)
            self._lock.notify_all()

    def withdraw(self, size_bytes: int, connected: object) -> list[messages.ReturnSpan]:
        """The messages that end the wait for spans for a payload of `size_bytes`. An answer on its way is ignored."""
        with self._lock:
            self._follow(connected)
            unneeded = [number for number, size in self._asked.items() if _fits(size_bytes, size)]
            for number in unneeded:
                del self._asked[number]
            # Another put that waits for one of them asks again.
            self._lock.notify_all()
        return [messages.ReturnSpan(number) for number in unneeded]

    def note(self, size_bytes: int) -> None:
        """A put of `size_bytes` has used a span, or would have used one. After the first put in a while, none is asked
        for in advance."""
        with self._lock:
            now = time.monotonic()
            in_series, self._put_at = now < self._put_at + UNUSED_S, now
            self._next_bytes = size_bytes if in_series else 0

    def ahead(self, connected: object) -> list[messages.TakeSpan]:
        """The requests to send so that the next puts find their spans."""
        if not self._next_bytes:
            return []
        with self._lock:
            size_bytes, self._next_bytes = self._next_bytes, 0
            if not size_bytes or self._connected is not connected:
                return []
            if time.monotonic() >= self._lowered_at + AGAIN_S:
                self._ahead_max = AHEAD_MAX
            ahead = min(self._ahead_max, max(AHEAD_MIN, AHEAD_BYTES // size_bytes))
            coming = [*(span.size_bytes for span in self._given), *self._asked.values()]
            return self._ask(size_bytes, ahead - sum(_fits(size_bytes, size) for size in coming), ahead=True)

    def unneeded(self, connected: object | None) -> list[messages.ReturnSpan]:
        """The messages that return all spans, if no put has used one for a while."""
        if not self._given:
            return []
        with self._lock:
            used_at = max([self._put_at, *(span.given_at for span in self._given)])
            if self._connected is not connected or time.monotonic() < used_at + UNUSED_S:
                return []
            returned, self._given = self._given, []
        return [messages.ReturnSpan(span.number) for span in returned]

    # ---- the connection's thread

    def given(self, message: messages.SpanTaken) -> None:
        """The daemon has given a span."""
        with self._lock:
            size_bytes = self._asked.pop(message.id, None)
            if size_bytes is not None:
                self._given.append(Span(message.id, size_bytes, message, time.monotonic()))
            self._lock.notify_all()

    def refused(self, request: int) -> bool:
        """The daemon gives no span. For a while, fewer are asked for in advance, or none at all if a put needed this
        one. False if `request` asked for no span."""
        with self._lock:
            if self._asked.pop(request, None) is None:
                return False
            if request == self._needed:
                self._refused_at = time.monotonic()
            self._ahead_max, self._lowered_at = len(self._given) + len(self._asked), time.monotonic()
            self._lock.notify_all()
        return True

    def disconnected(self) -> None:
        """The connection has ended: forgets what it gave, and ends the waits for it."""
        with self._lock:
            self._follow(None)
            self._lock.notify_all()

    def _ask(self, size_bytes: int, count: int, *, ahead: bool, parent: bytes | None = None) -> list[messages.TakeSpan]:
        free = SPANS_PER_CLIENT_MAX - len(self._given) - len(self._asked)
        requests = [messages.TakeSpan(self._next_id(), size_bytes, ahead, parent) for _ in range(min(count, free))]
        self._asked |= {request.id: size_bytes for request in requests}
        return requests

    def _follow(self, connected: object) -> None:
        if self._connected is not connected:
            self._connected = connected
            self._asked.clear()
            self._given.clear()

    def _is_asked(self, size_bytes: int) -> bool:
        return any(_fits(size_bytes, size) for size in self._asked.values())


def _fits(size_bytes: int, span_bytes: int) -> bool:
    """Whether a payload is written into a span of `span_bytes`."""
    return size_bytes <= span_bytes <= size_bytes + size_bytes // SPARE_SHARE

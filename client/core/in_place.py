"""Puts whose payload this process writes into the ring by itself, in one copy.

    a span, taken before ─→ pin it, read its slot again ─→ copy ─→ Commit of the span ─→ Committed
       ↑ none: TakeSpan         └ not ours any more, or no free lane word: the put goes through the inbox
       └ SpanTaken

Owns: the steps of such a put, and when the inbox is used instead. Does not own: the spans (spans.py), the mapping
(ring_writer.py), the pin (view.py), puts in flight (in_flight.py).

Invariants: this process writes into a span only while its lane pins the span, and only if the slot was unchanged after
the pin was published. So the span is not reused before the copy ends, nor while this process is stopped, nor after the
daemon's restart. A put that loses its connection is lost; its copy goes on, into a span that is nobody else's.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from ...errors import ProcessLimit, TensordError
from ...ipc import messages
from ...shm.layout import SPAN_HEADER_BYTES, span_bytes
from ...shm.payload import Payload
from .in_flight import PutsInFlight
from .put import Pending
from .ring_writer import RingWriter
from .spans import Span, Spans
from .view import View

SPAN_S_MAX: Final = 0.05
"""Seconds that a put waits for a span. Then it goes through the inbox, which needs no answer before the copy."""
_AGAIN_S: Final = 1.0
"""Seconds after such a put in which no put of the client waits for a span; also after this process had no free
descriptor for the ring."""
_OPEN_S: Final = 1.0
"""Seconds that the first put waits for the descriptor of the ring."""


class InPlacePuts:
    """Writes large payloads of one client in place.

    Args:
        send, next_id, connection: as for `PutSender`.
        ask: `ask(make, timeout_s, connected)` sends a request, and returns the future of its answer.
        view: returns the current attachment, or None.
    """

    def __init__(
        self,
        send: Callable[..., None],
        next_id: Callable[[], int],
        ask: Callable[..., Future[Any]],
        connection: Callable[[], object | None],
        view: Callable[[], View | None],
        in_flight: PutsInFlight,
    ) -> None:
        self._send = send
        self._ask = ask
        self._connection = connection
        self._view = view
        self._in_flight = in_flight
        self.spans = Spans(next_id)
        self._writer: RingWriter | None = None
        self._refused_by: object | None = None
        self._again_at = self._open_at = 0.0

    def put(
        self, make: Callable[[int], Pending], payload: Payload, deadline: float, parent: bytes | None = None
    ) -> bool:
        """Carries a put out. `make(span)` makes it, for the span of that number. `parent`: its parent's key.

        Returns:
            False if the put has to go through the inbox. Nothing of it is in flight then.

        Raises:
            TensordError: as `PutsInFlight.begin`; the put did not begin.
        """
        # SYNC POINT: the connection is read before the view. A view that is newer than the connection is never written
        # through, because sending on that connection fails then.
        connected, view = self._connection(), self._view()
        if connected is None or view is None:
            return False
        writer = self._writer_of(view, connected)
        if writer is None:
            return False
        span = self._span(payload.payload_bytes, connected, deadline, parent)
        if span is None:
            return False
        end = span.taken.offset + span_bytes(payload.payload_bytes)
        pin = view.hold_taken(span.taken) if end <= len(writer) else None
        if pin is None:
            self._say(messages.ReturnSpan(span.number), connected=connected)
            return False
        pending = make(span.number)
        # Until the daemon's answer: it may have taken the span back meanwhile, and restores it only while it is pinned.
        pending.pin = pin
        try:
            self._in_flight.begin(pending, deadline)
        except TensordError:
            self.spans.keep(span, connected)
            raise
        try:
            checksum = writer.write(payload, span.taken.offset + SPAN_HEADER_BYTES)
        except TensordError as error:
            # A device failed, or memory was freed. What was copied is in a span that is not committed.
            pending.pin = None
            self._in_flight.not_sent(pending, error)
            self._say(messages.ReturnSpan(span.number), connected=connected)
            return True
        pending.commit = replace(pending.commit, checksum=checksum)
        self.spans.note(payload.payload_bytes)
        if self._in_flight.send_on(pending, connected):
            try:
                self._send(pending.commit, connected=connected)
            except TensordError as error:
                self._in_flight.not_sent(pending, error)
        return True

    def ask_ahead(self) -> None:
        """Asks for the spans of the next puts. Called after the daemon's answer to a put, which the requests would
        delay."""
        connected = self._connection()
        if connected is not None and (requests := self.spans.ahead(connected)):
            self._say(*requests, connected=connected)

    def tidy(self) -> None:
        """Returns spans that are not needed any more."""
        connected = self._connection()
        if unneeded := self.spans.unneeded(connected):
            self._say(*unneeded, connected=connected)

    def _span(self, size_bytes: int, connected: object, deadline: float, parent: bytes | None) -> Span | None:
        """A span that was given, or is given in time."""
        span = self.spans.take(size_bytes, connected)
        if span is not None:
            return span
        if time.monotonic() < self._again_at:
            # One is asked for in advance, without a wait: the first that comes ends this time.
            self.spans.note(size_bytes)
            return None
        deadline = min(deadline, time.monotonic() + SPAN_S_MAX)
        # Twice, since the span that was on its way may have been asked for in advance, and refused as such.
        for _ in range(2):
            if (requests := self.spans.needed(size_bytes, connected, parent)) and not self._say(
                *requests, connected=connected
            ):
                # Without this the put would wait for an answer that never comes.
                self.spans.unsent(requests)
                return None
            span = self.spans.wait(size_bytes, connected, deadline)
            if span is not None:
                return span
        # Before the put: what waits for room would take room beside the put, or before it.
        if unneeded := self.spans.withdraw(size_bytes, connected):
            self._say(*unneeded, connected=connected)
        self._again_at = time.monotonic() + _AGAIN_S
        return None

    def _say(self, *sent: messages.Message, connected: object | None) -> bool:
        """Sends messages about spans. Returns whether they were sent: without a connection, nobody has spans."""
        with suppress(TensordError):
            self._send(*sent, connected=connected)
            return True
        return False

    def _writer_of(self, view: View, connected: object) -> RingWriter | None:
        """The writable mapping of the view's ring. None if the daemon does not allow it, or it cannot be made."""
        writer = self._writer
        if writer is not None and writer.inode == view.ring.inode and len(writer) >= len(view.ring):
            return writer
        if self._refused_by is connected or time.monotonic() < self._open_at:
            return None
        answer = self._ask(messages.OpenRing, _OPEN_S, connected=connected)
        try:
            try:
                fds = answer.result(_OPEN_S)
            except TimeoutError:
                if answer.cancel():
                    # Whoever receives a later answer closes its descriptors.
                    raise
                fds = answer.result()
        except ProcessLimit:
            self._open_at = time.monotonic() + _AGAIN_S
            return None
        except (TensordError, TimeoutError):
            self._refused_by = connected
            return None
        try:
            self._writer = RingWriter(fds[0])
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._open_at = time.monotonic() + _AGAIN_S
            else:
                self._refused_by = connected
            return None
        finally:
            for fd in fds:
                os.close(fd)
        return self._writer

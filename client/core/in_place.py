"""Puts whose payload this process writes into the ring by itself, in one copy: Commit, Placed, the copy, Fill.

    Commit in place ─→ the daemon makes room ─→ Placed ─→ pin the span, read its slot again ─→ copy ─→ Fill ─→ Committed
                                                   │ too late, no free lane word, or the span was revoked
                                                   └→ Fill without a checksum; the put goes through the inbox

Owns: the steps of such a put, and when the inbox is used instead. Does not own: the mapping (ring_writer.py), the pin
(view.py), puts in flight (in_flight.py).

Invariants: this process writes into a span only while its lane pins the span, and only if the slot was unchanged after
the pin was published. So the span is not reused before the copy ends, nor while this process is stopped, nor after the
daemon's restart. A put that loses its connection is lost; its copy goes on, into a span that is nobody else's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from ...errors import TensordError
from ...ipc import messages
from ...shm.layout import SPAN_HEADER_BYTES, span_bytes
from ...shm.payload import Payload
from .in_flight import PutsInFlight
from .put import Pending
from .ring_writer import RingWriter
from .view import View

PLACED_S_MAX: Final = 0.05
"""Seconds that a put waits for its span. Then it goes through the inbox, which needs no answer before the copy."""
_AGAIN_S: Final = 1.0
"""Seconds after such a put in which all puts of the client go through the inbox."""
_OPEN_S: Final = 1.0
"""Seconds that the first put waits for the descriptor of the ring."""


class InPlacePuts:
    """Writes large payloads of one client in place.

    Args:
        send, connection: as for `PutSender`.
        ask: `ask(make, timeout_s, connected)` sends a request, and returns the future of its answer.
        view: returns the current attachment, or None.
    """

    def __init__(
        self,
        send: Callable[..., None],
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
        self._writer: RingWriter | None = None
        self._refused_by: object | None = None
        self._again_at = 0.0

    def put(self, make: Callable[[], Pending], payload: Payload, deadline: float) -> bool:
        """Carries a put out. `make` makes it, as one that is not in flight yet.

        Returns:
            False if the put has to go through the inbox. Nothing of it is in flight then.

        Raises:
            TensordError: as `PutsInFlight.begin`; the put did not begin.
        """
        # SYNC POINT: the connection is read before the view. A view that is newer than the connection is never written
        # through, because sending on that connection fails then.
        connected, view = self._connection(), self._view()
        if connected is None or view is None or time.monotonic() < self._again_at:
            return False
        writer = self._writer_of(view, connected)
        if writer is None:
            return False
        pending = make()
        self._in_flight.begin(pending, deadline)
        placed = self._placed(pending, connected, deadline)
        if placed is None:
            return pending.put.state != "sent"
        end = placed.offset + span_bytes(pending.commit.payload_bytes)
        pin = view.hold_placed(placed) if end <= len(writer) else None
        if pin is None:
            return not self._give_up(pending, connected)
        checksum = writer.write(payload, placed.offset + SPAN_HEADER_BYTES)
        del pin
        self._say(messages.Fill(pending.commit.id, checksum), pending, connected)
        return True

    def _placed(self, pending: Pending, connected: object, deadline: float) -> messages.Placed | None:
        """Asks for a span. None if there is none in time, or the put has ended."""
        if not self._in_flight.send_on(pending, connected):
            return None
        self._say(pending.commit, pending, connected)
        placed = self._in_flight.wait_placed(pending, min(deadline, time.monotonic() + PLACED_S_MAX))
        if placed is None and self._give_up(pending, connected):
            self._again_at = time.monotonic() + _AGAIN_S
        return placed

    def _give_up(self, pending: Pending, connected: object) -> bool:
        """Ends the put's part in the daemon. False if the put has ended already."""
        if not self._in_flight.forget(pending):
            return False
        with suppress(TensordError):
            self._send(messages.Fill(pending.commit.id, None), connected=connected)
        return True

    def _say(self, message: messages.Message, pending: Pending, connected: object) -> None:
        try:
            self._send(message, connected=connected)
        except TensordError as error:
            self._in_flight.not_sent(pending, error)

    def _writer_of(self, view: View, connected: object) -> RingWriter | None:
        """The writable mapping of the view's ring. None if the daemon does not allow it, or it cannot be made."""
        writer = self._writer
        if writer is not None and writer.inode == view.ring.inode and len(writer) >= len(view.ring):
            return writer
        if self._refused_by is connected:
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
        except (TensordError, TimeoutError):
            self._refused_by = connected
            return None
        try:
            self._writer = RingWriter(fds[0])
        except OSError:
            self._refused_by = connected
            return None
        finally:
            for fd in fds:
                os.close(fd)
        return self._writer

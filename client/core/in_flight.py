"""The puts that are sent, or being sent, and not answered yet.

Owns: the table of these puts with the inbox regions that they hold until the daemon acknowledges them, and how each of
them ends: by the daemon's answer, with the connection, or with the client. Does not own: copying and sending
(puts.py), the connection (link.py), nor the inboxes (inboxes.py).
Invariants: an inbox that a daemon may still read is not written; an incomplete payload is never sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from ...errors import DaemonUnavailable, Invalidated, LimitReached, TensordError, Unavailable
from ...ipc import messages
from ...ipc.blocking import BlockingChannel
from ...shm.layout import NAMESPACE_TAG_BYTES
from .inbox import Region
from .inboxes import Inboxes
from .put import Pending, Put, PutState
from .waiting import Condition

_log = logging.getLogger("tensord")

WENT: Final = "the daemon went away before it acknowledged the payload"
CUT: Final = "a signal handler's exception interrupted a put of this client, which attaches anew; put it again"


class PutsInFlight:
    """The puts in flight of one client. Thread-safe.

    Args:
        inboxes: the client's inboxes.
        connection: returns the current connection, or None.
    """

    def __init__(self, inboxes: Inboxes, connection: Callable[[], object | None]) -> None:
        self.inboxes = inboxes
        self._connection = connection
        self._lock = Condition()
        self._pending: dict[int, Pending] = {}
        self._invalidated: set[bytes] = set()
        self.cut = False
        """Whether a signal handler's exception ended a put and may have left it half done. `disconnected` resets it."""
        self.why_lost = WENT
        """Why there is no connection. The error of puts that end as "lost" says it."""

    def __len__(self) -> int:
        return len(self._pending)

    # ---- the thread that puts

    def begin(self, pending: Pending, deadline: float) -> bool:
        """Adds a put. Waits until fewer than `commits_in_flight_max` puts are in flight. False if the put's inbox was
        retired.

        Raises:
            LimitReached, DaemonUnavailable: the put was not added.
        """
        most = self.inboxes.limits.commits_in_flight_max
        with self._lock:
            connected = self._connection()

            def connection_ended() -> bool:
                return connected is None or self._connection() is not connected

            self._lock.wait_for(
                lambda: len(self._pending) < most or connection_ended(), max(0.0, deadline - time.monotonic())
            )
            if len(self._pending) >= most:
                if connection_ended():
                    raise DaemonUnavailable(f"the daemon is away, and commits_in_flight_max ({most}) puts wait for it")
                raise LimitReached(
                    f"commits_in_flight_max is {most}, and none of {most} puts in flight was acknowledged in time; "
                    "put fewer payloads at once, or raise timeout_s"
                )
            inbox = pending.inbox
            if inbox is not None and inbox.retired:
                return False
            if inbox is not None and not self.inboxes.knows(inbox):
                raise DaemonUnavailable(
                    "the reservation belongs to the process that this one was forked from; reserve again here"
                )
            self._pending[pending.commit.id] = pending
        return True

    def hold(self, pending: Pending, region: Region) -> bool:
        """Gives the put a region, which is released with it. Returns False if the put has ended meanwhile."""
        with self._lock:
            if pending.commit.id in self._pending:
                pending.regions[region.offset] = region
                return True
        region.release()
        return False

    def send_on(self, pending: Pending, connected: object) -> bool:
        """Records that the put's Commit is sent on this connection. False if it must not be sent: a new connection took
        the put over, or the put has ended."""
        with self._lock:
            if pending.sent_again or pending.commit.id not in self._pending:
                return False
            pending.connected = connected
        return True

    def not_sent(self, pending: Pending, error: TensordError) -> None:
        """Settles a put whose messages were not sent; unless a new connection took the put over, which the daemon
        answers.
        """
        if isinstance(error, DaemonUnavailable) and self.why_lost is not WENT:
            error = DaemonUnavailable(self.why_lost)
        with self._lock:
            if not pending.sent_again:
                self._settle(pending, state_for(error), error)

    def end(self, put: Put, state: PutState, error: TensordError | None) -> None:
        """Settles a put. Logs once for each namespace that its puts are refused."""
        if isinstance(error, Invalidated) and put.key[:NAMESPACE_TAG_BYTES] not in self._invalidated:
            self._invalidated.add(put.key[:NAMESPACE_TAG_BYTES])
            _log.warning("tensord: %s", error)
        put.settle(state, error)

    # ---- the connection's thread

    def acknowledged(self, message: messages.PartCopied | messages.Committed) -> None:
        """Handles a PartCopied, after which the part's region is free, or a Committed, which settles the put."""
        region = None
        with self._lock:
            pending = self._pending.get(message.id)
            if pending is not None and not pending.whole and isinstance(message, messages.PartCopied):
                region = pending.regions.pop(message.inbox_offset, None)
        if region is not None:
            region.release()
        if pending is None or isinstance(message, messages.PartCopied):
            return
        error = message.error.to_error() if message.error is not None else None
        self._settle(pending, message.outcome, error)

    def refused(self, request: int, error: TensordError) -> bool:
        """Handles an error that answers a put or an OpenInbox. Returns False if `request` is neither."""
        with self._lock:
            inbox = self.inboxes.refused(request, error)
            if inbox is not None:
                for each in [p for p in self._pending.values() if p.inbox is inbox]:
                    self._settle(each, "refused", error)
                return True
            pending = self._pending.get(request)
        if pending is None:
            return False
        self._settle(pending, "refused", error)
        return True

    def disconnected(self) -> None:
        """The connection ended: retires the inboxes of all puts that were sent, and settles puts that cannot be sent
        again.

        A put is sent again once, on the next connection, if its whole payload stands in its inbox. The daemon may carry
        out a put that was sent at any time later; hence the retired inboxes. After an interrupted put (`cut`) nothing
        is sent again: all puts are lost and all inboxes are given up.

        SYNC POINT: the same lock covers this function, the beginning of a put, and the last check before a Commit is
        sent. So a payload that was incomplete when its inbox was retired is never sent: it goes on being written in
        private pages.
        """
        self.inboxes.disconnected()
        with self._lock:
            cut, self.cut = self.cut, False
            if cut:
                self.inboxes.start_over()
            unsendable = [p for p in self._pending.values() if cut or p.sent_again or not p.complete]
            for inbox in {p.inbox for p in self._pending.values() if p.sent and p.inbox is not None}:
                self.inboxes.retire(inbox)
            # Wakes puts that wait for room in `begin`.
            self._lock.notify_all()
            for pending in unsendable:
                lost = DaemonUnavailable(CUT if cut else self.why_lost)
                self._settle(pending, "lost", lost)

    def wake(self) -> None:
        """Wakes puts that wait in `begin`: there is no connection for them any more."""
        with self._lock:
            self._lock.notify_all()

    def send_again(self, send: Callable[..., None], connected: object) -> None:
        """Sends every complete put that is not acknowledged on a new connection, each after its inbox.

        Raises:
            DaemonUnavailable: the new connection has ended already.
        """
        with self._lock:
            again = [pending for pending in self._pending.values() if pending.complete]
            for pending in again:
                pending.sent_again = True
        for pending in again:
            assert pending.inbox is not None, "a complete put stands in an inbox"
            self.inboxes.tell(pending.inbox, connected, send)
            # The claim that the put was made under ended with the old connection.
            pending.commit = replace(pending.commit, claim=None, acks=False)
            send(pending.commit, *pending.parts)

    def close(self) -> None:
        """Settles all puts in flight as lost."""
        self.why_lost = "the client was closed"
        with self._lock:
            # First: from here on no thread writes memory that the daemon may still read.
            self.inboxes.close()
            self._lock.notify_all()
            for pending in list(self._pending.values()):
                closed = DaemonUnavailable("the client was closed before the daemon answered")
                self._settle(pending, "lost", closed)

    def close_in_child(self) -> None:
        """After a fork: the inboxes and the puts in flight belong to the parent."""
        self.inboxes.close_in_child()
        for pending in self._pending.values():
            pending.put.disown()

    def _settle(self, pending: Pending, state: PutState, error: TensordError | None) -> None:
        with self._lock:
            if self._pending.pop(pending.commit.id, None) is None:
                return
            regions, pending.regions, pending.pin = pending.regions, {}, None
            self._lock.notify_all()
        for region in regions.values():
            region.release()
        self.end(pending.put, state, error)


def state_for(error: TensordError) -> PutState:
    return "lost" if isinstance(error, Unavailable) else "refused"


def send_on(
    channel: BlockingChannel,
    timeout_s: float,
    *sent: messages.Message,
    fds: Sequence[int] = (),
    connected: object = None,
) -> None:
    """`Link.send` on a channel that is not attached yet."""
    channel.send(*sent, fds=fds, timeout_s=timeout_s)

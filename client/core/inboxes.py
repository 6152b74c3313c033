"""A client's inboxes: the current one, from which new regions come, and former ones that puts in flight still use.

Owns: when an inbox is created, on which connection the daemon was told of it, and when it is closed. Does not own: its
regions (inbox.py), nor the puts in it (puts.py).

    first put → current ─ a put needs more ─→ draining ─ its last region is free ─→ closed
                   └ its connection ended with puts unanswered → retired ─ its last region is free ─→ closed

Invariants: a region that a daemon may still read is not written. A daemon may read an inbox long after its connection
ended. So a retired inbox is mapped privately: it gives no regions, writes to its arrays reach no other process, and
payloads that are still to be committed are copied to the current inbox. Complete payloads are sent again from the
retired inbox, because they cannot change.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Final

from ...errors import (
    DaemonUnavailable,
    LimitReached,
    NotEnoughMemory,
    ObjectTooLarge,
    ProcessLimit,
    TensordError,
    TimedOut,
    Unavailable,
    without_frames,
)
from ...ipc import messages
from ...ipc.descriptors import no_descriptor
from ...shm.layout import ALIGN_BYTES, aligned
from ...shm.segments import address_limit, file_limit
from .aside import aside, begin
from .inbox import Inbox, Region

START_BYTES: Final = 1 << 20
"""Bytes of the first inbox, unless the first put needs more."""
_GROW_AGAIN_S: Final = 10.0


class Inboxes:
    """The inboxes of one client. `send`, `next_id` and `connection` as for `PutSender`. Thread-safe."""

    def __init__(
        self, send: Callable[..., None], next_id: Callable[[], int], connection: Callable[[], object | None]
    ) -> None:
        self._send = send
        self._next_id = next_id
        self._connection = connection
        # Reentrant: a finalizer that runs under the lock may close a client.
        self._lock = threading.RLock()
        self._all: dict[int, Inbox] = {}
        self._asked: dict[int, Inbox] = {}
        self._grow_at = 0.0
        self._refusal: tuple[object | None, TensordError] | None = None
        """Why the last inbox that was wanted is not there, and the connection at that time."""
        self.current: Inbox | None = None
        self.limits = messages.ClientLimits()

    def fit(self, size_bytes: int) -> Inbox:
        """Returns the current inbox, with room for two puts of `size_bytes` if the limits allow that. Grows it if
        needed.

        Raises:
            DaemonUnavailable, NotEnoughMemory, ProcessLimit: there is no inbox, and none can be created.
        """
        inbox, connected = self.current, self._connection()
        if (
            inbox is not None
            and not inbox.retired
            and inbox.announced_on is connected is not None
            and self._wanted_bytes(size_bytes) <= inbox.size_bytes <= self._most_bytes
        ):
            return inbox
        # No limit: not a call of a signal handler, which may not put within a put.
        return aside(partial(self._fit, size_bytes), within_s=-1)

    def _fit(self, size_bytes: int) -> Inbox:
        with self._lock:
            inbox, most, wanted = self.current, self._most_bytes, self._wanted_bytes(size_bytes)
            if inbox is None or inbox.retired or inbox.size_bytes > most:
                return self._make(wanted if self._may_grow() else min(wanted, START_BYTES))
            if inbox.size_bytes < wanted and self._may_grow():
                try:
                    return self._make(wanted)
                except (ProcessLimit, NotEnoughMemory) as error:
                    # The inbox stays as large as it is.
                    self._refusal = self._connection(), without_frames(error)
                except TensordError as error:
                    # A put that is larger than the inbox is streamed through it, which needs a daemon.
                    if isinstance(error, Unavailable) and aligned(size_bytes) > inbox.size_bytes:
                        raise
            connected = self._connection()
            if connected is not None:
                self.tell(inbox, connected, self._send)
            return inbox

    def region(self, size_bytes: int, deadline: float, inbox: Inbox | None = None) -> Region:
        """Returns a region of the current inbox. Grows the inbox before a put waits for room. `inbox`: the result of a
        `fit` just before.

        Raises:
            ObjectTooLarge: the region fits in no inbox.
            TimedOut: no room came free by `deadline` (monotonic seconds).
            DaemonUnavailable: no inbox or no room, and no daemon (any more).
            NotEnoughMemory, LimitReached: no inbox could be created; LimitReached also as the daemon's refusal of one.
        """
        while True:
            connected = self._connection()
            inbox = inbox or self.fit(size_bytes)
            if aligned(size_bytes) > inbox.size_bytes:
                if aligned(size_bytes) <= self._most_bytes:
                    raise self._none_of(size_bytes)
                raise ObjectTooLarge(
                    f"a reservation of {size_bytes} bytes does not fit in the inbox of {inbox.size_bytes} bytes; "
                    "use put, which streams larger payloads, or raise inbox_bytes_max"
                )
            region = inbox.take(size_bytes, 0.0)
            if region is None and not inbox.retired:
                if aside(partial(self._grown, inbox), within_s=-1):
                    inbox = None
                    continue
                if connected is None:
                    raise DaemonUnavailable(f"the daemon is away, and the inbox of {inbox.size_bytes} bytes is full")
                region = inbox.take(size_bytes, deadline, partial(self._is_on, connected))
            if region is not None:
                return region
            if not inbox.retired and self._is_on(connected):
                raise no_room(inbox, size_bytes)
            inbox = None

    def tell(self, inbox: Inbox, connected: object | None, send: Callable[..., None]) -> None:
        """Sends OpenInbox unless the daemon knows the inbox on this connection already.

        Raises:
            DaemonUnavailable, TimedOut: the message was not sent.
        """
        with self._lock:
            if connected is not None and inbox.announced_on is connected:
                return
            if not self.knows(inbox):
                raise inbox.refusal or DaemonUnavailable("the inbox of the payload was closed; put it again")
            request = self._next_id()
            self._asked[request] = inbox
            try:
                message = messages.OpenInbox(request, inbox.size_bytes, inbox.number)
                send(message, fds=(inbox.fd,), connected=connected)
            except BaseException:
                self._asked.pop(request, None)
                raise
            inbox.announced_on = connected or self._connection()

    def is_current(self, region: Region) -> bool:
        """Whether a region belongs to the current inbox, and the daemon knows this inbox."""
        inbox, connected = region.inbox, self._connection()
        return inbox is self.current and not inbox.retired and connected is not None and inbox.announced_on is connected

    def knows(self, inbox: Inbox) -> bool:
        """Whether an inbox belongs to this client and is not closed."""
        return self._all.get(inbox.number) is inbox

    @property
    def used_bytes(self) -> int:
        """Bytes of all regions in use."""
        return sum(inbox.used_bytes for inbox in list(self._all.values()))

    def opened(self, request: int) -> None:
        """The daemon has mapped an inbox: prefaults it in a background thread."""
        inbox = self._asked.pop(request, None)
        if inbox is not None and not inbox.prefaulted:
            inbox.prefaulted = True
            # Without a thread, the pages are faulted in by the puts.
            with suppress(ProcessLimit):
                begin(threading.Thread(target=inbox.prefault, name="tensord-prefault", daemon=True))

    def refused(self, request: int, error: TensordError) -> Inbox | None:
        """The daemon refused an inbox: closes it. If it was the current one, the largest that is left becomes current.

        Returns:
            The inbox; None if the request was not an OpenInbox.
        """
        with self._lock:
            inbox = self._asked.pop(request, None)
            if inbox is None:
                return None
            inbox.refusal = error
            if not isinstance(error, Unavailable):
                self._refusal = inbox.announced_on, error
                self._grow_at = time.monotonic() + _GROW_AGAIN_S
            self._give_up(inbox)
            if self.current is None:
                left = [other for other in self._all.values() if not other.retired]
                self.current = max(left, key=lambda other: other.size_bytes, default=None)
            return inbox

    def retire(self, inbox: Inbox) -> None:
        """Takes no more regions of an inbox. A daemon may still read the regions that it knows."""
        with self._lock:
            inbox.retire()
            if self.current is inbox:
                self.current = None

    def disconnected(self) -> None:
        """The connection ended: no answer to an OpenInbox comes any more. The next daemon may allow more."""
        with self._lock:
            self._asked.clear()
            self._grow_at = 0.0

    def tidy(self) -> None:
        """Closes former inboxes without a region in use."""
        if len(self._all) == (self.current is not None):
            return
        with self._lock:
            for inbox in list(self._all.values()):
                if inbox is self.current or not inbox.retire_if_unused():
                    continue
                connected = self._connection()
                self._give_up(inbox)
                if connected is not None and inbox.announced_on is connected:
                    with suppress(TensordError):
                        self._send(messages.CloseInbox(inbox.number), connected=connected)

    def start_over(self) -> None:
        """Closes all inboxes, because a signal handler's exception may have left one half changed."""
        with self._lock:
            for inbox in list(self._all.values()):
                inbox.broken = True
            self.close()

    def close(self) -> None:
        """Closes all inboxes."""
        with self._lock:
            for inbox in list(self._all.values()):
                self._give_up(inbox)

    def close_in_child(self) -> None:
        """After a fork: the inboxes belong to the parent. Closes the descriptors without a lock."""
        for inbox in self._all.values():
            inbox.close()

    def _give_up(self, inbox: Inbox) -> None:
        self._all.pop(inbox.number, None)
        self.retire(inbox)
        inbox.close()

    def _is_on(self, connected: object | None) -> bool:
        """Whether `connected` is still the current connection."""
        return self._connection() is connected

    @property
    def _most_bytes(self) -> int:
        return self.limits.inbox_bytes_max // ALIGN_BYTES * ALIGN_BYTES

    def _wanted_bytes(self, size_bytes: int) -> int:
        """The size of an inbox for puts of `size_bytes`: at least twice as much, within the limits."""
        return min(self._most_bytes, max(START_BYTES, 1 << (2 * aligned(max(1, size_bytes)) - 1).bit_length()))

    def _may_grow(self) -> bool:
        """Whether another inbox is allowed. False for a while after the daemon refused one."""
        return len(self._all) < self.limits.inboxes_per_client_max and time.monotonic() >= self._grow_at

    def _grown(self, inbox: Inbox) -> bool:
        """Creates a larger inbox unless `inbox` was replaced already. Returns whether there is another current inbox
        now.
        """
        with self._lock:
            if self.current is not inbox:
                return True
            size_bytes = min(self._most_bytes, 2 * inbox.size_bytes)
            if size_bytes <= inbox.size_bytes or not self._may_grow():
                return False
            try:
                self._make(size_bytes)
            except TensordError:
                return False
            return True

    def _none_of(self, size_bytes: int) -> TensordError:
        """Why no inbox has room for a region of `size_bytes`, which inbox_bytes_max allows."""
        connected, refusal = self._connection(), self._refusal
        if connected is None:
            return DaemonUnavailable(f"the daemon is away, and no inbox has room for {size_bytes} bytes")
        if refusal is not None and refusal[0] is connected:
            # A new error for each caller, without the frames of the others.
            return copy(refusal[1])
        return LimitReached(
            f"inboxes_per_client_max is {self.limits.inboxes_per_client_max}, and none of the inboxes in use has room "
            f"for {size_bytes} bytes; delete arrays from reserve() that you no longer need"
        )

    def _make(self, size_bytes: int) -> Inbox:
        """Creates a new current inbox, and announces it to the daemon."""
        if time.monotonic() >= self._grow_at:  # until then a smaller inbox is made than the one that was refused
            self._refusal = None
        self.tidy()
        try:
            inbox = Inbox(size_bytes, self._next_id())
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise no_descriptor() from None
            limits = {errno.EFBIG: file_limit, errno.ENOMEM: address_limit}
            why = limits[error.errno]() if error.errno in limits else error
            raise NotEnoughMemory(f"no inbox of {size_bytes} bytes can be made: {why}") from error
        self._all[inbox.number] = inbox
        before, self.current = self.current, inbox
        try:
            self.tell(inbox, self._connection(), self._send)
        except BaseException:
            self._give_up(inbox)
            self.current = before
            raise
        return inbox


def no_room(inbox: Inbox, size_bytes: int) -> TimedOut:
    """The error for a region that was not free in time."""
    return TimedOut(
        f"no {size_bytes} bytes came free in the inbox of {inbox.size_bytes} bytes in time; "
        "delete arrays from reserve() that you no longer need, or raise timeout_s"
    )

"""A client's inboxes: the one that new regions come from, and those that puts are still read from.

Owns: when an inbox is made, on which connection the daemon was told of it, and when it is closed. Does not own its
regions (inbox.py), nor the puts that stand there (puts.py).

    first put → current ─ a put needs more ─→ drains ─ no region of it is left ─→ closed
                   └ its connection ended with puts unanswered → retired ─ no region of it is left ─→ closed

Invariant: a region that a daemon may still read is not written. A daemon whose connection ended may read the inbox for
as long as it likes. So a retired inbox is mapped privately from then on: no region is taken from it, what is written to
its arrays reaches nobody, and what is still to be committed there is copied to the current inbox. What stands whole in
it is sent again from there, since it cannot change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from ...errors import DaemonUnavailable, NotEnoughMemory, ObjectTooLarge, TensordError, TimedOut, Unavailable
from ...ipc import messages
from ...shm.layout import ALIGN_BYTES, aligned
from .aside import aside
from .inbox import Inbox, Region

START_BYTES: Final = 1 << 20
"""Bytes of a first inbox, unless the first put needs more."""
_GROW_AGAIN_S: Final = 10.0


class Inboxes:
    """The inboxes of one client. `send` and `connection` as for `Puts`. Safe to use from several threads."""

    def __init__(
        self, send: Callable[..., None], next_id: Callable[[], int], connection: Callable[[], object | None]
    ) -> None:
        self._send = send
        self._next_id = next_id
        self._connection = connection
        # Reentrant: what is collected under it may close a client.
        self._lock = threading.RLock()
        self._all: dict[int, Inbox] = {}
        self._asked: dict[int, Inbox] = {}
        self._grow_at = 0.0
        self._refusal: TensordError | None = None
        self.current: Inbox | None = None
        self.limits = messages.ClientLimits()

    def fit(self, size_bytes: int) -> Inbox:
        """The current inbox, for a put of `size_bytes`: of twice as much, or as large as the daemon allows.

        Raises:
            DaemonUnavailable, NotEnoughMemory: there is none, and none can be made.
        """
        inbox, connected = self.current, self._connection()
        if (
            inbox is not None
            and not inbox.retired
            and inbox.told is connected is not None
            and self._wanted_bytes(size_bytes) <= inbox.size_bytes <= self._most_bytes
        ):
            return inbox
        return aside(partial(self._fit, size_bytes))

    def _fit(self, size_bytes: int) -> Inbox:
        with self._lock:
            inbox, most, wanted = self.current, self._most_bytes, self._wanted_bytes(size_bytes)
            if inbox is None or inbox.retired or inbox.size_bytes > most:
                return self._make(wanted if self._may_grow() else min(wanted, START_BYTES))
            if inbox.size_bytes < wanted and self._may_grow():
                try:
                    return self._make(wanted)
                except TensordError as error:
                    # A put that is larger than the inbox is streamed through it, but not without a daemon.
                    if isinstance(error, Unavailable) and aligned(size_bytes) > inbox.size_bytes:
                        raise
            connected = self._connection()
            if connected is not None:
                self.tell(inbox, connected, self._send)
            return inbox

    def region(self, size_bytes: int, deadline: float, inbox: Inbox | None = None) -> Region:
        """A region of the current inbox, which grows rather than have a put wait for room. `inbox`: the one that `fit`
        just gave.

        Raises:
            ObjectTooLarge: it fits in no inbox.
            TimedOut: no room came free by `deadline` (monotonic seconds).
            DaemonUnavailable: there is no inbox, or no room, and no daemon (any more).
            NotEnoughMemory: there is no inbox.
        """
        while True:
            connected = self._connection()
            inbox = inbox or self.fit(size_bytes)
            if aligned(size_bytes) > inbox.size_bytes:
                if aligned(size_bytes) <= self._most_bytes and self._refusal is not None:
                    raise self._refusal
                raise ObjectTooLarge(
                    f"a reservation of {size_bytes} bytes does not fit in the inbox of {inbox.size_bytes}; "
                    "put it instead, which streams, or raise inbox_bytes_max"
                )
            region = inbox.take(size_bytes, 0.0)
            if region is None and not inbox.retired:
                if aside(partial(self._grown, inbox)):
                    inbox = None
                    continue
                if connected is None:
                    raise DaemonUnavailable(f"the daemon is away, and the inbox of {inbox.size_bytes} has no room")
                region = inbox.take(size_bytes, deadline, partial(self._is_on, connected))
            if region is not None:
                return region
            if not inbox.retired and self._is_on(connected):
                raise no_room(inbox, size_bytes)
            inbox = None

    def tell(self, inbox: Inbox, connected: object | None, send: Callable[..., None]) -> None:
        """Has the daemon know of an inbox before anything names it on this connection.

        Raises:
            DaemonUnavailable, TimedOut: it was not sent.
        """
        with self._lock:
            if connected is not None and inbox.told is connected:
                return
            if not self.knows(inbox):
                raise inbox.refusal or DaemonUnavailable("the inbox it stands in was given up")
            request = self._next_id()
            self._asked[request] = inbox
            try:
                message = messages.OpenInbox(request, inbox.size_bytes, inbox.number)
                send(message, fds=(inbox.fd,), connected=connected)
            except BaseException:
                self._asked.pop(request, None)
                raise
            inbox.told = connected or self._connection()

    def is_current(self, region: Region) -> bool:
        """Whether a region is of the inbox that new ones come from, and the daemon knows of it."""
        inbox, connected = region.inbox, self._connection()
        return inbox is self.current and not inbox.retired and connected is not None and inbox.told is connected

    def knows(self, inbox: Inbox) -> bool:
        """Whether an inbox is this client's, and was not closed."""
        return self._all.get(inbox.number) is inbox

    @property
    def used_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(inbox.used_bytes for inbox in list(self._all.values()))

    def opened(self, request: int) -> None:
        """The daemon has mapped an inbox: it is worth mapping in now."""
        inbox = self._asked.pop(request, None)
        if inbox is not None and not inbox.prefaulted:
            inbox.prefaulted = True
            threading.Thread(target=inbox.prefault, name="tensord-prefault", daemon=True).start()

    def refused(self, request: int, error: TensordError) -> Inbox | None:
        """The daemon did not take an inbox, which is given up; what was current before it is so again.

        Returns:
            The inbox; None if the request did not bring one.
        """
        with self._lock:
            inbox = self._asked.pop(request, None)
            if inbox is None:
                return None
            inbox.refusal = self._refusal = error
            self._give_up(inbox)
            self._grow_at = time.monotonic() + _GROW_AGAIN_S
            if self.current is None:
                left = [other for other in self._all.values() if not other.retired]
                self.current = max(left, key=lambda other: other.size_bytes, default=None)
            return inbox

    def retire(self, inbox: Inbox) -> None:
        """Takes no more regions of it: a daemon may read those it had for as long as it likes."""
        with self._lock:
            inbox.retire()
            if self.current is inbox:
                self.current = None

    def disconnected(self) -> None:
        """No answer comes any more."""
        with self._lock:
            self._asked.clear()

    def tidy(self) -> None:
        """Closes inboxes that are no longer current, and have no region left."""
        if len(self._all) == (self.current is not None):
            return
        with self._lock:
            for inbox in list(self._all.values()):
                if inbox is self.current or not inbox.retire_if_unused():
                    continue
                connected = self._connection()
                self._give_up(inbox)
                if connected is not None and inbox.told is connected:
                    with suppress(TensordError):
                        self._send(messages.CloseInbox(inbox.number), connected=connected)

    def start_over(self) -> None:
        """Gives all of them up: a signal handler's exception may have left any of them half changed."""
        with self._lock:
            for inbox in list(self._all.values()):
                inbox.broken = True
            self.close()

    def close(self) -> None:
        """Gives all of them up."""
        with self._lock:
            for inbox in list(self._all.values()):
                self._give_up(inbox)

    def close_in_child(self) -> None:
        """After a fork: they are the parent's. Takes no lock."""
        for inbox in self._all.values():
            inbox.close()

    def _give_up(self, inbox: Inbox) -> None:
        self._all.pop(inbox.number, None)
        self.retire(inbox)
        inbox.close()

    def _is_on(self, connected: object | None) -> bool:
        """Whether the connection is the same."""
        return self._connection() is connected

    @property
    def _most_bytes(self) -> int:
        return self.limits.inbox_bytes_max // ALIGN_BYTES * ALIGN_BYTES

    def _wanted_bytes(self, size_bytes: int) -> int:
        """Bytes of an inbox for a put of `size_bytes`."""
        return min(self._most_bytes, max(START_BYTES, 1 << (2 * aligned(max(1, size_bytes)) - 1).bit_length()))

    def _may_grow(self) -> bool:
        """Not for some time after the daemon has refused an inbox."""
        return len(self._all) < self.limits.inboxes_per_client_max and time.monotonic() >= self._grow_at

    def _grown(self, inbox: Inbox) -> bool:
        """Whether there is a larger inbox than `inbox` now."""
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

    def _make(self, size_bytes: int) -> Inbox:
        """A new current inbox, of which the daemon has been told."""
        self.tidy()
        try:
            inbox = Inbox(size_bytes, self._next_id())
        except OSError as error:
            raise NotEnoughMemory(f"no inbox of {size_bytes} bytes can be made: {error}") from error
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
    """Why a region was not to be had in time."""
    return TimedOut(
        f"no {size_bytes} bytes came free in the inbox of {inbox.size_bytes} in time: arrays from reserve() "
        "that still live hold their part of it"
    )

"""The listeners of a connection: what receives the messages that the daemon sends unasked.

Owns: the list of listeners, and its lock. Does not own: the connection (link.py), nor the effects of a push, which the
listeners decide.
Invariants: a listener that is added is told of the current connection, by `add` or by the link's thread. An exception
of a listener reaches neither the link's thread nor another listener.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel

_log = logging.getLogger("tensord")

Connected = BlockingChannel
"""Identifies one connection. The daemon keeps no state of it for the next."""
Push = messages.ModeChanged | messages.Order
ListenerMessage = Push | messages.Modes | messages.DeviceOpened


class PushListener(Protocol):
    """Receives the messages that the daemon sends unasked. The link's thread calls it, so it must not block."""

    def attached(self, connected: Connected) -> None:
        """A new connection: the daemon has no state of this client, so the listener sends its registrations again."""

    def detached(self) -> None:
        """The connection ended. Also called when the client is closed, then in the closing thread."""

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        """A push, or an answer with the state of modes, in the order in which the daemon sent them."""

    def forked(self) -> None:
        """Called in the child of a fork. Registrations at the daemon belong to the parent; locks and
        threads are gone.
        """


class Listeners:
    """The listeners of one client, by weak reference. `connection` returns the current connection, or None."""

    def __init__(self, connection: Callable[[], Connected | None]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # Copy-on-write, so that readers need no lock.
        self._listeners: tuple[weakref.ref[PushListener], ...] = ()

    def add(self, listener: PushListener, unless: Callable[[PushListener], bool] | None = None) -> bool:
        """Adds a listener, by weak reference. If the client is attached, calls `listener.attached` at once.

        Args:
            unless: the listener is not added, and False is returned, if this is true of another one.
        """
        with self._lock:
            if unless is not None and any(map(unless, self.alive())):
                return False
            kept = tuple(ref for ref in self._listeners if ref() not in (None, listener))
            self._listeners = (*kept, weakref.ref(listener))
            connected = self._connection()
        if connected is not None:
            listener.attached(connected)
        return True

    def remove(self, listener: PushListener) -> None:
        """Removes a listener."""
        with self._lock:
            self._listeners = tuple(ref for ref in self._listeners if ref() not in (None, listener))

    def alive(self) -> list[PushListener]:
        """The listeners that are still alive."""
        return [listener for ref in self._listeners if (listener := ref()) is not None]

    def connect(self, serve: Callable[[], None]) -> None:
        """Calls `serve`, from which on there is a connection. `tell` follows.

        Under the lock of `add`: a new listener is told of the connection either there or by that `tell`.
        """
        with self._lock:
            serve()

    def tell(self, call: Callable[[PushListener], None]) -> None:
        """Calls `call` with each listener."""
        for listener in self.alive():
            try:
                call(listener)
            except Exception:
                # An exception of a listener must not end the connection, which serves puts and claims too.
                _log.exception("%s failed to handle a message; the connection stays", type(listener).__name__)

    def after_fork_in_child(self) -> None:
        """The listeners stay. A thread of the parent may have held the lock at the fork."""
        self._lock = threading.Lock()

"""The listeners of a connection: what receives the messages that the daemon sends unasked.

Owns: the list of listeners. Does not own: the connection (link.py), nor the effects of a push.
Invariants: a listener that is added is told of the current connection, by `add` or by the link's thread. An exception
of a listener reaches neither the link's thread nor another listener. No lock: each change of the list is one step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel

_log = logging.getLogger("tensord")

Connected = BlockingChannel
"""Identifies one connection. The daemon keeps no state of it for the next."""
ListenerMessage = messages.ModeChanged | messages.Order | messages.Modes | messages.DeviceOpened


class PushListener(Protocol):
    """Receives the messages that the daemon sends unasked. The link's thread calls it, so it must not block."""

    def attached(self, connected: Connected) -> None:
        """A new connection: the daemon has no state of this client, so the listener sends its registrations again."""

    def detached(self) -> None:
        """The connection ended. Also called when the client is closed, then in the closing thread."""

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        """A push, or an answer with the state of modes, in the order in which the daemon sent them."""

    def forked(self) -> None:
        """Called in the child of a fork. Registrations belong to the parent; locks and threads are gone."""


class Listeners:
    """The listeners of one client, by weak reference. `connection` returns the current connection, or None."""

    def __init__(self, connection: Callable[[], Connected | None]) -> None:
        self._connection = connection
        self._references: list[weakref.ref[PushListener]] = []

    def add(self, listener: PushListener, unless: Callable[[PushListener], bool] = lambda other: False) -> bool:
        """Adds a listener. If the client is attached, calls `listener.attached` at once. If `unless` is true of one
        that was added before, adds nothing and returns False."""
        mine = weakref.ref(listener, self._references.remove)
        if mine not in self._references:
            # SYNC POINT: added before the connection is read. The link's thread sets that before it tells all.
            self._references.append(mine)
        if any(map(unless, self._alive(self._references.index(mine)))):
            self.remove(listener)
            return False
        if (connected := self._connection()) is not None:
            listener.attached(connected)
        return True

    def remove(self, listener: PushListener) -> None:
        """Removes a listener."""
        with suppress(ValueError):
            self._references.remove(weakref.ref(listener))

    def tell(self, call: Callable[[PushListener], None]) -> None:
        """Calls `call` with each listener."""
        for listener in self._alive():
            try:
                call(listener)
            except Exception:
                # An exception of a listener must not end the connection, which serves puts and claims too.
                _log.exception("%s failed to handle a message; the connection stays", type(listener).__name__)

    def _alive(self, most: int | None = None) -> list[PushListener]:
        return [listener for each in self._references[:most] if (listener := each()) is not None]

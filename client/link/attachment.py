"""The state of a client's connection: none, being made, serving, or ended.

Owns: the channel, whether it serves calls, and waiting for a change of that. Does not own: making a channel, nor what
is received on it (link.py).
Invariants: a channel that this process has ended serves no call from that moment on. No lock: a signal handler may end
the channel, or wait, at any moment. Only the link's thread makes, serves and detaches channels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ...errors import DaemonUnavailable
from ...ipc.wire.blocking import BlockingChannel
from ..threads.waiting import LockEvent


class EndedHere(DaemonUnavailable):
    """This process has ended the connection itself, and attaches anew at once."""


class Attachment:
    """`channel`: from the first attempt to send on it until `detach`. `serving`: the same, once calls may use it.
    `settled`: whether the first attempt to attach has ended, or nobody is to wait for it any more."""

    def __init__(self) -> None:
        self.channel: BlockingChannel | None = None
        self.serving: BlockingChannel | None = None
        self.settled = False
        self._renewing = False
        self._changed = LockEvent()

    @property
    def current(self) -> BlockingChannel | None:
        """The channel that calls use. None while the interpreter ends, since no thread receives answers then."""
        channel = self.serving
        usable = channel is not None and not channel.closed and not sys.is_finalizing()
        return channel if usable else None

    def wait_for(self, state: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `state()`, which depends on this object, is true, for at most `timeout_s` seconds. Returns its
        last value."""
        deadline = time.monotonic() + timeout_s
        while True:
            # SYNC POINT: read before the state, which is changed before this event is set and replaced.
            changed = self._changed
            if state():
                return True
            if not changed.wait(deadline - time.monotonic()):
                return False

    def wait_renewed(self, timeout_s: float) -> None:
        """Waits, if this process has ended the last connection, until it has tried to attach again."""

        def tried() -> bool:
            channel = self.channel
            ended_here = self._renewing or (channel is not None and channel.closed)
            return not ended_here or sys.is_finalizing()

        self.wait_for(tried, timeout_s)

    def settle(self) -> None:
        """The attempt has ended, or nobody is to wait for it any more."""
        self.settled, self._renewing = True, False
        self.tell()

    def end(self) -> None:
        """Ends the channel, so that the link's thread attaches anew. Waits for nothing."""
        if (channel := self.channel) is not None:
            channel.shut()

    def detach(self, channel: BlockingChannel) -> bool:
        """Closes the channel, which has ended. Returns whether this process has ended it: another attempt follows at
        once."""
        ended_here = channel.closed
        self._renewing = self._renewing or ended_here
        self.serving = self.channel = None
        self.tell()
        channel.close()
        return ended_here

    def tell(self) -> None:
        """Wakes those who wait for a change."""
        before, self._changed = self._changed, LockEvent()
        before.set()

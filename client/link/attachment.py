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
    """`is_silent`: whether the daemon does not answer, so that no new call uses the channel (absence.py)."""

    def __init__(self, is_silent: Callable[[], bool] = lambda: False) -> None:
        self.channel: BlockingChannel | None = None
        """The channel, from its first attempt to send on it until `detach`."""
        self._is_silent = is_silent
        self._serving: BlockingChannel | None = None
        self._renewing = False
        self._changed = LockEvent()
        self.settled = False
        """Whether the first attempt to attach has ended in either way, or nobody is to wait for it any more."""

    @property
    def serving(self) -> BlockingChannel | None:
        """The channel that new calls use now. None while the daemon is silent."""
        return None if self._is_silent() else self.current

    @property
    def current(self) -> BlockingChannel | None:
        """The channel that calls use which have begun on it. None while the interpreter ends, since no thread receives
        answers then."""
        channel = self._serving
        usable = channel is not None and not channel.closed and not sys.is_finalizing()
        return channel if usable else None

    @property
    def renewing(self) -> bool:
        """Whether this process has ended the last connection, and has not yet tried to attach again."""
        channel = self.channel
        return self._renewing or (channel is not None and channel.closed)

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
        """Waits while `renewing`, for at most `timeout_s` seconds."""
        self.wait_for(lambda: not self.renewing or sys.is_finalizing(), timeout_s)

    def serve(self, channel: BlockingChannel) -> None:
        """Calls may use the channel from now on. `settle` follows."""
        self._serving = channel

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
        self._serving = self.channel = None
        self.tell()
        channel.close()
        return ended_here

    def tell(self) -> None:
        """Wakes those who wait for a change."""
        before, self._changed = self._changed, LockEvent()
        before.set()

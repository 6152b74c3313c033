"""Whether there is a daemon, and whether it answers: one that is stopped, or hangs, keeps its connections.

Owns: the channel, whether it serves calls, and waiting for a change of that; why there is no daemon, as an error and as
one line in the log; since when the daemon owes this client an answer, and whether it is taken for away.
Does not own: making a channel, what is received on it, and what follows from a change (link.py).
Invariants: a channel that this process has ended serves no call from that moment on. Whatever arrives from the daemon
ends its absence. No lock: each change is one step, and a signal handler may end the channel, or wait, at any moment.
Only the link's thread makes, serves and detaches channels. `away` compares moments, so a mark that comes too late,
after the answer, has no effect. A process logs each change at a socket once, however many clients it has there, and so
do its forks. A client that was attached before does not warn.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...errors import DaemonUnavailable, TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ...ipc.wire.descriptors import unreachable
from ..threads.waiting import LockEvent

WORD_S: Final = 0.25
"""Seconds that a caller who can do without the daemon waits for a sign of life. After a longer time-out it is away."""
AWAY_S: Final = 1.0
"""Seconds without a sign of life after which the link's thread takes the daemon for away, without any time-out."""
PROMPT: Final = (
    messages.RequestClaim,
    messages.Touch,
    messages.Pin,
    messages.Unpin,
    messages.OpenRing,
    messages.OpenInbox,
)
"""Requests that a daemon answers at once, whatever it has to do. Others may wait: a match for the index, a reservation
for memory."""
_log = logging.getLogger("tensord")
SOCKETS_MAX: Final = 64
_warned: dict[Path, object] = {}
"""By socket: what its first warning has put here. No lock, which the child of a fork could find taken."""
_silent: dict[Path, bool] = {}
"""Sockets at which this process waits for an answer in vain, and whether it has logged that."""


class Silence:
    """Of one client. `changed` is called by the link's thread once the daemon is away, and once it answers again."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._path = path
        self._changed = changed
        self._owed_at: float | None = None
        """When the first question was sent that is not answered, by time.monotonic."""
        self._away_at: float | None = None
        """The question whose answer is not waited for any more."""
        self._doubted_at: float | None = None
        """The question whose answer is overdue, unless it lies unread in the socket."""
        self._heard_at = time.monotonic()
        self._known = self._probed = False

    @property
    def away(self) -> bool:
        """Whether the daemon is taken for away."""
        return self._owed_at is not None and self._owed_at == self._away_at

    def has_heard_since(self, since_s: float) -> bool:
        """Whether something has arrived from the daemon since then, by time.monotonic."""
        return self._heard_at > since_s

    @property
    def patience_s(self) -> float:
        """How long a caller who can do without the daemon waits for a sign of life."""
        owed_at = self._owed_at
        return WORD_S if owed_at is None else max(0.0, owed_at + WORD_S - time.monotonic())

    def error(self) -> DaemonUnavailable:
        """Why there is no daemon, while it is away."""
        return DaemonUnavailable(
            f"the daemon at {self._path} does not answer: it is stopped, or hangs; see `tensorctl health`. It is used "
            "again once it answers"
        )

    def asked(self) -> None:
        """A request of PROMPT is about to be sent."""
        if self._owed_at is None:
            self._owed_at = time.monotonic()

    def timed_out(self) -> None:
        """A call has waited for an answer until its time limit."""
        self._mark(WORD_S)

    # ---- the link's thread

    def heard(self) -> None:
        """Something has arrived from the daemon, or it has taken this client in."""
        self._owed_at, self._probed = None, False
        self._heard_at = time.monotonic()
        if self._path in _silent and _silent.pop(self._path, False):
            _log.warning("tensord: the daemon at %s answers again", self._path)
        self._tell()

    def ended(self) -> None:
        """The connection has ended, and with it the daemon's debts."""
        self._owed_at = None
        self._tell()

    def wait_s(self, idle_s: float) -> float:
        """How long the link's thread waits for something to arrive, before it calls `watch`."""
        owed_at = self._owed_at
        if owed_at is None or owed_at == self._away_at:
            return idle_s
        return 0.0 if owed_at == self._doubted_at else min(idle_s, max(0.0, owed_at + AWAY_S - time.monotonic()))

    def watch(self, waiting: bool, probe: Callable[[], bool]) -> None:
        """Looks for signs of life. `probe` asks a question of PROMPT, and returns whether it could: if something waits
        for an answer that may take its time, and if the daemon is away, since it may be a question that was not sent
        that it leaves unanswered."""
        if (waiting and self._owed_at is None and time.monotonic() >= self._heard_at + AWAY_S) or self.away:
            self.asked()
            self._probed = self._probed or probe()
        if self._owed_at == self._doubted_at:
            self._mark(AWAY_S)
        elif self._owed_at is not None and time.monotonic() >= self._owed_at + AWAY_S:
            # This process may have been stopped itself. What has arrived meanwhile is read first.
            self._doubted_at = self._owed_at
        self._tell()

    def _tell(self) -> None:
        if self.away is not self._known:
            self._known = not self._known
            self._changed()

    def _mark(self, least_s: float) -> None:
        owed_at = self._owed_at
        if owed_at is not None and owed_at != self._away_at and (silent_s := time.monotonic() - owed_at) >= least_s:
            self._away_at = owed_at
            if self.away:
                no_answer(
                    self._path,
                    f"the daemon at {self._path} has not answered for {silent_s:.2g} s. Until it does, this process "
                    "goes on without it: hits come from shared memory, nothing is stored",
                )


def no_answer(path: Path, why: str, *, log: bool = True) -> None:
    """Records that a daemon does not answer, and logs it if this process has not yet."""
    if path not in _silent and len(_silent) < SOCKETS_MAX:
        _silent[path] = log
        if log:
            _log.warning("tensord: %s", why)


def attach_limit_s(path: Path, timeout_s: float) -> float:
    """How long a call waits for the daemon at `path` to take this client in, if its caller gave no time limit."""
    return min(timeout_s, WORD_S) if path in _silent else timeout_s


def absence(error: TensordError | OSError, socket: Path, *, warn: bool) -> TensordError:
    """The reason why there is no daemon at `socket`. With `warn`, logs it if this process has not yet."""
    why = error if isinstance(error, TensordError) else unreachable(error)
    first = object()
    if warn and len(_warned) < SOCKETS_MAX and _warned.setdefault(socket, first) is first:
        _log.warning("tensord: %s. Until a daemon answers, every lookup is a miss and nothing is stored", why)
    return why


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

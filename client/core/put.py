"""One put: its outcome for the caller, and its state until the daemon has answered.

Owns: both. Does not own: the connection, the inbox, nor any transition (puts.py).
Invariants: an outcome is settled once, by puts.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

from ...errors import DaemonUnavailable, TensordError, TimedOut, without_frames
from ...ipc import messages
from ...ipc.schema import DURATION_S_MAX
from .fields import check_timeout
from .inbox import Inbox, Region
from .waiting import LockEvent

PutState = Literal["sent", "stored", "existed", "refused", "lost"]


class Put:
    """One put and its state. `state` is

    - "sent": in flight. The caller may change the tree that it put.
    - "stored": every process on the host can read the entry.
    - "existed": an entry with this key was there already; nothing changed.
    - "refused": the daemon or this client refused the payload; `error` says why.
    - "lost": no daemon, the connection ended, or no room or answer in time; `error` says which.

    Example:
        >>> put = cache.put(key, np.arange(3))                      # returns once the array is copied
        >>> put.wait().state                                        # every process can read it now
        'stored'
        >>> cache.put(key, np.arange(3), wait=True).state
        'existed'
    """

    __slots__ = ("_refused", "_settled", "error", "key", "state")

    def __init__(self, key: bytes, refused: Callable[[bytes, TensordError], object] | None = None) -> None:
        """`refused` is called with key and reason if the put is refused, in any thread. For the library."""
        self._refused = refused
        self.key = key
        self.state: PutState = "sent"
        self.error: TensordError | None = None
        self._settled = LockEvent()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the put leaves the state "sent".

        Raises:
            UsageError: `timeout_s` is out of its range.
            TimedOut: the daemon did not answer within `timeout_s` seconds; the put goes on.
        """
        if not self._settled.wait(check_timeout(timeout_s, DURATION_S_MAX)):
            name = self.key.hex()[:16]
            raise TimedOut(f"the put of {name}… was not acknowledged within {timeout_s:.3g} s; it goes on")
        return self

    def settle(self, state: PutState, error: TensordError | None = None) -> None:
        """Sets the outcome. For the library."""
        # The error first: a thread that sees "refused" finds its reason.
        self.error = error and without_frames(error)
        self.state = state
        self._settled.set()
        if self.state == "refused" and self._refused is not None and self.error is not None:
            self._refused(self.key, self.error)

    def disown(self) -> None:
        """In the child of a fork: settles the put as lost, because it belongs to the parent. Takes no lock that a
        thread of the parent may hold.
        """
        self._settled = LockEvent()
        self.settle("lost", DaemonUnavailable("this process was forked before the daemon acknowledged the put"))

    def __repr__(self) -> str:
        return f"Put({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"


@dataclass(slots=True, eq=False)
class Pending:
    """A put in flight. It can be sent again while its whole payload stands in its inbox.

    `inbox`: None for a put that is written in place; `pin` is then the pin of its span. `regions`: by their offset in
    `inbox`. `whole`: the payload is in one region, not streamed. `connected`: the connection on which the putting
    thread sent the Commit.
    """

    put: Put
    commit: messages.Commit
    inbox: Inbox | None
    regions: dict[int, Region] = field(default_factory=dict)
    parts: list[messages.Part] = field(default_factory=list)
    whole: bool = True
    sent_again: bool = False
    connected: object | None = None
    pin: object | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole payload stands in the inbox, and the messages to send say so."""
        if self.commit.at is not None:
            return True
        return self.whole and bool(self.parts) and self.parts[-1].last

    @property
    def sent(self) -> bool:
        """Whether a daemon may know of the put, and may read its regions until it answers."""
        return self.sent_again or self.connected is not None


def wait_for_all(puts: Iterable[Put], deadline: float) -> None:
    """Waits until no put is "sent" any more.

    Raises:
        TimedOut: one is at `deadline`, in seconds of `time.monotonic()`; it goes on.
    """
    for put in puts:
        put.wait(max(0.0, deadline - time.monotonic()))

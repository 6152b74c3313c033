"""One put: its outcome, as the caller sees it, and its state until the daemon has answered.

Owns neither the connection nor the inbox (puts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from ...errors import DaemonUnavailable, TensordError, TimedOut
from ...ipc import messages
from ...ipc.schema import DURATION_S_MAX
from .fields import check_timeout
from .inbox import Inbox, Region
from .waiting import LockEvent

PutState = Literal["sent", "stored", "existed", "refused", "lost"]


class Put:
    """What became of a put. `state` is

    - "sent": on its way; the caller may go on, and change what it put.
    - "stored": every process on the host can read it.
    - "existed": the key was there already; nothing was changed.
    - "refused": the daemon said no, and `error` says why.
    - "lost": no daemon that we may use, or it went away, or nobody took it in time; `error` says which.

    Example:
        >>> put = cache.put(key, np.arange(3))                      # returns once the array is copied
        >>> put.wait().state                                        # every process can read it now
        'stored'
        >>> cache.put(key, np.arange(3), wait=True).state
        'existed'
    """

    __slots__ = ("_settled", "error", "key", "state")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.state: PutState = "sent"
        self.error: TensordError | None = None
        self._settled = LockEvent()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until it is known what became of it.

        Raises:
            UsageError: `timeout_s` is out of its range.
            TimedOut: it is not known after `timeout_s`; the put goes on.
        """
        if not self._settled.wait(check_timeout(timeout_s, DURATION_S_MAX)):
            name = self.key.hex()[:16]
            raise TimedOut(f"the put of {name}… was not acknowledged within {timeout_s:.3g} s; it goes on")
        return self

    def settle(self, state: PutState, error: TensordError | None = None) -> None:
        """Says what became of it. For the library."""
        # Without the traceback, whose frames have this put and its payload: a cycle.
        self.state, self.error = state, error and error.with_traceback(None)
        self._settled.set()

    def disown(self) -> None:
        """In the child of a fork: the put is the parent's. Takes no lock that a thread of the parent may hold."""
        self._settled = LockEvent()
        self.settle("lost", DaemonUnavailable("this process was forked off while the put was on its way"))

    def __repr__(self) -> str:
        return f"Put({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"


@dataclass(slots=True, eq=False)
class Pending:
    """A put that is not acknowledged. It can be sent again as long as its whole payload stands in its inbox.

    `connected`: where its own thread has sent its Commit. `regions`: by their offsets in `inbox`.
    """

    put: Put
    commit: messages.Commit
    inbox: Inbox
    regions: dict[int, Region] = field(default_factory=dict)
    parts: list[messages.Part] = field(default_factory=list)
    whole: bool = True
    sent_again: bool = False
    connected: object | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it stands in the inbox, and was sent."""
        return self.whole and bool(self.parts) and self.parts[-1].last

    @property
    def sent(self) -> bool:
        """Whether a daemon may know of it, and read its regions until it has answered."""
        return self.sent_again or self.connected is not None

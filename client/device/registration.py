"""The state of a put into a DeviceCache, for the caller.

Owns: the state, and the wait for it. Does not own: the entry (entries.py), nor the question to the daemon (ledger.py).
Invariants: the state is set once, and the error before it, so a thread that sees "refused" finds the reason.
"""

from __future__ import annotations

from typing import Literal, Self

from ...errors import TensordError, TimedOut
from ...ipc.messages.schema import DURATION_S_MAX
from ..arguments.checks import check_timeout
from ..threads.waiting import LockEvent

RegistrationState = Literal["sent", "registered", "refused", "lost"]


class Registration:
    """The result of a put. `state` is one of

    - "sent": `get` finds the tensors in this process; the daemon has not answered yet, or there is none.
    - "registered": the daemon counts the entry, and will order its eviction.
    - "refused": the daemon refused the entry, `error` says why; the cache holds no reference to the tensors.
    - "lost": the entry was deleted, replaced or evicted, or the cache was closed, before the daemon knew the entry.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_vram import FakeCard, FakeVram
        >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 20))    # TorchDevice(0): a real card
        >>> with tensord.DeviceCache(cache, device) as held:
        ...     held.put(key, device.upload(np.zeros(4))).wait().state
        'registered'
    """

    __slots__ = ("_settled", "error", "key", "state")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.state: RegistrationState = "sent"
        self.error: TensordError | None = None
        self._settled = LockEvent()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the state is not "sent" any more.

        Raises:
            TimedOut: the state is still "sent" after `timeout_s` seconds; the tensors stay.
        """
        if not self._settled.wait(check_timeout(timeout_s, DURATION_S_MAX)):
            name = self.key.hex()[:16]
            raise TimedOut(f"the registration of {name}… was not answered within {timeout_s:.3g} s; the tensors stay")
        return self

    def settle(self, state: RegistrationState, error: TensordError | None = None) -> None:
        """Sets the final state, unless there is one. For the library."""
        if self.state == "sent":
            # The error first: a thread that sees "refused" finds its reason.
            self.error = error
            self.state = state
            self._settled.set()

    def __repr__(self) -> str:
        return f"Registration({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"

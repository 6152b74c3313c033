"""The wire over a client's connection.

Owns: the messages of writing, and the bell: the count of what was carried out, and waiting for it. Does not own: the
channel, nor its thread (core/link.py), which calls `rang`.

Invariants: no lock: a signal handler may interrupt any step. A message that is not sent is not needed any more, because
the connection is lost or the daemon has others to read, or its sender is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ..threads.waiting import LockEvent


class ChannelWire:
    """See `Wire`.

    Args:
        asleep: the daemon's word that says whether it waits for a bell.
        next_id: returns the next request id.
    """

    def __init__(self, channel: BlockingChannel, asleep: memoryview, next_id: Callable[[], int]) -> None:
        self._channel = channel
        self._asleep = asleep
        self.next_request = next_id
        self.bells = 0
        self._bell = LockEvent()
        self._named: set[str] = set()

    def ask_for_grants(
        self,
        request: int,
        sizes: Sequence[int],
        returned: Sequence[int],
        timeout_s: float = 0.0,
        *,
        ahead: bool = False,
    ) -> bool:
        if sizes:
            return self._said(messages.AskForGrants(request, list(sizes), list(returned), ahead), timeout_s)
        return self._said(messages.ReturnGrants(list(returned)), timeout_s)

    def ring_bell(self) -> None:
        # A daemon whose socket is full has messages to read: it does not sleep.
        self._said(messages.Doorbell())

    def ring_to_wait(self) -> None:
        if self._asleep[0]:
            self._said(messages.Doorbell())

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        # SYNC POINT: the event is read before the count, which `rang` changes first.
        bell = self._bell
        if self.bells == seen:
            bell.wait(timeout_s)

    def name_agent(self, agent: str) -> None:
        """Tells the daemon the name of an agent that records will name by its number, once."""
        if agent not in self._named and self._said(messages.NameAgent(agent), 1.0):
            self._named.add(agent)

    def rang(self) -> None:
        """Something was carried out. For the connection's thread."""
        self.bells += 1
        before, self._bell = self._bell, LockEvent()
        before.set()

    def _said(self, message: messages.Message, timeout_s: float = 0.0) -> bool:
        try:
            self._channel.send(message, timeout_s=timeout_s)
        except TensordError:
            return False
        return True

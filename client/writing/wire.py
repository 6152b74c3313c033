"""The wire: what writing says over a client's connection, and hears from it.

    the client asks                              the connection tells
    ask_for_grants(request, sizes, returned)     Arena.granted(request, grants, error)
    ring_bell()                                  Outcomes.refused(number, error)
    wait_for_bell(seen, timeout_s)               Arena.end(error), Outcomes.end(error): it is lost

Owns: the messages of writing, and the bell: the count of what was carried out, and waiting for it.
Invariants: no lock: a signal handler may interrupt any step. A message that is not sent is not needed any more, because
the connection is lost or the daemon has others to read, or its sender is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from ..threads.waiting import LockEvent


class Granted(Struct, frozen=True, gc=False):
    """A place that the daemon lends to this client to write in: `size_bytes` bytes from `offset`, a multiple of 64.

    `number` names it to the daemon. `span_id`: of the span that the client pins meanwhile; 0 for a place in the
    client's own memory, which needs no pin. The place is the client's as long as the index's slot `slot` has the
    sequence number `seq` and that span id.
    """

    number: int
    offset: int
    size_bytes: int
    span_id: int = 0
    slot: int = 0
    seq: int = 0


class Wire:
    """One connection to the daemon, as writing uses it. Thread-safe. No method raises an error because the connection
    is lost. `bells`: how many messages of the daemon were carried out, and the end of the connection. Only rises.
    `asleep`: the daemon's word that says whether it waits for a bell. `next_request` returns a number above 0."""

    def __init__(self, channel: BlockingChannel, asleep: memoryview, next_request: Callable[[], int]) -> None:
        self.channel = channel
        self._asleep = asleep
        self.next_request = next_request
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
        """Asks for a place of each size, in bytes of spans, the most urgent first, and waits for no answer: the daemon
        answers each request with sizes once, with as many grants as it can lend, and an error if it lends none.

        `returned`: numbers of grants in which nothing more is written. The records of all that was written there are
        in the queue: the daemon takes these first, and then has the rest of each place back. `ahead`: no put waits for
        the places. Returns whether the message was sent within `timeout_s`."""
        if sizes:
            return self._said(messages.AskForGrants(request, list(sizes), list(returned), ahead), timeout_s)
        return self._said(messages.ReturnGrants(list(returned)), timeout_s)

    def ring_bell(self) -> bool:
        """Wakes the daemon for records that were added. False if the bell was not sent: a daemon whose socket is full
        does not sleep, and another thread may send just now."""
        return self._said(messages.Doorbell())

    def ring_to_wait(self) -> None:
        """Wakes the daemon, unless it is awake, for a client that waits."""
        if self._asleep[0]:
            self._said(messages.Doorbell())

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        """Returns once `bells` is not `seen`, or after `timeout_s` seconds."""
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
            self.channel.send(message, timeout_s=timeout_s)
        except TensordError:
            return False
        return True

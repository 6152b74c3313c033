"""What writing needs of the connection, and what the connection tells it.

    the client asks                              the connection tells
    ask_for_grants(request, sizes, returned)     Arena.granted(request, grants, error)
    ring_bell()                                  Outcomes.refused(number, error)
    wait_for_bell(seen, timeout_s)               Arena.end(error), Outcomes.end(error): it is lost

Owns: the form of both. Does not own: any state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Granted(NamedTuple):
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
    seq: bytes = b""


class Wire(Protocol):
    """One connection to the daemon, as writing uses it. Thread-safe. No method raises an error because the connection
    is lost."""

    @property
    def bells(self) -> int:
        """How many messages of the daemon were carried out: grants, refusals, bells, and the end of the connection.
        Only rises."""
        ...

    def next_request(self) -> int:
        """The number of the next request, above 0."""
        ...

    def ask_for_grants(
        self,
        request: int,
        sizes: Sequence[int],
        returned: Sequence[int],
        timeout_s: float = 0.0,
        *,
        ahead: bool = False,
    ) -> bool:
        """Asks for a place of each size, in bytes of spans, the most urgent first. Does not wait for an answer.

        The daemon answers each request once, with as many grants as it can lend, and an error if it lends none. With
        no sizes it does not answer.

        Args:
            returned: numbers of grants in which nothing more is written. The records of all that was written there are
                in the queue: the daemon takes these first, and then has the rest of each place back.
            timeout_s: how long it may take to send the message.
            ahead: no put waits for the places.

        Returns:
            Whether the message was sent.
        """
        ...

    def ring_bell(self) -> None:
        """Wakes the daemon for records that were added."""
        ...

    def ring_to_wait(self) -> None:
        """Wakes the daemon, unless it is awake, for a client that waits."""
        ...

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        """Returns once `bells` is not `seen`, or after `timeout_s` seconds."""
        ...

"""What follows from each message of the daemon.

Owns: the choice of the part of a client that handles a message. Does not own: the connection that it came on (link.py),
nor what the parts do.
Invariant: a claim or a reservation that is granted to a cancelled request is given back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...ipc.messages import control as messages
from ...ipc.wire.blocking import BlockingChannel
from .answers import settle
from .listeners import ListenerMessage

if TYPE_CHECKING:
    from .link import Link


def take(link: Link, message: Any, fds: Sequence[int], channel: BlockingChannel) -> None:
    """Handles a message, in the link's thread.

    Raises:
        TensordError: the daemon ends the connection with it.
    """
    if isinstance(message, ListenerMessage):
        link.listeners.tell(lambda listener: listener.received(message, channel))
    match message:
        case messages.ModeChanged() | messages.Order():
            pass
        case messages.GrantsLent() | messages.PutRefused() | messages.Settled():
            link.puts.received(message)
        case messages.WritableRing():
            link.answers.hand_over(message.id, fds)
        case messages.Claimed(answer="wait"):
            link.answers.deferred(message)
        case messages.Error(id=int(number)):
            answer = link.answers.take(number)
            if answer is not None:
                settle(answer, error=message.to_error())
            else:
                link.puts.refused(number, message.to_error())
        case messages.Error():
            raise message.to_error()
        case messages.Claimed(answer="compute"):
            link.claims.granted(message, link.answers.take(message.id))
        case messages.Reserved(reservation=number):
            if (answer := link.answers.take(message.id)) is None or not settle(answer, message):
                # The caller has stopped waiting. Release the memory for other processes.
                link.send(messages.ReleaseReservation(link.next_id(), number))
        case _:
            answer = link.answers.take(message.id)
            if answer is not None:
                settle(answer, message)

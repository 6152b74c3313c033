"""An actor's work loop: messages and slices of long jobs alternate, in turns of bounded length.

Owns: the order of work and the end of a turn. Does not own what a message means or what a job does. Knows no asyncio:
the actor waits for a message, calls `turn`, yields to the event loop, and calls again.

Invariants: a turn begins no item after TURN_S, and has at most ITEMS_MAX items; an item is one message and one slice of
one job. No handler calls `turn`: what a handler causes is queued as a message or a job, so that the stack does not grow
with the number of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from .mailbox import Mailbox

TURN_S: Final = 0.0005
"""Seconds after which a turn begins no further item; one item takes 2 to 3 ms at most. A put goes through the loop four
times and waits for a turn each time, so a long turn for a flood of puts delays every other put four times."""
ITEMS_MAX: Final = 64

Message = TypeVar("Message")


class Pump(Generic[Message]):
    """One actor's work: `receive` takes the messages of `inbox`; `clock` gives monotonic seconds."""

    def __init__(self, inbox: Mailbox[Message], receive: Callable[[Message], None], clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._receive = receive
        self._clock = clock
        self._jobs: deque[Iterator[None]] = deque()

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do."""
        return bool(self._jobs or self._inbox)

    def begin(self, job: Iterator[None]) -> None:
        """Adds a job. Each `next` of it is one slice; jobs take turns."""
        self._jobs.append(job)

    def turn(self) -> None:
        """Works until the turn's budget is used or nothing is left."""
        ends_at = self._clock() + TURN_S
        for _ in range(ITEMS_MAX):
            message = self._inbox.next()
            if message is not None:
                self._receive(message)
            elif not self._jobs:
                return
            if self._jobs:
                self._step()
            if self._clock() >= ends_at:
                return

    def _step(self) -> None:
        job = self._jobs.popleft()
        for _ in job:
            self._jobs.append(job)
            return

"""An actor's bounded inbox, and its work loop: messages and slices of long jobs alternate, in turns of bounded length.

Owns: the queued messages, the tasks that wait for room or for a message, the order of work and the end of a turn. Does
not own the meaning of messages, nor what a job does.

A client's message waits for room, and each client has its own, so a client that floods the inbox slows only itself.
Uids take turns, and so do the clients of a uid. Messages of the actor's own workers and timers come first, and do not
wait: a worker that waits for the actor, while the actor waits for the worker, would be a deadlock.

Invariants: at most `capacity` messages of one sender wait, not counting those of `tell_now` and `tell_first`. Messages
of one sender, and those without one, are taken in the order of their arrival, except those of `tell_first`. A turn
begins no item after TURN_S, and has at most ITEMS_MAX items: one message and one slice of one job each. No handler
calls `turn`: what a handler causes is queued, so that the stack does not grow with the events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from ..claims.turns import Turns

Message = TypeVar("Message")
INBOX_MAX: Final = 64
"""The most requests of one client that wait for an actor. Further ones are read later."""
TURN_S: Final = 0.0005
"""Seconds after which a turn begins no further item; one item takes 2 to 3 ms at most. A put goes through the loop four
times and waits for a turn each time, so a long turn for a flood of puts delays every other put four times."""
ITEMS_MAX: Final = 64
Sender = tuple[int, int]
"""(uid, number of the client)."""


class Mailbox(Generic[Message]):
    """The messages for one actor: at most `capacity` of each sender, and at most `capacity` offered without sender."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._messages: deque[Message] = deque()
        self._turns: Turns[tuple[Sender, Message]] = Turns()
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._room: dict[Sender, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._messages) + len(self._turns)

    async def tell(self, message: Message, sender: Sender) -> None:
        """Adds a message. Waits until there is room for one more message of its sender."""
        while self._turns.waiting(*sender) >= self.capacity:
            await self._room.setdefault(sender, asyncio.Event()).wait()
        self.tell_now(message, sender)

    def offer(self, message: Message) -> bool:
        """Adds a message without a sender if there is room. Returns False if there is none, or the inbox is closed."""
        if self._closed or len(self._messages) >= self.capacity:
            return False
        self.tell_now(message)
        return True

    def tell_now(self, message: Message, sender: Sender | None = None) -> None:
        """Adds a message even if there is no room. Does not wait."""
        if sender is None:
            self._messages.append(message)
        else:
            self._turns.push(*sender, (sender, message))
        if self._waiter is not None:
            self._wake()

    def tell_first(self, message: Message, sender: Sender) -> None:
        """Adds a message before all other messages of its sender. The sender's turn does not come earlier."""
        self._turns.push_first(*sender, (sender, message))
        if self._waiter is not None:
            self._wake()

    def take(self, most: int | None = None) -> list[Message]:
        """Takes up to `most` messages, or all, without waiting."""
        count = len(self) if most is None else min(most, len(self))
        found = (self.next() for _ in range(count))
        return [message for message in found if message is not None]

    def close(self) -> list[Message]:
        """Takes all messages, for an actor that has ended. `offer` refuses from now on."""
        self._closed = True
        return self.take()

    def next(self) -> Message | None:
        """Takes the next message, without waiting; None if there is none."""
        if self._messages:
            return self._messages.popleft()
        if not self._turns:
            return None
        sender, message = self._turns.take()
        if self._room and (room := self._room.pop(sender, None)) is not None:
            room.set()
        return message

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns once there is a message, or `timeout_s` has passed. One task at a time may wait."""
        if self._messages or self._turns:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        alarm = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pump(Generic[Message]):
    """One actor's work: `receive` takes the messages of `inbox`; `clock` gives monotonic seconds. The actor waits for a
    message, calls `turn`, yields to the event loop, and calls again."""

    def __init__(self, inbox: Mailbox[Message], receive: Callable[[Message], None], clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._receive = receive
        self._clock = clock
        self._jobs: deque[Iterator[None]] = deque()

    @property
    def busy(self) -> bool:
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
                job = self._jobs.popleft()
                for _ in job:
                    self._jobs.append(job)
                    break
            if self._clock() >= ends_at:
                return

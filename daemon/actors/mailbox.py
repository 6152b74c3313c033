"""A bounded inbox for actors.

Owns: the queued messages, and the tasks that wait for room or for a message. Does not own the meaning of messages.

A client's message waits for room. Each client has its own room, so a client that floods the inbox slows only itself.
Messages of clients are taken in turns of uids, and of the clients of a uid. Messages without a sender, from the actor's
own workers and timers, are taken first. They do not wait for room: a worker that waits for the actor, while the actor
waits for the worker, would be a deadlock. Their number is bounded by the workers.

Invariants: at most `capacity` messages of one sender wait, not counting those of `tell_now` and `tell_first`. Messages
of one sender, and messages without a sender, are taken in the order of their arrival, except those of `tell_first`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

from ..claims.turns import Turns

Message = TypeVar("Message")
INBOX_MAX: Final = 64
"""The most requests of one client that wait for an actor. Further ones are read later."""
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
        self._room: dict[Sender | None, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._messages) + len(self._turns)

    async def tell(self, message: Message, sender: Sender | None = None) -> None:
        """Adds a message. Waits until there is room for one more message of its sender."""
        while self.waiting(sender) >= self.capacity:
            await self._room.setdefault(sender, asyncio.Event()).wait()
        self.tell_now(message, sender)

    def offer(self, message: Message) -> bool:
        """Adds a message without a sender if there is room. Returns False if there is none, or the inbox is closed."""
        if self._closed or self.waiting(None) >= self.capacity:
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

    def drain(self) -> list[Message]:
        """Takes all messages without waiting. For an actor that ends."""
        return self._taken(len(self))

    def close(self) -> list[Message]:
        """Takes all messages, for an actor that has ended. `offer` refuses from now on."""
        self._closed = True
        return self.drain()

    def next(self) -> Message | None:
        """Takes the next message, without waiting; None if there is none."""
        sender: Sender | None = None
        if self._messages:
            message = self._messages.popleft()
        elif self._turns:
            sender, message = self._turns.take()
        else:
            return None
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

    def waiting(self, sender: Sender | None) -> int:
        """The messages of one sender, or those without one, that wait."""
        return len(self._messages) if sender is None else self._turns.waiting(*sender)

    async def take(self, most: int, timeout_s: float | None = None) -> list[Message]:
        """Takes up to `most` messages. Waits for the first until `timeout_s` has passed; [] if none came."""
        await self.wait(timeout_s)
        return self._taken(min(most, len(self)))

    def _taken(self, count: int) -> list[Message]:
        found = (self.next() for _ in range(count))
        return [message for message in found if message is not None]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

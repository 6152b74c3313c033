"""What every actor has: a bounded inbox.

Clients' messages wait for room, each client's for its own: a flood slows its own sender and nobody else. They are taken
in turns of uids and of their clients. What the actor's own workers and timers report is taken before; it is bounded
where it is made, and never waits: a worker that waited for the actor that waits for it would stand still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ..core.turns import Turns

Message = TypeVar("Message")
Sender = tuple[int, int]
"""(uid, client)."""


class Mailbox(Generic[Message]):
    """Messages for one actor: at most `capacity` of each sender, and as many of those who give no sender and wait.

    Invariant: messages of one sender are taken in the order of their arrival, but for those of `tell_first`; so are
    those without a sender.
    """

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
        """Adds a message once there is room for one more of its sender."""
        while self._waiting(sender) >= self.capacity:
            await self._room.setdefault(sender, asyncio.Event()).wait()
        self.tell_now(message, sender)

    def offer(self, message: Message) -> bool:
        """Adds a message without a sender if there is room; False where there is none, or the inbox is closed."""
        if self._closed or self._waiting(None) >= self.capacity:
            return False
        self.tell_now(message)
        return True

    def tell_now(self, message: Message, sender: Sender | None = None) -> None:
        """Adds a message, room or no room."""
        if sender is None:
            self._messages.append(message)
        else:
            self._turns.push(*sender, (sender, message))
        if self._waiter is not None:
            self._wake()

    def tell_first(self, message: Message, sender: Sender) -> None:
        """Adds a message before all others of the sender, who waits for the next turn like everybody."""
        self._turns.push_first(*sender, (sender, message))
        if self._waiter is not None:
            self._wake()

    def drain(self) -> list[Message]:
        """All that is there, without waiting: for an actor that ends."""
        return self._taken(len(self))

    def close(self) -> list[Message]:
        """`drain`, for an actor that has ended: from now on nothing can be offered."""
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
        """Returns once there is a message, or `timeout_s` has passed. For one task at a time."""
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

    async def take(self, most: int, timeout_s: float | None = None) -> list[Message]:
        """Up to `most` messages, waiting for the first until `timeout_s` has passed; [] if none came."""
        await self.wait(timeout_s)
        return self._taken(min(most, len(self)))

    def _waiting(self, sender: Sender | None) -> int:
        return len(self._messages) if sender is None else self._turns.waiting(*sender)

    def _taken(self, count: int) -> list[Message]:
        found = (self.next() for _ in range(count))
        return [message for message in found if message is not None]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

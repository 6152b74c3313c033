"""What every actor has: a bounded inbox.

Clients' messages wait for room, each client's for its own: a flood slows its own sender and nobody else. They are taken
in turns of uids and of their clients. What the actor's own workers and timers report is taken before; it is bounded
where it is made, and never waits: a worker that waited for the actor that waits for it would stand still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

from ..core.turns import Turns

Message = TypeVar("Message")
Sender = tuple[int, int]
"""(uid, client)."""


class Inbox(Generic[Message]):
    """Messages for one actor: at most `capacity` of each sender, and as many of those who give no sender and wait.

    Invariant: messages of one sender are taken in the order of their arrival, as are those without a sender.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._messages: deque[Message] = deque()
        self._turns: Turns[tuple[Sender, Message]] = Turns()
        self._closed = False
        self._arrived = asyncio.Event()
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
        self._arrived.set()

    def drain(self) -> list[Message]:
        """All that is there, without waiting: for an actor that ends."""
        return self._taken(len(self))

    def close(self) -> list[Message]:
        """`drain`, for an actor that has ended: from now on nothing can be offered."""
        self._closed = True
        return self.drain()

    def next(self) -> Message | None:
        """Takes the next message, without waiting; None if there is none."""
        taken = self._taken(min(1, len(self)))
        return taken[0] if taken else None

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns once there is a message, or `timeout_s` has passed."""
        if len(self):
            return
        self._arrived.clear()
        if timeout_s is None:
            await self._arrived.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()

    async def take(self, most: int, timeout_s: float | None = None) -> list[Message]:
        """Up to `most` messages, waiting for the first until `timeout_s` has passed; [] if none came."""
        await self.wait(timeout_s)
        return self._taken(min(most, len(self)))

    def _waiting(self, sender: Sender | None) -> int:
        return len(self._messages) if sender is None else self._turns.waiting(*sender)

    def _taken(self, count: int) -> list[Message]:
        taken: list[Message] = []
        for _ in range(count):
            sender: Sender | None = None
            if self._messages:
                taken.append(self._messages.popleft())
            else:
                sender, message = self._turns.take()
                taken.append(message)
            if self._room and (room := self._room.pop(sender, None)) is not None:
                room.set()
        return taken

"""What every actor has: a bounded inbox.

Clients' messages wait for room, so that a flood slows its own senders. What the actor's own workers and timers report
is bounded where it is made, and never waits: a worker that waited for the actor that waits for it would stand still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Messages for one actor, in order of arrival, at most `capacity` of them from those who wait."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._messages: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._messages)

    async def tell(self, message: Message) -> None:
        """Adds a message once there is room."""
        while len(self._messages) >= self.capacity:
            self._room.clear()
            await self._room.wait()
        self.tell_now(message)

    def offer(self, message: Message) -> bool:
        """Adds a message if there is room; False where there is none."""
        if len(self._messages) >= self.capacity:
            return False
        self.tell_now(message)
        return True

    def tell_now(self, message: Message) -> None:
        """Adds a message, room or no room."""
        self._messages.append(message)
        self._arrived.set()

    def drain(self) -> list[Message]:
        """All that is there, without waiting: for an actor that ends."""
        taken = list(self._messages)
        self._messages.clear()
        self._room.set()
        return taken

    async def take(self, most: int, timeout_s: float | None = None) -> list[Message]:
        """Up to `most` messages, waiting for the first until `timeout_s` has passed; [] if none came."""
        if not self._messages:
            self._arrived.clear()
            if timeout_s is None:
                await self._arrived.wait()
            else:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._arrived.wait()
                except TimeoutError:
                    return []
        taken = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
        if len(self._messages) < self.capacity:
            self._room.set()
        return taken

"""Mode changes as an async iterator of one event loop.

Owns: the loop's queue of changes. Does not own: the subscription at the daemon (modes.py).
Invariants: only the loop changes the queue; the link's thread hands each change over. A full queue drops its oldest
change, and counts it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NoReturn, Self

from ..threads.event_loop import in_thread
from .modes import CHANGES_MAX, ModeChange, Subscription, TierState

if TYPE_CHECKING:
    from ..core.client import Client


class AsyncSubscription:
    """An async iterator over mode changes: `async for change in subscription`, until it is closed. Belongs to one loop.

    It queues up to CHANGES_MAX changes, and then drops the oldest.

    Example:
        >>> import asyncio
        >>> async def main() -> None:
        ...     async with tensord.AsyncClient() as client, await client.on_mode(gauge="host") as subscription:
        ...         print(list(subscription.states))         # `async for change in subscription` waits for changes
        >>> asyncio.run(main())
        ['host']
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changes: deque[ModeChange] = deque()
        self._arrived = asyncio.Event()
        self._inner: Subscription | None = None
        self._closed = False
        self._dropped = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a subscription belongs to a loop of this process, so it cannot be pickled or copied: subscribe in each "
            "process"
        )

    @property
    def states(self) -> dict[str, TierState]:
        """See `Subscription.states`."""
        return self._inner.states if self._inner is not None else {}

    @property
    def dropped(self) -> int:
        """How many changes were dropped because the queue was full."""
        return self._dropped + (self._inner.dropped if self._inner is not None else 0)

    def close(self) -> None:
        """Ends the subscription. An iteration over it still yields the queued changes, and then ends."""
        self._closed = True
        if self._inner is not None:
            self._inner.close()
        self._arrived.set()

    async def open(self, client: Client, gauge: str | None) -> Self:
        """Subscribes at the daemon. For the library."""
        self._inner = await in_thread(client.on_mode, self._on_change, gauge)
        return self

    def __aiter__(self) -> AsyncIterator[ModeChange]:
        return self

    async def __anext__(self) -> ModeChange:
        while not self._changes:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._changes.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _on_change(self, change: ModeChange) -> None:
        try:
            self._loop.call_soon_threadsafe(self._append, change)
        except RuntimeError:
            # The event loop is closed, so no reader is left.
            self._closed = True
            if self._inner is not None:
                self._inner.close()

    def _append(self, change: ModeChange) -> None:
        if len(self._changes) >= CHANGES_MAX:
            self._changes.popleft()
            self._dropped += 1
        self._changes.append(change)
        self._arrived.set()

"""The same client for asyncio. Lookups run at once; calls that may wait are awaited.

Owns: how an asyncio client is made. Does not own: the public calls (async_calls/, a module for each topic), nor
anything else; each call runs the synchronous client's method, in a thread if it may wait.
Invariants: a call that waits for an answer of the daemon runs in a thread.
"""

from __future__ import annotations

import os

from .async_calls.entries import AsyncEntryCalls
from .async_calls.lookups import AsyncLookupCalls
from .async_calls.pressure import AsyncPressureCalls
from .async_calls.puts import AsyncPutCalls
from .cache import TIMEOUT_S, Client


class AsyncClient(AsyncLookupCalls, AsyncPutCalls, AsyncEntryCalls, AsyncPressureCalls):
    """`Client` with `await`: the same arguments, results and errors.

    Limit the time of a call by `timeout_s` or `asyncio.timeout`. On Python 3.11 `asyncio.wait_for` may leave a put
    running if the waiting task is cancelled just when its time is over; an array that is changed then may be stored
    half changed.

    Example:
        >>> import asyncio
        >>> async def main() -> None:
        ...     async with tensord.AsyncClient() as client:
        ...         await client.put(key, np.arange(3), wait=True)
        ...         with await client.get(key) as lease:
        ...             print(lease.tree)
        >>> asyncio.run(main())
        [0 1 2]
    """

    def __init__(
        self, socket: str | os.PathLike[str] | None = None, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__(Client(socket, name=name, timeout_s=timeout_s))

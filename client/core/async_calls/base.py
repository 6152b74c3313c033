"""The part of the asyncio client that its calls share: the synchronous client and the subscriptions.

Owns: the end of the subscriptions. Does not own: the link, which the synchronous client has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

from ..async_subscription import AsyncSubscription
from ..cache import Client
from ..once import ComputeTally
from ..silence import attach_limit_s
from .threads import in_thread


class AsyncClientBase:
    """The `Client` of an AsyncClient, and the calls that are about the daemon itself."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._subscriptions: weakref.WeakSet[AsyncSubscription] = weakref.WeakSet()

    @property
    def client(self) -> Client:
        """The synchronous client of this one, for calls that take a `Client`, for example `DeviceCache`."""
        return self._client

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now. Lookups do not depend on it."""
        return self._client.connected

    @property
    def tally(self) -> ComputeTally:
        """Counts of what `get_or_compute` did in this client."""
        return self._client.tally

    async def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Waits until the daemon is there, for at most `timeout_s` seconds; returns False if it is still not there."""
        return await in_thread(self._client.wait_connected, timeout_s)

    async def status(self) -> dict[str, Any]:
        """Returns the daemon's status, as `tensorctl status --json` prints it.

        Raises:
            DaemonUnavailable, SocketForbidden, TimedOut: the daemon did not answer.
        """
        return await in_thread(self._client.status)

    async def close(self) -> None:
        """Ends the connection and all subscriptions. Leases and their views stay valid for as long as they live."""
        for subscription in list(self._subscriptions):
            subscription.close()
        await in_thread(self._client.close)

    async def __aenter__(self) -> Self:
        link = self._client.link
        await self.wait_connected(attach_limit_s(link.path, self._client.timeout_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- for the calls of all topics

    async def _wait_for_own(self, keys: Callable[[], Iterable[bytes]]) -> None:
        """Waits in a thread for this client's puts of these keys, so that a lookup does not wait in the loop."""
        puts = self._client.link.puts
        if (awaited := puts.awaited) and (own := [key for key in keys() if key in awaited]):
            await in_thread(puts.wait_for_any_own, own)

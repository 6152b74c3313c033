"""Calls that keep, renew and remove entries, and that raise the generation of a namespace, for asyncio."""

from __future__ import annotations

from ..namespace import Namespace
from .base import AsyncClientBase
from .threads import in_thread


class AsyncEntryCalls(AsyncClientBase):
    """The calls of `AsyncClient` that change which entries there are."""

    async def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with.

        Returns:
            How many of the entries are there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await in_thread(self._client.touch, *keys)

    async def evict(self, *keys: bytes) -> int:
        """Removes entries. Leases on them stay valid.

        Returns:
            How many of the entries were there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await in_thread(self._client.evict, *keys)

    async def clear(self, namespace: Namespace | None = None) -> int:
        """Removes all entries of a namespace; without a namespace, all entries of the ring.

        Returns:
            How many entries there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await in_thread(self._client.clear, namespace)

    async def current(self, namespace: Namespace) -> Namespace:
        """Returns the namespace at its current generation. Sends no message. Call it before you load the weights.

        Without a daemon so far, or if no process invalidated it, the namespace comes back as it was given.
        """
        return self._client.current(namespace)

    async def invalidate(self, namespace: Namespace) -> Namespace:
        """Drops a namespace's entries because its weights have changed. Call it once the new weights are in place.

        The daemon refuses puts and claims under the old generation from now on, also after a restart.

        Returns:
            The namespace at its new generation.

        Raises:
            LimitReached: namespaces_max, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: the daemon did not answer. It may have done it; a second call does no harm.
        """
        return await in_thread(self._client.invalidate, namespace)

    async def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted for at most `for_s` seconds, without a lease.

        Returns:
            The seconds that the daemon granted, at most its own limit; 0 on a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `for_s` is out of its range.
            LimitReached: pins_per_client_max or pinned_share_max.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return await in_thread(self._client.pin, key, for_s)

    async def unpin(self, key: bytes) -> None:
        """Ends a pin before its time.

        Raises:
            BadKey: `key` is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        await in_thread(self._client.unpin, key)

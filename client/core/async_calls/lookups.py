"""Calls that read entries, for asyncio. They wait, in a thread, for what this client has just put, and for the copy of
`get_into`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls.lookups import Keys, joined_keys
from ..entry import Entry, Reuse
from ..fields import check_key
from ..lease import Batch, Lease
from ..ring_reader import RingReader
from .base import AsyncClientBase
from .threads import to_its_end


class AsyncLookupCalls(AsyncClientBase):
    """The calls of `AsyncClient` that find entries."""

    async def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. A hit sends no message.

        A key that this client has just put is awaited, up to 50 ms; so do `get_many`, `get_into` and `contains`.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            BadKey: `key` is not 32 bytes.
            Corrupt: `verify` found that the payload differs from the one that was stored.
        """
        await self._wait_for_own(lambda: [check_key(key)])
        return self._client.get(key, verify=verify)

    async def hold(self, key: bytes) -> Lease | None:
        """Returns a lease as `get` does, but counts neither a use, nor a hit, nor a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        await self._wait_for_own(lambda: [check_key(key)])
        return self._client.hold(key)

    async def get_many(self, keys: Keys) -> Batch:
        """Pins many entries together and returns their leases.

        Args:
            keys: a sequence of n keys, n × 32 bytes in one, or a uint8 array of shape (n, 32).

        Returns:
            A batch. Its index is the position of the key; its items are a Lease, or None for a miss.

        Raises:
            BadKey: a key is not 32 bytes.
        """
        await self._wait_for_own(lambda: (key.tobytes() for key in joined_keys(keys)))
        return self._client.get_many(keys)

    async def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`. The copy runs in a thread.

        Args:
            out: an array of the entry's shape and dtype, which the caller owns.

        Returns:
            False on a miss; `out` is unchanged then.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: the entry is not a single array of `out`'s shape and dtype.
        """
        return await to_its_end(self._client.get_into, key, out)

    async def contains(self, key: bytes) -> bool:
        """Returns whether a `get` would hit now. Takes no lease and counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        await self._wait_for_own(lambda: [check_key(key)])
        return self._client.contains(key)

    async def peek(self, key: bytes) -> Entry | None:
        """Returns the entry's metadata, or None on a miss. Counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.peek(key)

    async def reuse(self, key: bytes) -> Reuse | None:
        """Returns how many clients hold the entry and how often it was used, or None on a miss. Counts no use.

        The daemon writes both counts about once a second.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        return self._client.reuse(key)

    async def ring(self) -> RingReader | None:
        """Returns the ring that is attached now, to read entries that another process pins (`RingReader.borrow`).

        None without a daemon so far.
        """
        return self._client.ring()

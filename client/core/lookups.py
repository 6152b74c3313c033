"""Calls that read entries from shared memory.

Owns: which keys a lookup takes. Does not own: reads (view.py).
Invariants: a lookup goes on while the daemon is away, and sends no message, but for one of a key that this client has
just put: it waits for that put, up to 50 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import BadKey, UsageError, shown
from ...shm.ring.layout import KEY_BYTES
from ..arguments.checks import check_key
from ..reading.entry import Entry
from ..reading.lease import Batch, Lease
from ..reading.ring_reader import RingReader
from .base import ClientBase

Keys = Sequence[bytes] | bytes | np.ndarray[Any, Any]


class LookupCalls(ClientBase):
    """The calls of `Client` that find entries."""

    def get(self, key: bytes, *, verify: bool = False) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. A hit sends no message and makes no system call.

        A key that this client has just put is waited for, up to 50 ms; so do `get_many`, `get_into` and `contains`.

        Args:
            key: 32 bytes, as `Namespace.key` makes them; here and in every call also a bytearray or a memoryview.
            verify: check the payload against its checksum first.

        Raises:
            BadKey: `key` is not 32 bytes.
            Corrupt: `verify` found that the payload differs from the one that was stored.
        """
        view = self._link.view
        if view is not None and verify is False:
            return view.get(key)
        key = check_key(key)
        view = view or self._attach()
        if view is None:
            return None
        return view.verified(key) if verify else view.get(key)

    def hold(self, key: bytes) -> Lease | None:
        """Returns a lease as `get` does, but counts neither a use, nor a hit, nor a miss.

        A use would delay the entry's eviction.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.hold(key) if view is not None else None

    def get_many(self, keys: Keys) -> Batch:
        """Pins many entries together and returns their leases. Each lease is made when it is indexed.

        Args:
            keys: a sequence of n keys, n × 32 bytes in one, or a uint8 array of shape (n, 32).

        Returns:
            A batch. Its index is the position of the key; its items are a Lease, or None for a miss.

        Raises:
            BadKey: a key is not 32 bytes.
        """
        joined = joined_keys(keys)
        view = self._link.view or self._attach()
        if view is None:
            return Batch.of_misses(len(joined))
        self._link.puts.wait_for_any_own(key.tobytes() for key in joined)
        return view.get_many(joined)

    def get_into(self, key: bytes, out: np.ndarray[Any, Any]) -> bool:
        """Copies the entry's single array into `out`.

        Args:
            out: an array of the entry's shape and dtype, which the caller owns.

        Returns:
            False on a miss; `out` is unchanged then.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `out` is no writable array, or the entry is not a single array of its shape and dtype.
        """
        if not isinstance(out, np.ndarray):
            raise UsageError(f"out is of type {type(out).__name__}; it must be a numpy array that the entry fits into")
        if not out.flags.writeable:
            raise UsageError("out is a read-only array; pass one that may be written")
        lease = self.get(key)
        if lease is None:
            return False
        found = lease.tree
        if not isinstance(found, np.ndarray) or found.shape != out.shape or found.dtype != out.dtype:
            described = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise UsageError(f"out is {out.dtype}{list(out.shape)}, the entry is {described}; pass an out that matches")
        np.copyto(out, found)
        return True

    def contains(self, key: bytes) -> bool:
        """Returns whether a `get` would hit now. Takes no lease and counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view is not None and view.contains(key)

    def peek(self, key: bytes) -> Entry | None:
        """Returns the entry's metadata and how much it is shared, or None on a miss. Sends no message, counts no use.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
        key = check_key(key)
        view = self._link.view or self._attach()
        return view.peek(key) if view is not None else None

    def ring(self) -> RingReader | None:
        """Returns the ring that is attached now, to read entries that another process pins (`RingReader.borrow`).

        None without a daemon so far.
        """
        view = self._link.view or self._attach()
        return view.ring if view is not None else None


def joined_keys(keys: Keys) -> np.ndarray[Any, Any]:
    """The keys as (n, 32) uint8.

    Raises:
        BadKey: a key is not 32 bytes.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise BadKey(f"a keys array must be (n, {KEY_BYTES}) uint8; this one is {keys.dtype}{list(keys.shape)}")
        return np.ascontiguousarray(keys)
    if not isinstance(keys, Iterable):
        raise BadKey(f"keys is {shown(keys)}; it must be a sequence of keys, joined keys, or an array of them")
    joined = keys if isinstance(keys, bytes) else b"".join([check_key(key) for key in keys])
    if len(joined) % KEY_BYTES:
        raise BadKey(f"joined keys must be a multiple of {KEY_BYTES} bytes; these are {len(joined)}")
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)

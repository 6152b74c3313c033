"""Recurrent states for engines that page their cache. A snapshot's key is the whole chain of blocks before it.

Owns: the key of a chain, the account of snapshots that this object stored, and their eviction above `capacity`. Does
not own: the ring. The daemon evicts by its own policy, so an accounted snapshot may be gone.
Invariants: at most `capacity` snapshots are in the account; beyond that, the one that this object used least recently
is evicted. Snapshots of other clients are found, and never evicted from here. A lookup sends no message; a put waits
for no eviction.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ...errors import BadPrefix, shown
from ...ipc.messages.schema import BLOCKS_MAX
from ..arguments.checks import check_timeout
from ..arguments.namespace import Namespace
from ..threads import forks
from ..writing.outcomes import Put

if TYPE_CHECKING:
    from ..core.client import Client
    from ..gpu.interface import Device
    from ..reading.lease import Lease

__all__ = ["PER_SEQUENCE", "PagedSnapshots"]

PER_SEQUENCE: Final = 8
"""Snapshots for each sequence that may stay on the device (mistral.rs, PrefixCacheManagerV2)."""
_HASH_BYTES_MAX: Final = 64


class PagedSnapshots:
    """The snapshots that one object stores. Thread-safe. The child of a fork starts with none.

    Args:
        client: the client to use.
        namespace: what makes two models' states differ.
        capacity: how many snapshots are kept, at least 1.
        device: the device that states may lie on. They are copied from it before a put returns.
    """

    def __init__(self, client: Client, namespace: Namespace, capacity: int, device: Device | None = None) -> None:
        assert capacity >= 1, capacity
        self._client = client
        self._namespace = namespace
        self._capacity = capacity
        self._device = device
        self._lock = threading.Lock()
        self._own: OrderedDict[bytes, Put] = OrderedDict()
        self._due: list[tuple[bytes, Put]] = []
        forks.follow(self, forks.Place.PAGED_SNAPSHOTS)

    def put(
        self,
        chain: Sequence[bytes],
        state: Any,
        *,
        agent: str = "",
        cost_ms: float = 0.0,
        ttl_s: float | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        """Stores the state after a chain of blocks. Otherwise as `Client.put`.

        Args:
            chain: the hashes of all blocks before the position, the first block's first: 1 to 1,024 of them, each of 1
                to 64 bytes.

        Raises:
            BadPrefix: the chain is empty, too long, or has an invalid item; the message names the first such item.
        """
        key = self.key(chain)
        patience_s = check_timeout(timeout_s, self._client.timeout_s)
        self._evict_due()
        with self._lock:
            own = self._own.get(key)
            if own is not None and (own.state == "sent" or (own.state == "stored" and self._client.contains(key))):
                self._own.move_to_end(key)
                return own.wait(patience_s) if wait else own
        if self._device is not None and self._device.memory_of(state):
            state = self._device.to_host(state, self._device.mark())
        put = self._client.put(key, state, agent=agent, cost_ms=cost_ms, ttl_s=ttl_s, timeout_s=timeout_s)
        with self._lock:
            self._own[key] = put
            self._own.move_to_end(key)
            while len(self._own) > self._capacity:
                self._due.append(self._own.popitem(last=False))
        self._evict_due()
        return put.wait(patience_s) if wait else put

    def get(self, chain: Sequence[bytes]) -> Lease | None:
        """A lease on the state after exactly this chain, from any client, or None on a miss. Counts a use.

        Raises:
            BadPrefix: as for `put`.
        """
        key = self.key(chain)
        lease = self._client.get(key)
        with self._lock:
            own = self._own.get(key)
            if own is not None and lease is not None:
                self._own.move_to_end(key)
            elif own is not None and own.state != "sent":
                del self._own[key]
        return lease

    def key(self, chain: Sequence[bytes]) -> bytes:
        """The key of the snapshot after a chain, for other calls of the client.

        Raises:
            BadPrefix: as for `put`.
        """
        return self._namespace.key("prefix-paged", "text", _joined(chain))

    def clear(self) -> int:
        """Evicts the snapshots that this object stored. Returns how many were there.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the snapshots stay.
        """
        with self._lock:
            going = [*self._due, *self._own.items()]
        for _, put in going:
            if put.state == "sent":
                put.wait(self._client.timeout_s)
        keys = [key for key, put in going if put.state == "stored"]
        count = self._client.evict(*keys) if keys else 0
        gone = {id(put) for _, put in going}
        with self._lock:
            self._due = [(key, put) for key, put in self._due if id(put) not in gone]
            self._own = OrderedDict((key, put) for key, put in self._own.items() if id(put) not in gone)
        return count

    def __len__(self) -> int:
        return len(self._own)

    def _evict_due(self) -> None:
        """Evicts snapshots that left the account, once their puts have stored them. Waits for no answer."""
        with self._lock:
            due, self._due = self._due, []
            self._due = [(key, put) for key, put in due if put.state == "sent"]
            # A snapshot that was put again meanwhile stays.
            keys = [key for key, put in due if put.state == "stored" and key not in self._own]
        self._client.link.puts.evict(keys)

    def after_fork_in_child(self) -> None:
        """The snapshots belong to the parent, and a thread of the parent may have held the lock. For the library."""
        self._lock = threading.Lock()
        self._own, self._due = OrderedDict(), []


def _joined(chain: Any) -> bytes:
    if isinstance(chain, bytes | bytearray | str) or not 1 <= len(chain) <= BLOCKS_MAX:
        found = f"{len(chain)} items" if isinstance(chain, list | tuple) else f"a {type(chain).__name__}"
        raise BadPrefix(f"chain is {found}; it must be a list of the hashes of 1 to {BLOCKS_MAX} blocks")
    parts: list[bytes] = []
    for number, block in enumerate(chain):
        if not isinstance(block, bytes) or not 1 <= len(block) <= _HASH_BYTES_MAX:
            raise BadPrefix(
                f"chain[{number}] is {shown(block):.80}; a hash must be bytes of length 1 to {_HASH_BYTES_MAX}"
            )
        # The length keeps two chains apart that differ only in where one hash ends.
        parts += [len(block).to_bytes(1, "little"), block]
    return b"".join(parts)

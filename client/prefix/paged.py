"""Recurrent states of engines that page their cache: a snapshot is found by the whole chain of blocks it stands after.

Owns: the key of a chain, which snapshots this object stored, and which of them go for more. Does not own the ring: the
daemon evicts by its own policy, so that what stands in the account may be gone.

Invariants: at most `capacity` snapshots are accounted for; beyond it the one goes that was used longest ago, by this
object. What others stored is found all the same, and never evicted from here. A lookup sends no message; a put waits
for no eviction.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from ...errors import BadPrefix
from ...ipc.schema import BLOCKS_MAX
from ..core import requests
from ..core.fields import check_timeout
from ..core.namespace import Namespace
from ..core.puts import Put

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.lease import Lease
    from ..device.interface import Device

__all__ = ["PER_SEQUENCE", "PagedSnapshots"]

PER_SEQUENCE: Final = 8
"""Snapshots for each sequence that may stay on the device (mistral.rs, PrefixCacheManagerV2)."""
_HASH_BYTES_MAX: Final = 64


class PagedSnapshots:
    """The snapshots that one object keeps. Safe to use from several threads; the child of a fork begins with none.

    Args:
        client: the client to go through.
        namespace: what makes two models' states differ.
        capacity: so many are kept, 1 or more.
        device: where states may lie; they are copied from it before a put returns.
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
        _all.add(self)

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
            BadPrefix: a chain of none or too many, or of something else; the first such item is named.
        """
        key = self.key(chain)
        patience_s = check_timeout(timeout_s, self._client.timeout_s)
        self._evict_due()
        with self._lock:
            own = self._own.get(key)
            if own is not None and (own.state == "sent" or (own.state == "stored" and self._client.contains(key))):
                self._own.move_to_end(key)
                return own.wait(patience_s) if wait else own
        if self._device is not None and self._device.size_of(state):
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
        """A lease on the state after exactly this chain, whoever stored it, or None. A use.

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
        """The key of the snapshot after a chain, for the client's other calls.

        Raises:
            BadPrefix: as for `put`.
        """
        return self._namespace.key("prefix-paged", "text", _joined(chain))

    def clear(self) -> int:
        """Evicts what this object stored. Returns how many were there.

        Raises:
            DaemonUnavailable, TimedOut: nobody answered; they stay.
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
        """Has evicted what went, once it is known to have been stored, by us. Waits for no answer."""
        with self._lock:
            due, self._due = self._due, []
            self._due = [(key, put) for key, put in due if put.state == "sent"]
            # What was put again meanwhile is wanted again.
            keys = [key for key, put in due if put.state == "stored" and key not in self._own]
        requests.send_evict(self._client.link, keys)

    def after_fork_in_child(self) -> None:
        """What was stored is the parent's, and its lock may be held by a thread that is not here. For the library."""
        self._lock = threading.Lock()
        self._own, self._due = OrderedDict(), []


def _joined(chain: Any) -> bytes:
    if isinstance(chain, bytes | bytearray | str) or not 1 <= len(chain) <= BLOCKS_MAX:
        what = f"{len(chain)} items" if isinstance(chain, list | tuple) else f"a {type(chain).__name__}"
        raise BadPrefix(f"chain is {what}; it is a list of 1 to {BLOCKS_MAX} blocks' hashes")
    parts: list[bytes] = []
    for number, block in enumerate(chain):
        if not isinstance(block, bytes) or not 1 <= len(block) <= _HASH_BYTES_MAX:
            raise BadPrefix(f"chain[{number}] is {block!r:.80}; a block's hash is 1 to {_HASH_BYTES_MAX} bytes")
        # Two chains must not agree by where one hash ends and the next begins.
        parts += [len(block).to_bytes(1, "little"), block]
    return b"".join(parts)


_all: Final[WeakSet[PagedSnapshots]] = WeakSet()


def _in_child() -> None:
    for snapshots in list(_all):
        snapshots.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)

"""The entries of one device in this process, and the leases on them.

Owns: the table from keys to tensors and their state, the uses not reported to the daemon yet, and the keys whose state
the daemon does not know yet. Does not own: the communication with the daemon (upkeep.py), a put's state
(registration.py), the device.

Invariants: only the owner's delete removes an entry with a live lease. Every access to the tables holds `lock`,
briefly, and never while waiting for a device or a daemon. A lease is returned without the lock, since a finalizer may
do so at any point of any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal, NoReturn, Self

from ...errors import DaemonUnavailable
from ..gpu.interface import Device, Mark
from ..reading.lease import Lease
from .registration import Registration

DeviceTier = Literal["device", "host"]
_MARKS: Final = 4
_leases = count(1)
_serials = count(1)


@dataclass(slots=True, eq=False)
class DeviceEntry:
    """Tensors in this process's VRAM.

    `marks`: points that streams must reach before the tensors may be copied or dropped. `leases`: the present leases.
    `uses`: the number of uses since the put, the put included. `said`: a registration is in flight. `known`: a daemon
    has registered the entry. `serial`: distinguishes entries of one key, one after the other. `new_bytes`: memory that
    was taken for it, that no reservation counts and no daemon was told of. `cost_ms`: what computing the
    tensors again takes, as reported by the put.
    """

    key: bytes
    tree: Any
    size_bytes: int
    tokens: int
    agent: str
    registration: Registration
    marks: list[Mark] = field(default_factory=list)
    leases: dict[int, None] = field(default_factory=dict)
    uses: int = 1
    cost_ms: float = 0.0
    new_bytes: int = 0
    said: bool = False
    known: bool = False
    serial: int = field(default_factory=_serials.__next__)

    @property
    def in_use(self) -> bool:
        """Whether a lease on the entry exists."""
        return bool(self.leases)

    def give_up(self) -> None:
        """Settles the registration as lost, unless the daemon's answer is outstanding. The entry has left the cache."""
        if not self.said and self.registration.state == "sent":
            self.registration.settle("lost", DaemonUnavailable("it left the cache before the daemon knew it"))


class DeviceLease:
    """Tensors that are not evicted while the lease lives. Use it in a `with` block, or drop it.

    Attributes:
        tree: on tier "device" the very tensors that were put, which must not be written; on tier "host" read-only numpy
            views, as in `Lease.tree`.
        tier: the tier of the tensors.
        host: the lease on the host tier, for its `torch()`; None on tier "device".

    Release the lease in the thread, and under the stream, that used the tensors: the work queued on that stream by then
    is awaited before the tensors are evicted.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_vram import FakeCard, FakeVram
        >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 20))    # TorchDevice(0): a real card
        >>> cache.put(key, np.arange(3), wait=True).state
        'stored'
        >>> with tensord.DeviceCache(cache, device) as held, held.get(key) as lease:
        ...     print(lease.tier, lease.tree)                       # not on the card: a view of the ring
        host [0 1 2]
    """

    __slots__ = ("__weakref__", "_device", "_entries", "_entry", "_number", "_tree", "host", "tier")

    def __init__(self, tree: Any, tier: DeviceTier, host: Lease | None = None) -> None:
        self._tree = tree
        self.tier: DeviceTier = tier
        self.host = host
        self._entry: DeviceEntry | None = None
        self._entries: DeviceEntries | None = None
        self._device: Device | None = None
        self._number = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease keeps tensors of this process on the device, so it cannot be pickled or copied: send copies of "
            "the tensors"
        )

    @classmethod
    def of(cls, entry: DeviceEntry, entries: DeviceEntries, device: Device) -> Self:
        """A new lease on an entry. The caller holds `entries.lock`. For the library."""
        lease = cls(entry.tree, "device")
        lease._number = next(_leases)
        lease._entry, lease._entries, lease._device = entry, entries, device
        entry.leases[lease._number] = None
        return lease

    @property
    def tree(self) -> Any:
        """The tensors.

        Raises:
            ValueError: the lease was released.
        """
        if self._tree is None and self._number < 0:
            raise ValueError("this lease was released; take the tensors you need before the with block ends")
        return self._tree

    def release(self) -> None:
        """Releases the tensors. Idempotent."""
        entry, device = self._entry, self._device
        self._entry = self._tree = None
        if self.host is not None:
            self.host.release()
        if entry is not None and device is not None and self._entries is not None:
            if not self._entries.closed:
                # The user of the lease may have queued work on the tensors, so the mark is added before the lease is
                # returned.
                with suppress(Exception):
                    entry.marks.append(device.mark())
            entry.leases.pop(self._number, None)
        self._number = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        with suppress(Exception):
            if self._entry is not None:
                self.release()


@dataclass(slots=True)
class DeviceTally:
    """Counts of one DeviceCache: lookups by tier, and entries by what happened to them.

    `blocked`: the part of `refused` that was refused in emergency mode without asking the daemon.
    """

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    registered: int = 0
    refused: int = 0
    blocked: int = 0
    offloaded: int = 0
    dropped: int = 0
    kept: int = 0
    promoted: int = 0
    freed_bytes: int = 0


class DeviceEntries:
    """The table of entries, with their bytes."""

    def __init__(self) -> None:
        # Reentrant: a lease's finalizer, and any code with it, may run while this thread holds the lock.
        self.lock = threading.RLock()
        self.closed = False
        self.size_bytes = 0
        self.tally = DeviceTally()
        self.unsynced: dict[bytes, None] = {}
        """Keys whose present entry, or absence, the daemon does not know, in order of the change."""
        self.unreported_uses: dict[bytes, int] = {}
        """Uses by key that are not reported to the daemon yet."""
        self._table: dict[bytes, DeviceEntry] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def find(self, key: bytes) -> DeviceEntry | None:
        """The present entry of a key, or None."""
        return self._table.get(key)

    def keys(self) -> list[bytes]:
        """All keys."""
        with self.lock:
            return list(self._table)

    def lease(self, key: bytes, device: Device) -> DeviceLease | None:
        """A new lease, counted as a use; None if there is no entry."""
        with self.lock:
            entry = self._table.get(key)
            if entry is None:
                return None
            self._use(entry)
            self.tally.hits += 1
            if len(entry.marks) > _MARKS:
                # Only marks before the last one are removed: a release appends without this lock.
                settled = len(entry.marks) - 1
                with suppress(Exception):  # a failed stream must not turn a hit into a miss
                    entry.marks[:settled] = [mark for mark in entry.marks[:settled] if not mark.wait(0)]
            return DeviceLease.of(entry, self, device)

    def put(self, entry: DeviceEntry, *, reserved: bool = False) -> DeviceEntry | None:
        """Adds an entry. Returns the entry of its key: an earlier one stays, and is used. None, without a change, if
        the table is closed. `reserved`: its memory was taken under a reservation, which counts it."""
        with self.lock:
            if self.closed:
                return None
            before = self._table.get(entry.key)
            if before is not None:
                self._use(before)
                return before
            self._table[entry.key] = entry
            self.size_bytes += entry.size_bytes
            entry.new_bytes = 0 if reserved else entry.size_bytes
            self.unsynced[entry.key] = None
            return entry

    def agreed(self, entry: DeviceEntry) -> None:
        """Records that the daemon has registered the entry."""
        with self.lock:
            if not entry.known:
                self.tally.registered += 1
            entry.known = True
            entry.new_bytes = 0

    def refused(self, entry: DeviceEntry) -> None:
        """Removes an entry that the daemon refused."""
        with self.lock:
            self.tally.refused += 1
            if self._table.get(entry.key) is entry:
                self._remove(entry)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Removes entries. Returns the number of removed entries."""
        with self.lock:
            found = [entry for key in keys if (entry := self._table.get(key)) is not None]
            for entry in found:
                self._remove(entry)
                entry.give_up()
                self.unsynced[entry.key] = None
            return len(found)

    def leave(self, entry: DeviceEntry, uses: int, *, stored: bool) -> Literal["left", "in use", "gone"]:
        """Removes an entry on an order of the daemon or its owner, unless the entry is in use, or has been used since
        the caller read `uses`. A removed entry drops its tensors, even if other references to the entry exist. It is
        counted as offloaded if the host tier has `stored` it, or else as dropped."""
        with self.lock:
            if self._table.get(entry.key) is not entry:
                return "gone"
            if entry.uses != uses or entry.in_use:
                return "in use"
            self._remove(entry)
            entry.give_up()
            entry.tree = None
            entry.marks.clear()
            self.tally.offloaded += stored
            self.tally.dropped += not stored
            return "left"

    def say_all(self) -> None:
        """Marks all entries as unknown to the daemon, for a new daemon. Each will be registered with its count of
        uses."""
        with self.lock:
            self.unsynced = dict.fromkeys(self._table)
            self.unreported_uses.clear()

    def close(self) -> list[DeviceEntry]:
        """Empties and closes the table. Returns its entries."""
        with self.lock:
            self.closed = True
            left = list(self._table.values())
            self._table.clear()
            self.unsynced.clear()
            self.unreported_uses.clear()
            self.size_bytes = 0
            return left

    def close_in_child(self) -> list[DeviceEntry]:
        """`close` in the child of a fork, with a new lock, since another thread of the parent may hold the old one."""
        self.lock = threading.RLock()
        return self.close()

    def _use(self, entry: DeviceEntry) -> None:
        entry.uses += 1
        self.unreported_uses[entry.key] = self.unreported_uses.get(entry.key, 0) + 1

    def _remove(self, entry: DeviceEntry) -> None:
        del self._table[entry.key]
        self.size_bytes -= entry.size_bytes
        self.unreported_uses.pop(entry.key, None)

    def check_invariants(self) -> None:
        """Asserts that the total agrees with the table."""
        with self.lock:
            assert self.size_bytes == sum(entry.size_bytes for entry in self._table.values())
            assert all(entry.key == key for key, entry in self._table.items())
            assert not self.closed or not self._table

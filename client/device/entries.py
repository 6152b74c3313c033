"""The entries of one device in this process, the leases on them, and the state of their puts.

Owns: the table from keys to tensors, the uses that the daemon was not told of yet, and the keys that changed since.
Does not own: what the daemon knows (ledger.py), the device.

Invariants: only the owner's delete removes an entry with a live lease. Every access to the tables holds `lock`,
briefly, and never while waiting for a device or a daemon. A lease is returned without the lock, since a finalizer may
do so at any point of any thread. A registration's state is set once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from ...errors import DaemonUnavailable, TensordError, TimedOut
from ...ipc.messages.schema import DURATION_S_MAX
from ...shm.index.keys import shortened
from ..arguments.checks import check_timeout
from ..gpu.interface import Device, Mark
from ..reading.lease import Lease
from ..threads.of_process import Releasable
from ..threads.waiting import LockEvent

RegistrationState = Literal["sent", "registered", "refused", "lost"]
_MARKS: Final = 4


class Registration:
    """The result of a put. `state` is one of

    - "sent": `get` finds the tensors in this process; the daemon has not answered yet, or there is none.
    - "registered": the daemon counts the entry, and will order its eviction.
    - "refused": the daemon refused the entry, `error` says why; the cache holds no reference to the tensors.
    - "lost": the entry was deleted, replaced or evicted, or the cache was closed, before the daemon knew the entry.

    Example:
        >>> import tempfile
        >>> from tensord.testing.fake_vram import FakeCard, FakeVram
        >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 20))    # TorchDevice(0): a real card
        >>> with tensord.DeviceCache(cache, device) as held:
        ...     held.put(key, device.upload(np.zeros(4))).wait().state
        'registered'
    """

    __slots__ = ("_settled", "error", "key", "state")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.state: RegistrationState = "sent"
        self.error: TensordError | None = None
        self._settled = LockEvent()

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the state is not "sent" any more. Raises TimedOut if it still is after `timeout_s` seconds; the
        tensors stay."""
        if not self._settled.wait(check_timeout(timeout_s, DURATION_S_MAX)):
            raise TimedOut(
                f"the registration of {shortened(self.key)} was not answered within {timeout_s:.3g} s; the tensors stay"
            )
        return self

    def settle(self, state: RegistrationState, error: TensordError | None = None) -> Self:
        """Sets the final state, unless there is one. For the library."""
        if self.state == "sent":
            # The error first: a thread that sees "refused" finds its reason.
            self.error = error
            self.state = state
            self._settled.set()
        return self

    def __repr__(self) -> str:
        return f"Registration({shortened(self.key)}, {self.state}{f', {self.error!r}' if self.error else ''})"


@dataclass(slots=True, eq=False)
class DeviceEntry:
    """Tensors in this process's VRAM.

    `marks`: points that streams must reach before the tensors may be copied or dropped. `leases`: the present leases,
    by their ids. `uses`: the number of uses since the put, the put included. `known_to`: the last connection whose
    daemon has registered the entry. `is_reserved`: a reservation counted its memory when it was taken.
    """

    key: bytes
    tree: Any
    size_bytes: int
    tokens: int
    agent: str
    registration: Registration
    marks: list[Mark]
    cost_ms: float = 0.0
    is_reserved: bool = False
    leases: set[int] = field(default_factory=set)
    uses: int = 1
    known_to: object = None


class DeviceLease(Releasable):
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

    __slots__ = ("__weakref__", "_entries", "_entry", "_tree", "host", "tier")
    _instead = "send copies of the tensors"

    def __init__(self, entries: DeviceEntries, held: DeviceEntry | Lease) -> None:
        """`held`: an entry of the table, whose lock the caller holds; or a lease on the host tier."""
        self._tree: Any = held.tree
        self._entries = entries
        self._entry: DeviceEntry | None = None
        self.host: Lease | None = None
        self.tier: Literal["device", "host"] = "host"
        if isinstance(held, Lease):
            self.host = held
        else:
            self.tier = "device"
            self._entry = held
            held.leases.add(id(self))

    @property
    def tree(self) -> Any:
        """The tensors. Raises ValueError if the lease was released."""
        if self._tree is _RELEASED:
            raise ValueError("this lease was released; take the tensors you need before the with block ends")
        return self._tree

    def release(self) -> None:
        """Releases the tensors. Idempotent."""
        entry, self._entry, self._tree = self._entry, None, _RELEASED
        if self.host is not None:
            self.host.release()
        if entry is not None:
            if not self._entries.closed:
                # The user of the lease may have queued work on the tensors, so the mark is added before the lease is
                # returned.
                with suppress(Exception):
                    entry.marks.append(self._entries.device.mark())
            entry.leases.discard(id(self))

    def __del__(self) -> None:
        with suppress(Exception):
            if self._entry is not None:
                self.release()


_RELEASED: Final = object()


class DeviceEntries:
    """The table of entries.

    `changed`: keys whose present entry, or absence, the daemon may not know, in order of the change.
    `unreported_uses`: uses by key that are not reported to the daemon yet.
    """

    def __init__(self, device: Device) -> None:
        # Reentrant: a lease's finalizer, and any code with it, may run while this thread holds the lock.
        self.lock = threading.RLock()
        self.device = device
        self.closed = False
        self.changed: dict[bytes, None] = {}
        self.unreported_uses: dict[bytes, int] = {}
        self._table: dict[bytes, DeviceEntry] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    @property
    def size_bytes(self) -> int:
        with self.lock:
            return sum(entry.size_bytes for entry in self._table.values())

    def find(self, key: bytes) -> DeviceEntry | None:
        """The present entry of a key, or None."""
        return self._table.get(key)

    def keys(self) -> list[bytes]:
        with self.lock:
            return list(self._table)

    def lease(self, key: bytes) -> DeviceLease | None:
        """A new lease, counted as a use; None if there is no entry."""
        with self.lock:
            entry = self._table.get(key)
            if entry is None:
                return None
            self._use(entry)
            if len(entry.marks) > _MARKS:
                # Only marks before the last one are removed: a release appends without this lock.
                settled = len(entry.marks) - 1
                with suppress(Exception):  # a failed stream must not turn a hit into a miss
                    entry.marks[:settled] = [mark for mark in entry.marks[:settled] if not mark.wait(0)]
            return DeviceLease(self, entry)

    def put(self, entry: DeviceEntry) -> DeviceEntry | None:
        """Adds an entry. Returns the entry of its key: an earlier one stays, and is used. None, without a change, if
        the table is closed."""
        with self.lock:
            if self.closed:
                return None
            before = self._table.get(entry.key)
            if before is not None:
                self._use(before)
                return before
            self._table[entry.key] = entry
            self.changed[entry.key] = None
            return entry

    def delete(self, keys: Iterable[bytes]) -> int:
        """Removes entries. Returns the number of removed entries."""
        with self.lock:
            return sum(self.remove(entry) for key in keys if (entry := self._table.get(key)) is not None)

    def remove(self, entry: DeviceEntry) -> bool:
        """Removes an entry. Returns False, without a change, if it is not in the table. The caller holds the lock."""
        if self._table.get(entry.key) is not entry:
            return False
        del self._table[entry.key]
        self.unreported_uses.pop(entry.key, None)
        self.changed[entry.key] = None
        entry.registration.settle("lost", DaemonUnavailable("it left the cache before the daemon knew it"))
        return True

    def leave(self, entry: DeviceEntry, uses: int) -> bool:
        """Removes an entry, and drops its tensors, even if other references to the entry exist. Returns False if the
        entry is not in the table, is in use, or has been used since the caller read `uses`."""
        with self.lock:
            if entry.uses != uses or entry.leases or not self.remove(entry):
                return False
            entry.tree = None
            entry.marks.clear()
            return True

    def all_changed(self) -> None:
        """Marks all entries as unknown to a new daemon. Each will be registered with its count of uses."""
        with self.lock:
            self.changed = dict.fromkeys(self._table)
            self.unreported_uses.clear()

    def close(self, error: DaemonUnavailable) -> list[DeviceEntry]:
        """Empties and closes the table. Returns its entries, whose registrations end with `error` if the daemon did not
        know them."""
        with self.lock:
            self.closed = True
            left = list(self._table.values())
            self._table.clear()
            self.all_changed()
        for entry in left:
            entry.registration.settle("lost", error)
        return left

    def _use(self, entry: DeviceEntry) -> None:
        entry.uses += 1
        self.unreported_uses[entry.key] = self.unreported_uses.get(entry.key, 0) + 1

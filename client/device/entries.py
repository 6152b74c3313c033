"""The entries of one device in this process, and the leases on them.

Owns: the table (key → tensors and what is known of them), uses that the daemon was not told of yet, which keys it is to
be told of. Does not own the conversation with the daemon (upkeep.py), nor the tensors' device.

Invariants: an entry with a live lease is never taken out but by its owner's own delete or put. Whatever touches the
tables holds `lock`, shortly and never while waiting for a device or a daemon; a lease is given back without it, since a
finalizer may do so at any point of any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal, Protocol, Self

from ...errors import DaemonUnavailable, TensordError, TimedOut
from ...ipc.schema import DURATION_S_MAX
from ..core.fields import check_timeout
from ..core.lease import Lease
from ..core.puts import PutState
from ..core.waiting import LockEvent
from .interface import Device, Mark

RegistrationState = Literal["sent", "registered", "refused", "lost"]
DeviceTier = Literal["device", "host"]
_MARKS: Final = 4
_leases = count(1)
_serials = count(1)


class HostCopy(Protocol):
    """What becomes of an entry's copy in the host tier, as a `Put` says it: with "stored" and "existed" it is there."""

    @property
    def state(self) -> PutState: ...

    def wait(self, timeout_s: float | None = None) -> object:
        """Waits until it is known what became of it.

        Raises:
            TimedOut: it is not known after `timeout_s`.
        """
        ...


ToHost = Callable[[Any], HostCopy]
"""What is done with the copy of an entry's tree, in host memory, for it to be in the host tier."""


class Registration:
    """What became of a put. `state` is

    - "sent": the tensors are this process's to get; the daemon has not answered, or there is none yet.
    - "registered": the daemon counts them among its entries, and will say when they are to go.
    - "refused": the daemon said no, and `error` says why; the cache holds no reference to the tensors.
    - "lost": it was deleted, put anew or ordered away, or the cache was closed, before the daemon was told of it.

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
        """Waits until it is known what became of it.

        Raises:
            TimedOut: it is not known after `timeout_s`; the tensors stay.
        """
        if not self._settled.wait(check_timeout(timeout_s, DURATION_S_MAX)):
            name = self.key.hex()[:16]
            raise TimedOut(f"the registration of {name}… was not answered within {timeout_s:.3g} s; the tensors stay")
        return self

    def settle(self, state: RegistrationState, error: TensordError | None = None) -> None:
        """Says what became of it. For the library."""
        self.state, self.error = state, error
        self._settled.set()

    def disown(self) -> None:
        """In the child of a fork. Takes no lock that a thread of the parent may hold."""
        self._settled = LockEvent()
        self.settle("lost", DaemonUnavailable("this process was forked off: the tensors are its parent's"))

    def __repr__(self) -> str:
        return f"Registration({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"


@dataclass(slots=True, eq=False)
class DeviceEntry:
    """Tensors in this process's VRAM.

    `marks`: what streams must have reached before the tensors may be copied or dropped. `leases`: who uses them now.
    `uses`: since it was put, that put included. `before`: what a put replaced, until the daemon has agreed to it.
    `said`: the daemon is being asked. `known`: one has had it registered. `serial`: tells entries of one key apart.
    `to_host`: what stands in for `Client.put` under its key.
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
    before: DeviceEntry | None = None
    to_host: ToHost | None = None
    said: bool = False
    known: bool = False
    serial: int = field(default_factory=_serials.__next__)

    @property
    def in_use(self) -> bool:
        """Whether somebody holds a lease."""
        return bool(self.leases)

    def give_up(self) -> None:
        """It is not here any more: unless the daemon is being asked, nobody will hear of it."""
        if not self.said and self.registration.state == "sent":
            self.registration.settle("lost", DaemonUnavailable("it left the cache before the daemon was told of it"))


class DeviceLease:
    """Tensors that nobody takes away while this lives. Use it in a `with`, or let it go.

    Attributes:
        tree: on tier "device" the very tensors that were put, which must not be written; on tier "host" read-only
            numpy views, as `Lease.tree` has them.
        tier: where they lie.
        host: the lease on the host tier, for its `torch()`; None on tier "device".

    Release it in the thread and under the stream that used the tensors: what that stream has been told by then is
    waited for before they go.

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

    @classmethod
    def of(cls, entry: DeviceEntry, entries: DeviceEntries, device: Device) -> Self:
        """A lease on an entry. Holds `entries.lock`."""
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
        """Gives the tensors up. Once; again, nothing happens."""
        entry, device = self._entry, self._device
        self._entry = self._tree = None
        if self.host is not None:
            self.host.release()
        if entry is not None and device is not None and self._entries is not None:
            if not self._entries.closed:
                # A lease may have begun work on the tensors: the mark stands before the lease is given back.
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
    """What one DeviceCache did: lookups by where they ended, and what became of entries.

    `blocked`: puts refused in emergency without asking the daemon, among `refused`. `stayed`: entries that their owner
    sent to the host tier, which did not take them, among `kept`.
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
    stayed: int = 0
    promoted: int = 0
    freed_bytes: int = 0


class DeviceEntries:
    """The table, with the sums over it."""

    def __init__(self) -> None:
        # Reentrant: a lease's finalizer, and with it anything, may run where this is held.
        self.lock = threading.RLock()
        self.closed = False
        self.tokens = 0
        self.bytes = 0
        self.tally = DeviceTally()
        self.untold: dict[bytes, None] = {}
        """Keys of which the daemon does not know what stands here, in the order in which that came about."""
        self.unsaid: dict[bytes, int] = {}
        """Uses by key that it has not been told of."""
        self._table: dict[bytes, DeviceEntry] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def find(self, key: bytes) -> DeviceEntry | None:
        """What stands under a key now."""
        return self._table.get(key)

    def keys(self) -> list[bytes]:
        """All keys."""
        with self.lock:
            return list(self._table)

    def lease(self, key: bytes, device: Device) -> DeviceLease | None:
        """A lease, and a use."""
        with self.lock:
            entry = self._table.get(key)
            if entry is None:
                return None
            entry.uses += 1
            self.unsaid[key] = self.unsaid.get(key, 0) + 1
            self.tally.hits += 1
            if len(entry.marks) > _MARKS:
                # Only the front of it: a release appends without this lock.
                settled = len(entry.marks) - 1
                with suppress(Exception):  # a stream that failed is no reason to miss
                    entry.marks[:settled] = [mark for mark in entry.marks[:settled] if not mark.wait(0)]
            return DeviceLease.of(entry, self, device)

    def put(self, entry: DeviceEntry) -> bool:
        """Puts an entry in, in place of one of the same key. False, and nothing, once the table is closed."""
        with self.lock:
            if self.closed:
                return False
            before = self._table.pop(entry.key, None)
            if before is not None:
                self._count(before, -1)
                before.give_up()
                entry.uses += before.uses
                # Of several that no daemon has agreed to, only the last is wanted.
                entry.before = before if before.known else before.before
            self._table[entry.key] = entry
            self._count(entry, 1)
            self.untold[entry.key] = None
            return True

    def agreed(self, entry: DeviceEntry) -> None:
        """The daemon has registered it: what it replaced is not wanted any more."""
        with self.lock:
            if not entry.known:
                self.tally.registered += 1
            entry.known = True
            entry.before = None
            current = self._table.get(entry.key)
            if current is not None and current is not entry and current.before is not None:
                # A later put replaced what has just been agreed to: that is what stands behind it now.
                current.before = entry

    def refused(self, entry: DeviceEntry) -> None:
        """The daemon does not want it: what it replaced stands here again, if anything."""
        with self.lock:
            self.tally.refused += 1
            if self._table.get(entry.key) is not entry:
                return
            del self._table[entry.key]
            self._count(entry, -1)
            before, entry.before = entry.before, None
            if before is not None:
                self._table[before.key] = before
                self._count(before, 1)
            self.untold[entry.key] = None

    def delete(self, keys: Iterable[bytes]) -> int:
        """Takes entries out for good. Returns how many there were."""
        with self.lock:
            gone = 0
            for key in keys:
                entry = self._table.pop(key, None)
                if entry is None:
                    continue
                gone += 1
                self._count(entry, -1)
                entry.give_up()
                self.unsaid.pop(key, None)
                self.untold[key] = None
            return gone

    def leave(self, entry: DeviceEntry, uses: int) -> Literal["left", "in use", "replaced", "deleted"]:
        """Takes an entry out because the daemon or its owner said so, unless it is wanted here: it has been used since
        `uses` was read of it, or is being used now. One that has left holds no tensors, whoever still holds it."""
        with self.lock:
            current = self._table.get(entry.key)
            if current is None:
                return "deleted"
            if current is not entry:
                return "replaced"
            if entry.uses != uses or entry.in_use:
                return "in use"
            del self._table[entry.key]
            self._count(entry, -1)
            self.unsaid.pop(entry.key, None)
            entry.give_up()
            entry.tree = entry.before = entry.to_host = None
            entry.marks.clear()
            return "left"

    def say_all(self) -> None:
        """A daemon that knows nothing: all are to be told of, with the uses they had."""
        with self.lock:
            for entry in self._table.values():
                entry.before = None
            self.untold = dict.fromkeys(self._table)
            self.unsaid.clear()

    def close(self) -> list[DeviceEntry]:
        """Empties the table for good, and gives what was in it."""
        with self.lock:
            self.closed = True
            left = list(self._table.values())
            self._table.clear()
            self.untold.clear()
            self.unsaid.clear()
            self.bytes = self.tokens = 0
            return left

    def close_in_child(self) -> list[DeviceEntry]:
        """The same after a fork: another thread of the parent may hold the lock."""
        self.lock = threading.RLock()
        return self.close()

    def _count(self, entry: DeviceEntry, sign: int) -> None:
        self.tokens += sign * entry.tokens
        self.bytes += sign * entry.size_bytes

    def check_invariants(self) -> None:
        """Asserts that the sums are those of the table."""
        with self.lock:
            assert self.tokens == sum(entry.tokens for entry in self._table.values())
            assert self.bytes == sum(entry.size_bytes for entry in self._table.values())
            assert all(entry.key == key for key, entry in self._table.items())
            assert not self.closed or not self._table

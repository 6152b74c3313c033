"""A process's budget for the entries that it stores, in entries and bytes.

Owns: the account, and the order of eviction. Does not own: the entries; callbacks tell whether an entry still exists,
and whether a client holds it. Takes no lock.
Invariants: the account is the sum of its entries, and within the budget. Making room looks at each entry at most three
times. An entry that is dropped while its put is in flight is evicted once it is stored, so no entry of this process
stays uncounted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import BelowFloor
from ..threads.waiting import LockEvent
from ..writing.outcomes import Put

__all__ = ["Budget", "TrackedPut"]


@dataclass(slots=True)
class TrackedPut:
    """An entry that this process stored, or is storing."""

    size_bytes: int
    put: Put | None = None
    """None while the payload is being copied."""
    begun: LockEvent = field(default_factory=LockEvent)
    """Set once the payload was copied, or the put was given up."""

    @property
    def is_under_way(self) -> bool:
        """Whether the put's outcome is not known yet."""
        # Read first: once it is set, `put` does not change any more.
        begun = self.begun.is_set()
        return not begun if self.put is None else self.put.state == "sent"

    @property
    def is_stored(self) -> bool:
        """Whether this process's put stored the entry. It may have been evicted since."""
        return self.put is not None and self.put.state == "stored"


class Budget:
    """The entries that this process stored, least recently used first.

    Args:
        entries_max, bytes_max: the limits.
        is_there: returns whether the entry of a key still exists.
        is_held: returns whether a client holds it.
    """

    def __init__(
        self, entries_max: int, bytes_max: int, is_there: Callable[[bytes], bool], is_held: Callable[[bytes], bool]
    ) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.floor = 0
        """How many entries are never dropped."""
        self.bytes = 0
        self._is_there = is_there
        self._is_held = is_held
        self._tracked: OrderedDict[bytes, TrackedPut] = OrderedDict()
        self._dropped: list[tuple[bytes, TrackedPut]] = []

    def __len__(self) -> int:
        return len(self._tracked)

    def find(self, key: bytes) -> TrackedPut | None:
        """The tracked put of a key, or None. Its entry may have been evicted."""
        return self._tracked.get(key)

    def add(self, key: bytes, tracked: TrackedPut) -> None:
        """Adds an entry as the most recently used one. Call `make_room` first."""
        self.forget(key)
        self._tracked[key] = tracked
        self.bytes += tracked.size_bytes

    def touch(self, key: bytes) -> None:
        """Marks an entry as the most recently used one, if it is in the account."""
        if key in self._tracked:
            self._tracked.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Removes an entry from the account, if it is in it."""
        tracked = self._tracked.pop(key, None)
        if tracked is not None:
            self.bytes -= tracked.size_bytes

    def forget_all(self) -> None:
        """Removes all entries from the account. Evicts none."""
        self._tracked.clear()
        self._dropped.clear()
        self.bytes = 0

    def drop_all(self) -> None:
        """Removes all entries from the account. `take_due` returns those that still exist. Looks at every entry."""
        self.forget_gone()
        for key in list(self._tracked):
            self._drop(key)

    def forget_gone(self) -> None:
        """Removes entries that no longer exist from the account. Looks at every entry."""
        for key in [key for key, tracked in self._tracked.items() if self._is_gone(key, tracked)]:
            self.forget(key)

    def make_room(self, size_bytes: int) -> None:
        """Removes entries from the account until `size_bytes` (at most `bytes_max`) fit. `take_due` returns the keys to
        evict.

        The order is: least recently used, then entries that a client holds, then entries whose put is in flight.

        Raises:
            BelowFloor: fewer entries than the floor would be left; nothing is removed.
        """
        victims = self._victims(size_bytes)
        if victims and len(self._tracked) - len(victims) < self.floor:
            # Entries that were not looked at may be gone.
            self.forget_gone()
            victims = self._victims(size_bytes)
        if victims and len(self._tracked) - len(victims) < self.floor:
            raise BelowFloor(
                f"{len(self._tracked)} entries of {self.bytes} bytes are stored; entries_max is {self.entries_max}, "
                f"bytes_max is {self.bytes_max}: {size_bytes} more bytes would evict {len(victims)} entries, and the "
                f"queueing floor keeps {self.floor}; raise entries_max or bytes_max, or lower the floor"
            )
        for key in victims:
            self._drop(key)

    def take_due(self) -> list[bytes]:
        """Returns the keys to evict now. A dropped entry whose put is in flight is returned by the first call after it
        is stored: before that, the daemon has no entry to evict.
        """
        dropped, self._dropped = self._dropped, []
        due: list[bytes] = []
        for key, tracked in dropped:
            if tracked.is_under_way:
                self._dropped.append((key, tracked))
            elif tracked.is_stored:
                due.append(key)
        return due

    def check_invariants(self) -> None:
        """Asserts that the account is the sum of its entries, and within the limits."""
        assert self.bytes == sum(tracked.size_bytes for tracked in self._tracked.values())
        assert self.bytes <= self.bytes_max and len(self._tracked) <= self.entries_max

    def _drop(self, key: bytes) -> None:
        self._dropped.append((key, self._tracked[key]))
        self.forget(key)

    def _victims(self, size_bytes: int) -> list[bytes]:
        """The entries to drop, in order. Removes entries that no longer exist from the account."""
        over_entries = len(self._tracked) + 1 - self.entries_max
        over_bytes = self.bytes + size_bytes - self.bytes_max
        gone: list[bytes] = []
        victims: list[bytes] = []
        held: list[bytes] = []
        under_way: list[bytes] = []
        for key, tracked in self._tracked.items():
            if over_entries <= 0 and over_bytes <= 0:
                break
            if tracked.is_under_way:
                under_way.append(key)
                continue
            if self._is_gone(key, tracked):
                gone.append(key)
            elif self._is_held(key):
                held.append(key)
                continue
            else:
                victims.append(key)
            over_entries -= 1
            over_bytes -= tracked.size_bytes
        for key in held + under_way:
            if over_entries <= 0 and over_bytes <= 0:
                break
            victims.append(key)
            over_entries -= 1
            over_bytes -= self._tracked[key].size_bytes
        for key in gone:
            self.forget(key)
        return victims

    def _is_gone(self, key: bytes, tracked: TrackedPut) -> bool:
        """Whether this process's put did not store the entry, or the entry no longer exists. False while the put is in
        flight.
        """
        return not tracked.is_under_way and not (tracked.is_stored and self._is_there(key))

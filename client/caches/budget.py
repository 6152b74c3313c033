"""A process's own view of what it stored: how much, and what goes for more. Budgets in entries and bytes.

Owns: the account, and the order in which entries go. Does not own the entries: whether one is still there, and whether
anybody holds it, is asked of whoever knows. Locks nothing.

Invariants: the account is the sum of its entries, within the budgets. Making room looks at each entry three times at
most. What was taken away while it was under way is evicted once it is stored: nothing of ours stays uncounted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import BelowFloor
from ..core.puts import Put
from ..core.waiting import LockEvent

__all__ = ["Budget", "TrackedPut"]


@dataclass(slots=True)
class TrackedPut:
    """An entry that this process stored, or is storing."""

    size_bytes: int
    put: Put | None = None
    """None while it is being copied."""
    begun: LockEvent = field(default_factory=LockEvent)
    """Set when it was copied, or given up."""

    @property
    def is_under_way(self) -> bool:
        """Whether it is not known yet what becomes of it."""
        # First: once it is set, `put` stays what it is.
        begun = self.begun.is_set()
        return not begun if self.put is None else self.put.state == "sent"

    @property
    def is_stored(self) -> bool:
        """Whether it is known to have been stored, by us; it may be gone again."""
        return self.put is not None and self.put.state == "stored"


class Budget:
    """What this process stored, least recently used first.

    Args:
        entries_max, bytes_max: the budgets.
        is_there: whether what was stored under a key is still there.
        is_held: whether anybody holds it.
    """

    def __init__(
        self, entries_max: int, bytes_max: int, is_there: Callable[[bytes], bool], is_held: Callable[[bytes], bool]
    ) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.floor = 0
        """Entries that are never taken away."""
        self.bytes = 0
        self._is_there = is_there
        self._is_held = is_held
        self._tracked: OrderedDict[bytes, TrackedPut] = OrderedDict()
        self._dropped: list[tuple[bytes, TrackedPut]] = []

    def __len__(self) -> int:
        return len(self._tracked)

    def find(self, key: bytes) -> TrackedPut | None:
        """The entry, as it was accounted for; it may be gone."""
        return self._tracked.get(key)

    def add(self, key: bytes, tracked: TrackedPut) -> None:
        """Accounts for an entry, as the one used last. Make room for it first."""
        self.forget(key)
        self._tracked[key] = tracked
        self.bytes += tracked.size_bytes

    def touch(self, key: bytes) -> None:
        """An entry was used, if it is one of ours."""
        if key in self._tracked:
            self._tracked.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Takes an entry out of the account, if it is in there."""
        tracked = self._tracked.pop(key, None)
        if tracked is not None:
            self.bytes -= tracked.size_bytes

    def forget_all(self) -> None:
        """Takes all out of the account, and has nothing evicted."""
        self._tracked.clear()
        self._dropped.clear()
        self.bytes = 0

    def drop_all(self) -> None:
        """Takes all out of the account, for `take_due` to give what is there. Looks at every entry."""
        self.forget_gone()
        for key in list(self._tracked):
            self._drop(key)

    def forget_gone(self) -> None:
        """Takes out of the account what is there no more. Looks at every entry."""
        for key in [key for key, tracked in self._tracked.items() if self._is_gone(key, tracked)]:
            self.forget(key)

    def make_room(self, size_bytes: int) -> None:
        """Takes out of the account what has to go for an entry of `size_bytes`, which is within `bytes_max`, for
        `take_due` to give: least recently used first, then what anybody holds, and what is under way last.

        Raises:
            BelowFloor: fewer entries than the floor would be left. Nothing has to go then.
        """
        victims = self._victims(size_bytes)
        if victims and len(self._tracked) - len(victims) < self.floor:
            # Some may be gone of themselves that were not looked at.
            self.forget_gone()
            victims = self._victims(size_bytes)
        if victims and len(self._tracked) - len(victims) < self.floor:
            raise BelowFloor(
                f"{len(self._tracked)} entries of {self.bytes} bytes are stored, entries_max is {self.entries_max} and "
                f"bytes_max {self.bytes_max}: for {size_bytes} bytes more {len(victims)} would have to go, and the "
                f"queueing floor is {self.floor} entries; raise the budgets, or lower the floor"
            )
        for key in victims:
            self._drop(key)

    def take_due(self) -> list[bytes]:
        """The keys that are to be evicted now. One that was still under way is given by the first call that sees it
        stored: before that, the daemon has nothing to evict."""
        dropped, self._dropped = self._dropped, []
        due: list[bytes] = []
        for key, tracked in dropped:
            if tracked.is_under_way:
                self._dropped.append((key, tracked))
            elif tracked.is_stored:
                due.append(key)
        return due

    def check_invariants(self) -> None:
        """Asserts that the account is the sum of its entries, and within the budgets."""
        assert self.bytes == sum(tracked.size_bytes for tracked in self._tracked.values())
        assert self.bytes <= self.bytes_max and len(self._tracked) <= self.entries_max

    def _drop(self, key: bytes) -> None:
        self._dropped.append((key, self._tracked[key]))
        self.forget(key)

    def _victims(self, size_bytes: int) -> list[bytes]:
        """What has to go, in the order to go. Entries found to be gone already leave the account."""
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
        """Whether it is not, or no longer, stored by us. One on its way counts as ours."""
        return not tracked.is_under_way and not (tracked.is_stored and self._is_there(key))

"""The record of one device: its entries, their owners and orders, its current pass, and what was offloaded from it.

Owns the entries in the order of their last uses, the sums of each owner, and which entries may be ordered away now.
What is ordered away stays so until its owner acknowledges it, however late.

Invariants: `entries` is in the order of `used_at`. The sums of an owner are exactly those of its entries. An offloaded
entry is not registered, and its client is connected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ..reservations import FreeRoom
from ..tiers import Gauge

SLOW_S: Final = 1.0
"""An owner acknowledges at least each 256 MiB that it has copied, so it is rarely silent for so long."""


@dataclass(slots=True, eq=False)
class HeldEntry:
    """An entry that an owner keeps on a device, or has offloaded from it. `used_at`: of its last use; `not_before`:
    until then no order names it, nor asks for it back. `ordered`: it is ordered away, and that is not acknowledged."""

    key: bytes
    owner: Owner
    size_bytes: int
    tokens: int
    agent: str
    cost_ms: float
    uses: int
    used_at: float
    not_before: float = 0.0
    ordered: bool = False


@dataclass(slots=True, eq=False)
class Owner:
    """A client's entries on one device, with their sums, and those of the entries that are ordered away. `waits_since`:
    when it was sent the first of the open orders, or last acknowledged a part; `unresponsive`: it missed the deadline
    after that; `vain_until`: until then no pass takes its entries: the last one that did lowered nothing.
    """

    device: DeviceRecord
    client: int
    entries: int = 0
    size_bytes: int = 0
    tokens: int = 0
    ordered_entries: int = 0
    ordered_bytes: int = 0
    waits_since: float = 0.0
    unresponsive: bool = False
    vain_until: float = -math.inf

    def slow(self, now: float) -> bool:
        """Whether the owner acknowledges nothing for SLOW_S, as if it were stopped. Others do not wait for it."""
        return self.ordered_entries > 0 and now >= self.waits_since + SLOW_S

    def count(self, entry: HeldEntry, sign: int) -> None:
        """Adds an entry to the sums, or with -1 takes it out of them."""
        self.entries += sign
        self.size_bytes += sign * entry.size_bytes
        self.tokens += sign * entry.tokens

    def order(self, entry: HeldEntry) -> None:
        entry.ordered = True
        self.ordered_entries += 1
        self.ordered_bytes += entry.size_bytes

    def close(self, entry: HeldEntry, now: float) -> None:
        """The order for the entry is carried out, if there is one; the current pass waits for it no more."""
        if entry.ordered:
            entry.ordered = False
            self.ordered_entries -= 1
            self.ordered_bytes -= entry.size_bytes
            passed = self.device.current_pass
            if passed is not None and entry in passed.entries:
                passed.entries.remove(entry)
                passed.closed_at = now

    def own(self, keys: Iterable[bytes]) -> list[HeldEntry]:
        found = [self.device.entries.get(key) for key in keys]
        return [each for each in found if each is not None and each.owner is self]


@dataclass(slots=True, eq=False)
class Pass:
    """A pass whose orders are sent, and that is not settled. `entries`: those that it waits for; `closed_at`: when it
    began to wait for none. `lowers`: it is meant to lower the gauge. Below pressure a pass evicts idle entries whatever
    the gauge shows afterwards. `left_of`: the clients whose entries are gone. `worked`: drivers got bytes back since,
    or a reading that was begun after `began_at` showed less than the `used_bytes` before: memory that came back, and
    may have been taken since."""

    used_bytes: int
    lowers: bool
    began_at: float
    entries: set[HeldEntry]
    closed_at: float = 0.0
    left_of: set[int] = field(default_factory=set)
    worked: bool = False


class DeviceRecord:
    """State of one device. `stuck`: why another pass would be useless, by a gauge of `stuck_used_bytes`.
    `offloaded`: the remembered entries, the oldest first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[bytes, HeldEntry] = {}
        self.owners: dict[int, Owner] = {}
        self.offloaded: dict[bytes, HeldEntry] = {}
        self.current_pass: Pass | None = None
        self.stuck = ""
        self.stuck_used_bytes = 0

    def may_go(self, now: float) -> Iterator[HeldEntry]:
        """The entries that are resident, were not kept recently, and whose owners respond; least recently used
        first."""
        for entry in self.entries.values():
            if entry.not_before <= now and not entry.owner.unresponsive and not entry.ordered:
                yield entry

    def coming(self, now: float) -> list[HeldEntry]:
        """The entries that were asked back, and are not registered yet. They count as used until `retry_s` have
        passed."""
        return [each for each in self.offloaded.values() if each.not_before > now]

    def leave_slow_owners(self, now: float) -> None:
        """Takes the entries of slow owners out of the current pass, which then ends without them."""
        passed = self.current_pass
        if passed is not None and (slow := {entry for entry in passed.entries if entry.owner.slow(now)}):
            passed.entries -= slow
            passed.closed_at = max(passed.closed_at, *(entry.owner.waits_since + SLOW_S for entry in slow))

    @property
    def held_bytes(self) -> int:
        return sum(owner.size_bytes for owner in self.owners.values())

    @property
    def staying_bytes(self) -> int:
        """The bytes of the entries that are not ordered away."""
        return self.held_bytes - sum(owner.ordered_bytes for owner in self.owners.values())

    @property
    def staying_entries(self) -> int:
        return len(self.entries) - sum(owner.ordered_entries for owner in self.owners.values())

    def going_bytes(self, now: float) -> int:
        """Bytes that are ordered away from owners that are not slow."""
        return sum(owner.ordered_bytes for owner in self.owners.values() if not owner.slow(now))

    def room(self, gauge: Gauge, now: float) -> FreeRoom:
        silent = {owner for owner in self.owners.values() if owner.unresponsive or owner.slow(now)}
        # Owners that do not answer say nothing of their use.
        pinned = (
            entry.size_bytes
            for entry in self.entries.values()
            if entry.not_before > now and not entry.ordered and entry.owner not in silent
        )
        return FreeRoom(
            gauge.sample.total_bytes,
            gauge.free_bytes,
            gauge.calm_bytes - sum(entry.size_bytes for entry in self.coming(now)),
            cached_bytes=self.held_bytes,
            pinned_bytes=sum(pinned),
            leaving_bytes=self.going_bytes(now),
            silent_bytes=sum(owner.size_bytes for owner in silent),
        )

    def check_invariants(self) -> None:
        entries = self.entries.values()
        used_at = [entry.used_at for entry in entries]
        assert used_at == sorted(used_at), "not in the order of the last uses"
        for owner in self.owners.values():
            own = [entry for entry in entries if entry.owner is owner]
            sums = len(own), sum(entry.size_bytes for entry in own), sum(entry.tokens for entry in own)
            assert (owner.entries, owner.size_bytes, owner.tokens) == sums, "an owner's entries were miscounted"
            ordered = [entry.size_bytes for entry in own if entry.ordered]
            assert (owner.ordered_entries, owner.ordered_bytes) == (len(ordered), sum(ordered))
        if self.current_pass is not None:
            assert all(entry.ordered for entry in self.current_pass.entries), "a pass waits for what is not ordered"
        assert sum(owner.entries for owner in self.owners.values()) == len(entries), "an entry without an owner"
        assert not self.offloaded.keys() & self.entries.keys(), "an entry is remembered and registered"
        assert all(entry.owner.client in self.owners for entry in self.offloaded.values())

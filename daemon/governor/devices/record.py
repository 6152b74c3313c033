"""The record of one device: its entries, their owners, and its current pass.

Owns the entries in the order of their last uses, the sums of each owner, and which entries may be ordered away now.
Does not own what is ordered (passes), the orders themselves (orders), or promotion.

Invariants: `entries` is in the order of `used_at`. The sums of an owner are exactly those of its entries; those of the
device are the sums of its owners.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, Literal, NamedTuple

from .circumstances import Circumstances

STUCK_FALL: Final = 0.01
"""A device is no longer stuck once its gauge has fallen by this share of the total."""
_RETURNS_MAX: Final = 1024
SLOW_S: Final = 1.0
"""An owner acknowledges at least each 256 MiB that it has copied, so it is rarely silent for so long."""
WAITING_RETRY_S: Final = 1.0
"""While a reservation waits, an entry that was in use is ordered again after so long, if that is less than retry_s."""


class Sums(NamedTuple):
    """The sums of some entries."""

    entries: int = 0
    bytes: int = 0
    tokens: int = 0

    def plus(self, other: Sums) -> Sums:
        """The sums with these added."""
        return Sums(self.entries + other.entries, self.bytes + other.bytes, self.tokens + other.tokens)

    def minus(self, other: Sums) -> Sums:
        """The sums without these; negative where there are more."""
        return Sums(self.entries - other.entries, self.bytes - other.bytes, self.tokens - other.tokens)


@dataclass(slots=True, eq=False)
class HeldEntry:
    """An entry that an owner keeps on a device.

    `used_at`: of its last use; `not_before`: until then no order names it. `ordered`: it is ordered away, else it is
    resident. `order`: the last order that names it, also of a resident entry whose owner was late.
    """

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
    order: OpenOrder | None = None

    @property
    def sums(self) -> Sums:
        """Its share of the sums."""
        return Sums(1, self.size_bytes, self.tokens)


@dataclass(slots=True, eq=False)
class Owner:
    """A client's entries on one device, those `ordered` away among all that are `held`. `orders`: its open orders by
    number; `waits_since`: when it was sent the first of them, or last acknowledged a part; `unresponsive`: it missed a
    deadline and has sent nothing since.

    `vain_until`: until then no pass takes its entries: the last one that did lowered nothing."""

    device: DeviceRecord
    client: int
    held: Sums = field(default_factory=Sums)
    ordered: Sums = field(default_factory=Sums)
    orders: dict[int, OpenOrder] = field(default_factory=dict)
    waits_since: float = 0.0
    unresponsive: bool = False
    vain_until: float = -math.inf

    def slow(self, now: float) -> bool:
        """Whether the owner acknowledges nothing for SLOW_S, as if it were stopped. Others do not wait for it."""
        return bool(self.orders) and now >= self.waits_since + SLOW_S

    def silent(self, now: float) -> bool:
        """Whether the owner does not answer, or is slow."""
        return self.unresponsive or self.slow(now)

    def under_order(self, keys: Iterable[bytes]) -> list[HeldEntry]:
        """The owner's entries of these keys that an order names."""
        found = [self.device.entries.get(key) for key in keys]
        return [each for each in found if each is not None and each.owner is self and each.order is not None]


@dataclass(slots=True, eq=False)
class OpenOrder:
    """An order. `entries`: those that it names and that are not acknowledged, by key; `open`: neither done nor late."""

    number: int
    owner: Owner
    kind: Literal["offload", "drop"]
    entries: dict[bytes, HeldEntry]
    part_of: Pass | None
    open: bool = True


@dataclass(slots=True, eq=False)
class Pass:
    """A pass whose orders are sent, and that is not settled.

    `open_orders`: orders neither acknowledged nor late; `closed_at`: when the last of them was closed. `left`: entries
    that are gone, of the clients `left_of`; `freed_bytes`: bytes that drivers got back for them. `fell`: a reading that
    was begun after `began_at` showed less than the `used_bytes` before: memory that came back, and may have been taken
    since. `lowers`: the pass is meant to lower the gauge. Below pressure a pass
    evicts idle entries whatever the gauge shows afterwards.
    """

    used_bytes: int
    lowers: bool
    began_at: float
    open_orders: int = 0
    closed_at: float = 0.0
    left: int = 0
    left_of: set[int] = field(default_factory=set)
    freed_bytes: int = 0
    fell: bool = False

    def watch(self, circumstances: Circumstances) -> None:
        """Takes a sample that came while the pass was not over, or the one that ends it."""
        if circumstances.began_at > self.began_at and circumstances.used_bytes < self.used_bytes:
            self.fell = True

    def over(self, circumstances: Circumstances) -> bool:
        """Whether the sample can show the whole effect of the pass."""
        return self.open_orders == 0 and circumstances.began_at > self.closed_at

    def why_stuck(self, circumstances: Circumstances) -> str:
        """Why another pass would be useless: entries left, and the gauge did not fall. Empty otherwise."""
        if not self.lowers or not self.left or self.freed_bytes or self.fell:
            return ""
        return (
            f"{self.left} entries left in the last pass, and {circumstances.used_bytes} bytes are still used "
            f"({self.used_bytes} before): their owners returned nothing to the driver, and are left alone for a while"
        )


class DeviceRecord:
    """State to read. Changes of a device's entries go through Devices."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[bytes, HeldEntry] = {}
        self.owners: dict[int, Owner] = {}
        self.current_pass: Pass | None = None
        self.stuck = ""
        self._stuck_used_bytes = 0
        self._freed: deque[tuple[float, int]] = deque(maxlen=_RETURNS_MAX)

    @property
    def held(self) -> Sums:
        """The sums of all entries."""
        return _total(owner.held for owner in self.owners.values())

    @property
    def ordered(self) -> Sums:
        """The sums of the entries that are ordered away."""
        return _total(owner.ordered for owner in self.owners.values())

    # ---- entries

    def add(self, entry: HeldEntry) -> None:
        """Adds an entry that was used now."""
        self.entries[entry.key] = entry
        entry.owner.held = entry.owner.held.plus(entry.sums)

    def use(self, entry: HeldEntry, now: float) -> None:
        """Counts a use."""
        entry.uses += 1
        entry.used_at = now
        del self.entries[entry.key]
        self.entries[entry.key] = entry

    def order(self, entry: HeldEntry, order: OpenOrder) -> None:
        """Marks a resident entry as ordered away."""
        entry.ordered, entry.order = True, order
        entry.owner.ordered = entry.owner.ordered.plus(entry.sums)

    def take_back(self, entry: HeldEntry, not_before: float) -> None:
        """Makes an entry resident, if it was ordered away; it is not ordered before `not_before`."""
        if entry.ordered:
            entry.ordered = False
            entry.owner.ordered = entry.owner.ordered.minus(entry.sums)
        entry.not_before = not_before

    def remove(self, entry: HeldEntry) -> None:
        """Removes an entry that no order names any more."""
        self.take_back(entry, 0.0)
        del self.entries[entry.key]
        entry.owner.held = entry.owner.held.minus(entry.sums)

    def may_go(self, now: float) -> Iterator[HeldEntry]:
        """The entries that are resident, were not kept recently, and whose owners respond; least recently used
        first."""
        for entry in self.entries.values():
            if not entry.ordered and entry.not_before <= now and not entry.owner.unresponsive:
                yield entry

    def may_go_soon(self, now: float, *, retry_s: float, waiting: bool) -> Iterator[HeldEntry]:
        """As `may_go`, without the entries that a pass would choose in vain: those of slow owners, and of owners that
        returned nothing lately. `waiting`: a reservation waits, so entries that were kept are tried earlier than after
        `retry_s`."""
        vain = {owner for owner in self.owners.values() if owner.slow(now) or now < owner.vain_until}
        until = now + max(0.0, retry_s - WAITING_RETRY_S) if waiting else now
        return (entry for entry in self.may_go(until) if entry.owner not in vain)

    # ---- memory

    def freed_by_driver(self, freed_bytes: int, now: float) -> None:
        """Records memory that drivers got back. Samples begun before do not show it."""
        if freed_bytes:
            self._freed.append((now, freed_bytes))

    def leaving_bytes(self, circumstances: Circumstances, now: float) -> int:
        """Bytes that the sample shows as used, and that are ordered away from owners that are not slow, or already
        freed."""
        unseen = sum(freed for at, freed in self._freed if at >= circumstances.began_at)
        return self.going_bytes(now) + unseen

    def going_bytes(self, now: float) -> int:
        """Bytes that are ordered away from owners that are not slow."""
        return sum(owner.ordered.bytes for owner in self.owners.values() if not owner.slow(now))

    def pinned_bytes(self, now: float) -> int:
        """Bytes of resident entries that their owners use. Owners that do not answer say nothing of their use."""
        silent = {owner for owner in self.owners.values() if owner.silent(now)}
        return sum(
            entry.size_bytes
            for entry in self.entries.values()
            if entry.not_before > now and not entry.ordered and entry.owner not in silent
        )

    def silent_bytes(self, now: float) -> int:
        """Bytes of the entries of owners that do not answer, or are slow, as if they were stopped."""
        return sum(owner.held.bytes for owner in self.owners.values() if owner.silent(now))

    # ---- passes

    def ask_all(self) -> None:
        """Passes may ask every owner again."""
        for owner in self.owners.values():
            owner.vain_until = -math.inf

    def settle(self, circumstances: Circumstances, now: float, retry_s: float) -> None:
        """Processes a sample: ends a pass that is over, and ends `stuck` if the sample shows a fall."""
        while self._freed and self._freed[0][0] < circumstances.began_at:
            self._freed.popleft()
        fall = STUCK_FALL * circumstances.total_bytes
        if self.stuck and circumstances.used_bytes <= self._stuck_used_bytes - fall:
            self.stuck = ""
            self.ask_all()
        if self.current_pass is None:
            return
        self.current_pass.watch(circumstances)
        if self.current_pass.over(circumstances):
            self._judge(self.current_pass, circumstances, now, retry_s)
            self.current_pass = None

    # ---- questions

    def status(self) -> dict[str, Any]:
        """The device for status, in plain values."""
        held, ordered = self.held, self.ordered
        return {
            "device": self.name,
            "entries": held.entries,
            "bytes": held.bytes,
            "tokens": held.tokens,
            "ordered_entries": ordered.entries,
            "ordered_bytes": ordered.bytes,
            "owners": len(self.owners),
            "stuck": self.stuck,
        }

    def owners_status(self) -> list[dict[str, Any]]:
        """Each owner for status, in plain values."""
        return [
            {
                "client": owner.client,
                "device": self.name,
                "entries": owner.held.entries,
                "bytes": owner.held.bytes,
                "ordered_entries": owner.ordered.entries,
                "unresponsive": owner.unresponsive,
            }
            for owner in self.owners.values()
        ]

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        entries: Collection[HeldEntry] = self.entries.values()
        assert all(entry.key == key for key, entry in self.entries.items())
        used_at = [entry.used_at for entry in entries]
        assert used_at == sorted(used_at), "not in the order of the last uses"
        for owner in self.owners.values():
            own = [entry for entry in entries if entry.owner is owner]
            assert owner.held == _total(entry.sums for entry in own), "an owner's entries were miscounted"
            assert owner.ordered == _total(entry.sums for entry in own if entry.ordered)
        assert self.held.entries == len(entries), "an entry without an owner"
        assert all(entry.order is not None for entry in entries if entry.ordered), "ordered away by no order"

    def _judge(self, ended: Pass, circumstances: Circumstances, now: float, retry_s: float) -> None:
        """A pass that was not meant to lower the gauge, or by which no entry left, shows nothing."""
        if not ended.lowers or not ended.left:
            return
        self.stuck = ended.why_stuck(circumstances)
        self._stuck_used_bytes = circumstances.used_bytes
        for client in ended.left_of if self.stuck else ():
            if client in self.owners:
                self.owners[client].vain_until = now + retry_s


def _total(sums: Iterable[Sums]) -> Sums:
    return reduce(Sums.plus, sums, Sums())

"""The record of one device: its table of entries, its owners, and its current pass.

Owns the owners' slots, and which rows may be ordered away now. Does not own what is ordered (passes), order numbers
(device_orders), or promotion.

Invariants: a slot has one owner at a time; every row that is not free belongs to a slot with an owner.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from .passes import STUCK_FALL, Circumstances, Distances, Pass
from .table import FREE, ORDERED, RESIDENT, Mask, Rows, Table, exact_sum

_AHEAD: Final = 4096
_HEAD: Final = 64
_RETURNS_MAX: Final = 1024
SLOW_S: Final = 1.0
"""An owner acknowledges at least each 256 MiB that it has copied, so it is rarely silent for so long."""
WAITING_RETRY_S: Final = 1.0
"""While a reservation waits, an entry that was in use is ordered again after so long, if that is less than retry_s. An
owner that returned nothing is asked again after so long, then after twice as long each time, up to retry_s."""


@dataclass(slots=True, eq=False)
class Owner:
    """A client's entries on one device. `orders`: its open orders; `waits_since`: when it was sent the first of them,
    or last acknowledged a part; `unresponsive`: it missed a deadline and has sent nothing since.

    `vain_at`: when a pass that took its entries and lowered nothing was last judged; `vain_s`: for how long from then
    on no pass takes its entries; 0 if it returned something since."""

    device: DeviceRecord
    client: int
    slot: int
    orders: set[int] = field(default_factory=set)
    waits_since: float = 0.0
    unresponsive: bool = False
    vain_at: float = -math.inf
    vain_s: float = 0.0

    def slow(self, now: float) -> bool:
        """Whether the owner acknowledges nothing for SLOW_S, as if it were stopped. Others do not wait for it."""
        return bool(self.orders) and now >= self.waits_since + SLOW_S

    def returned_nothing(self, now: float, most_s: float) -> None:
        """Records that a pass took its entries in vain."""
        self.vain_at, self.vain_s = now, min(max(2 * self.vain_s, WAITING_RETRY_S), most_s)


class ColdestRows:
    """The least recently used rows that may go, found in advance, so that a registration over budget need not rank the
    whole table.

    Rows that were used, ordered away or removed since are skipped; new rows are warmer than those listed. Only rows
    that may go *again* could be missed: the list ends when the first of them may (`thaw`).
    """

    def __init__(self) -> None:
        self._rows: Rows = np.zeros(0, np.int64)
        self._used_at = np.zeros(0, np.float64)
        self._thaws_at = -math.inf

    def thaw(self, at: float) -> None:
        """Records that from `at` on rows may go that may not go before; -inf: from now on."""
        self._thaws_at = min(self._thaws_at, at)

    def ahead(self, device: DeviceRecord, now: float) -> Iterator[Rows]:
        """The rows, coldest first: few, then more, finally all that may go. Each yield starts with the first row
        again."""
        stale = now >= self._thaws_at
        if not stale:
            for count in (_HEAD, len(self._rows)):
                self._pass_over(device, now, count)
                yield self._rows[:count]
        if not self._find(device, now, _AHEAD):
            yield self._rows
            self._find(device, now, len(device.table))
        yield self._rows

    def _pass_over(self, device: DeviceRecord, now: float, count: int) -> None:
        rows, used_at = self._rows[:count], self._used_at[:count]
        stay = device.may_go(rows, now) & (device.table.used_at[rows] == used_at)
        if not stay.all():
            self._rows = np.concatenate([rows[stay], self._rows[count:]])
            self._used_at = np.concatenate([used_at[stay], self._used_at[count:]])

    def _find(self, device: DeviceRecord, now: float, most: int) -> bool:
        table = device.table
        found = np.flatnonzero(device.may_go(slice(table.end), now))
        whole = len(found) <= most
        if not whole:
            found = found[np.argpartition(table.used_at[found], most)[:most]]
        self._rows = found[np.argsort(table.used_at[found], kind="stable")]
        self._used_at = table.used_at[self._rows]
        later = table.not_before[: table.end][table.state[: table.end] == RESIDENT]
        self._thaws_at = float(later[later > now].min(initial=math.inf))
        return whole


class DeviceRecord:
    """State to read. Changes of a device's rows go through Devices."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.table = Table()
        self.owners: dict[int, Owner] = {}
        self.distances = Distances()
        self.coldest = ColdestRows()
        self.current_pass: Pass | None = None
        self.stuck = ""
        self._stuck_used_bytes = 0
        self._slots: list[Owner | None] = []
        self._freed: deque[tuple[float, int]] = deque(maxlen=_RETURNS_MAX)

    def open(self, client: int) -> None:
        """Makes the client an owner here, if it is not one already."""
        if client in self.owners:
            return
        slot = next((slot for slot, owner in enumerate(self._slots) if owner is None), len(self._slots))
        owner = self.owners[client] = Owner(self, client, slot)
        self._slots[slot : slot + 1] = [owner]

    def close(self, client: int) -> None:
        """Ends the ownership of a client without rows."""
        self._slots[self.owners.pop(client).slot] = None

    def owner_of_slot(self, slot: int) -> Owner:
        """The owner of the rows with this slot."""
        owner = self._slots[slot]
        assert owner is not None
        return owner

    def may_go(self, rows: Rows | slice, now: float) -> Mask:
        """One bool for each row: it is resident, was not kept recently, and its owner responds."""
        table = self.table
        mask: Mask = (table.state[rows] == RESIDENT) & (table.not_before[rows] <= now)
        silent = [owner for owner in self.owners.values() if owner.unresponsive]
        return mask & ~self._owned_by(rows, silent) if silent else mask

    def may_go_soon(self, rows: Rows | slice, now: float, *, retry_s: float, waiting: bool) -> Mask:
        """As `may_go`, without the rows that a pass would choose in vain: those of slow owners, and of owners that
        returned nothing lately. `waiting`: a reservation waits, so both they and rows that were kept are tried earlier
        than after `retry_s`."""
        mask = self.may_go(rows, now + max(0.0, retry_s - WAITING_RETRY_S) if waiting else now)
        vain = [
            owner
            for owner in self.owners.values()
            if owner.slow(now) or now < owner.vain_at + owner.vain_s or (self.stuck and not waiting and owner.vain_s)
        ]
        return mask & ~self._owned_by(rows, vain) if vain else mask

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
        table, slow = self.table, self._slow(now)
        if not slow:
            return table.ordered_bytes
        every = slice(table.end)
        held = (table.state[every] == ORDERED) & self._owned_by(every, slow)
        return table.ordered_bytes - exact_sum(table.size_bytes[np.flatnonzero(held)])

    def pinned_bytes(self, now: float) -> int:
        """Bytes of resident entries that their owners use. Owners that do not answer say nothing of their use."""
        table, every = self.table, slice(self.table.end)
        pinned = (table.state[every] == RESIDENT) & (table.not_before[every] > now)
        return exact_sum(table.size_bytes[np.flatnonzero(pinned & ~self._owned_by(every, self._silent(now)))])

    def silent_bytes(self, now: float) -> int:
        """Bytes of the entries of owners that do not answer, or are slow, as if they were stopped."""
        return sum(self.table.owned(owner.slot).bytes for owner in self._silent(now))

    def settle(self, circumstances: Circumstances, now: float, retry_s: float) -> None:
        """Processes a sample: ends a pass that is over, and ends `stuck` if the sample shows a fall."""
        while self._freed and self._freed[0][0] < circumstances.began_at:
            self._freed.popleft()
        fall = STUCK_FALL * circumstances.total_bytes
        if self.stuck and circumstances.used_bytes <= self._stuck_used_bytes - fall:
            self.stuck = ""
        if self.current_pass is None:
            return
        self.current_pass.watch(circumstances)
        if self.current_pass.over(circumstances):
            self._judge(self.current_pass, circumstances, now, retry_s)
            self.current_pass = None

    def status(self) -> dict[str, Any]:
        """The device for status, in plain values."""
        table = self.table
        return {
            "device": self.name,
            "entries": len(table),
            "bytes": table.bytes,
            "tokens": table.all_tokens,
            "ordered_entries": table.ordered_entries,
            "ordered_bytes": table.ordered_bytes,
            "owners": len(self.owners),
            "stuck": self.stuck,
        }

    def owners_status(self) -> list[dict[str, Any]]:
        """Each owner for status, in plain values."""
        return [
            {
                "client": owner.client,
                "device": self.name,
                **asdict(self.table.owned(owner.slot)),
                "unresponsive": owner.unresponsive,
            }
            for owner in self.owners.values()
        ]

    def _judge(self, ended: Pass, circumstances: Circumstances, now: float, retry_s: float) -> None:
        """A pass that was not meant to lower the gauge, or by which no entry left, shows nothing."""
        if not ended.lowers or not ended.left:
            return
        self.stuck = ended.why_stuck(circumstances)
        self._stuck_used_bytes = circumstances.used_bytes
        for client in ended.left_of if self.stuck else ():
            if client in self.owners:
                self.owners[client].returned_nothing(now, retry_s)

    def _silent(self, now: float) -> list[Owner]:
        return [owner for owner in self.owners.values() if owner.unresponsive or owner.slow(now)]

    def _slow(self, now: float) -> list[Owner]:
        return [owner for owner in self.owners.values() if owner.slow(now)]

    def _owned_by(self, rows: Rows | slice, owners: list[Owner]) -> Mask:
        """One bool for each row: it is of one of these owners."""
        mask: Mask = np.isin(self.table.owner[rows], [owner.slot for owner in owners])
        return mask

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self.table.check_invariants()
        assert {o.slot: o for o in self.owners.values()} == {s: o for s, o in enumerate(self._slots) if o is not None}
        live = self.table.state[: self.table.end] != FREE
        slots = set(self.table.owner[: self.table.end][live].tolist())
        assert slots <= {owner.slot for owner in self.owners.values()}, "rows without an owner"

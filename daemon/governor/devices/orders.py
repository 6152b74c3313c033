"""Orders to owners: their numbers, their open keys, and the owners' deadlines.

Owns the order records, the queue of unsent orders, and the deadlines. Does not own the choice of entries, nor what
happens to acknowledged rows.

The orders of a large pass are made at once, in columns, and sent in slices: `send` sends a few. Entries of a late owner
are resident again and stay known under their order, so a late acknowledgement is accepted.

Invariants: numbers rise and are never used twice. An order is known while a row is under it. An owner has a deadline
while it has an open order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ....errors import UnknownOrder
from ....ipc.messages import control as messages
from ...claims.deadlines import Deadlines
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .copies import CopyRates
from .passes import Pass
from .record import SLOW_S, DeviceRecord, Owner
from .table import ORDERED, Rows, exact_sum, runs

_SLOTS_OF_16_BITS = 1 << 15


@dataclass(slots=True)
class OpenOrder:
    """An order. `rows`: the rows that it names, until it is sent; `count`: the rows under it; `open`: neither done nor
    late; `sent_at`: when it was sent, in the governor's seconds."""

    number: int
    device: DeviceRecord
    owner: Owner
    kind: Literal["offload", "drop"]
    reason: str
    rows: Rows | None
    count: int
    part_of: Pass | None
    open: bool = True
    sent_at: float = 0.0


class DeviceOrders:
    """The orders of all devices that still have rows."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, copies: CopyRates) -> None:
        self._limits = limits
        self._outbox = outbox
        self._copies = copies
        self._last = 0
        self._open: dict[int, OpenOrder] = {}
        self._unsent: deque[int] = deque()
        self._due: Deadlines[Owner] = Deadlines()

    def change_limits(self, limits: GovernorLimits) -> None:
        """Applies to later orders."""
        self._limits = limits

    @property
    def unsent(self) -> bool:
        """Whether `send` has an order to send."""
        return bool(self._unsent)

    def next_timer(self) -> float | None:
        """The deadline of the first owner."""
        return self._due.next_timer()

    def number(self) -> int:
        """The next number, for an order without an acknowledgement."""
        self._last += 1
        return self._last

    def order_away(
        self, device: DeviceRecord, rows: Rows, host_accepts: bool, reason: str, now: float, part_of: Pass | None = None
    ) -> None:
        """Orders resident rows away, each from its owner, as offload or drop."""
        if not len(rows):
            return
        table = device.table
        self.detach(device, rows, now)
        offload = self._copies.offloads(device.name, table, rows, host_accepts, now)
        groups = table.owner[rows].astype(np.int64) * 2 + ~offload
        if groups.max(initial=0) < 2 * _SLOTS_OF_16_BITS:
            groups = groups.astype(np.uint16)  # sorted by counting
        by_group = np.argsort(groups, kind="stable")
        rows, groups = rows[by_group], groups[by_group]
        bounds = [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
        numbers = np.zeros(len(rows), np.int64)
        turns: list[tuple[int, int]] = []
        begin = 0
        for end in bounds:
            owner = device.owner_of_slot(int(groups[begin]) // 2)
            kind: Literal["offload", "drop"] = "drop" if groups[begin] % 2 else "offload"
            if not owner.orders:
                owner.waits_since = now
                self._due.set(owner, now + self._limits.ack_s)
            for turn, at in enumerate(range(begin, end, self._limits.keys_per_request_max)):
                part = slice(at, min(at + self._limits.keys_per_request_max, end))
                number = self.number()
                numbers[part] = number
                turns.append((turn, number))
                owner.orders.add(number)
                self._open[number] = OpenOrder(number, device, owner, kind, reason, rows[part], part.stop - at, part_of)
            begin = end
        table.mark_ordered(rows, numbers)
        self._outbox.counters.ordered += len(rows)
        if part_of is not None:
            part_of.open_orders += len(turns)
            part_of.ordered += len(rows)
        # Every owner's first order is sent before any owner's second.
        self._unsent.extend(number for _, number in sorted(turns))

    def send(self, most: int, now: float) -> None:
        """Sends up to `most` orders to owners."""
        for _ in range(most):
            if not self._unsent:
                return
            order = self._open.get(self._unsent.popleft())
            if order is None or order.rows is None or not order.open:
                continue
            table = order.device.table
            order.sent_at = now
            rows, order.rows = order.rows[table.order[order.rows] == order.number], None
            size_bytes = exact_sum(table.size_bytes[rows])
            words = messages.Order(order.number, order.device.name, order.kind, table.keys[rows].tolist(), order.reason)
            self.send_order(order.owner.client, words, size_bytes)

    def send_order(self, client: int, order: messages.Order, size_bytes: int) -> None:
        """Sends one order, and announces it to watchers."""
        self._outbox.send(client, order)
        self._outbox.announce(
            "order",
            client=client,
            device=order.device,
            order=order.order,
            kind=order.kind,
            entries=len(order.keys),
            bytes=size_bytes,
            reason=order.reason,
        )

    def find(self, client: int, message: messages.AcknowledgeOrder) -> tuple[OpenOrder, Rows]:
        """The acknowledged order, and a row for each key: offloaded, dropped, kept.

        Raises:
            UnknownOrder: the order is not one to this client on this device; a key is not, or no longer, of the order;
                or bytes were freed without any key.
        """
        order = self._open.get(message.order)
        if order is None or order.owner.client != client or order.device.name != message.device:
            raise UnknownOrder(
                f"order {message.order} on {message.device!r} is not an open order to this client: "
                "acknowledge each order's entries once"
            )
        keys = [*message.offloaded, *message.dropped, *message.kept]
        rows = order.device.table.rows(keys)
        wrong = (rows < 0) | (order.device.table.order[rows] != order.number)
        if wrong.any():
            key = keys[int(wrong.argmax())]
            raise UnknownOrder(f"order {message.order} has no key {key.hex()} to acknowledge: name each key once")
        if message.freed_bytes and not keys:
            raise UnknownOrder(
                f"freed_bytes = {message.freed_bytes} for no key of order {message.order}: "
                "name the keys that they were freed for"
            )
        if len(runs(rows)) < len(rows):
            raise UnknownOrder(f"the acknowledgement of order {message.order} names a key twice: name each key once")
        return order, rows

    def extend_deadline(self, owner: Owner, now: float) -> None:
        """Restarts the deadline of an owner that acknowledged a part of its orders."""
        if owner.orders:
            owner.waits_since = now
            self._due.set(owner, now + self._limits.ack_s)

    def leave_slow_owners(self, device: DeviceRecord, now: float) -> None:
        """Takes the orders of slow owners out of the current pass, which then ends without them."""
        if device.current_pass is None:
            return
        for owner in device.owners.values():
            if not owner.slow(now):
                continue
            for number in owner.orders:
                part_of, self._open[number].part_of = self._open[number].part_of, None
                if part_of is not None:
                    part_of.open_orders -= 1
                    part_of.closed_at = max(part_of.closed_at, owner.waits_since + SLOW_S)

    def detach(self, device: DeviceRecord, rows: Rows, now: float) -> None:
        """Removes these rows from their orders, open or late."""
        numbers = device.table.order[rows]
        numbers = numbers[numbers > 0]
        for number, count in runs(numbers):
            order = self._open[number]
            order.count -= count
            if not order.count:
                self._close(order, now)
                del self._open[number]
        device.table.order[rows] = 0

    def pop_late_owner(self, now: float) -> tuple[Owner, Rows] | None:
        """One owner that missed its deadline, and its rows that are still ordered away. Its orders are no longer
        open."""
        owner = self._due.pop_due(now)
        if owner is None:
            return None
        for number in list(owner.orders):
            self._close(self._open[number], now)
        return owner, owner.device.table.where(owner=owner.slot, state=ORDERED)

    def check_invariants(self, devices: list[DeviceRecord]) -> None:
        """Asserts what the module's docstring promises."""
        under: dict[int, int] = {}
        for device in devices:
            table = device.table
            for number, count in runs(table.order[: table.end]):
                if number:
                    assert self._open[number].device is device
                    under[number] = count
            open_parts = [o for o in self._open.values() if o.open and o.device is device and o.part_of]
            assert all(o.part_of is device.current_pass for o in open_parts), "an open order of a pass that was settled"
            assert len(open_parts) == (device.current_pass.open_orders if device.current_pass else 0)
            for owner in device.owners.values():
                assert owner.orders == {n for n, o in self._open.items() if o.open and o.owner is owner}
                assert bool(owner.orders) == (owner in self._due)
                ordered = table.order[table.where(owner=owner.slot, state=ORDERED)].tolist()
                assert set(ordered) == owner.orders
        assert under == {number: order.count for number, order in self._open.items()}
        assert all(number <= self._last for number in self._open)
        assert len(self._due) == sum(bool(owner.orders) for device in devices for owner in device.owners.values())

    def _close(self, order: OpenOrder, now: float) -> None:
        if not order.open:
            return
        order.open = False
        order.owner.orders.discard(order.number)
        if not order.owner.orders:
            self._due.drop(order.owner)
        if order.part_of is not None:
            order.part_of.open_orders -= 1
            order.part_of.closed_at = max(order.part_of.closed_at, now)

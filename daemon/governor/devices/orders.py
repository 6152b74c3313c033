"""Orders to owners: their numbers, their open keys, and the owners' deadlines.

Owns the order records and the deadlines. Does not own the choice of entries, nor what happens to acknowledged entries.

Entries of a late owner are resident again and stay known under their order, so a late acknowledgement is accepted.

Invariants: numbers rise and are never used twice. An order is known while an entry is under it. An owner has a deadline
while it has an open order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ....ipc.messages import control as messages
from ...claims.deadlines import Deadlines
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .record import SLOW_S, DeviceRecord, HeldEntry, OpenOrder, Owner, Pass


class DeviceOrders:
    """The orders of all devices that still have entries."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self._last = 0
        self._open: dict[int, OpenOrder] = {}
        self._due: Deadlines[Owner] = Deadlines()

    def next_timer(self) -> float | None:
        """The deadline of the first owner."""
        return self._due.next_timer()

    def order_away(
        self,
        device: DeviceRecord,
        entries: Sequence[HeldEntry],
        host_accepts: bool,
        reason: str,
        now: float,
        part_of: Pass | None = None,
    ) -> None:
        """Orders resident entries away, each from its owner, as offload or drop. Every owner's first order is sent
        before any owner's second."""
        groups: dict[tuple[Owner, bool], list[HeldEntry]] = {}
        offloads = {entry for entry in entries if host_accepts and _is_worth_its_copy(entry, self._limits)}
        for entry in entries:
            self.detach(entry, now)
            groups.setdefault((entry.owner, entry in offloads), []).append(entry)
        most = self._limits.keys_per_request_max
        parts = [
            (turn, owner, offload, group[at : at + most])
            for (owner, offload), group in groups.items()
            for turn, at in enumerate(range(0, len(group), most))
        ]
        for _, owner, offload, part in sorted(parts, key=lambda each: each[0]):
            self._send(owner, "offload" if offload else "drop", part, reason, now, part_of)
        self._outbox.counters.ordered += len(entries)

    def promote(self, device: str, client: int, keys: list[bytes], size_bytes: int, reason: str) -> None:
        """Asks a client to bring entries back. There is no acknowledgement."""
        self._last += 1
        self._tell(client, messages.Order(self._last, device, "promote", keys, reason), size_bytes)

    def extend_deadline(self, owner: Owner, now: float) -> None:
        """Restarts the deadline of an owner that acknowledged a part of its orders."""
        if owner.orders:
            owner.waits_since = now
            self._due.set(owner, now + self._limits.ack_s)

    def leave_slow_owners(self, device: DeviceRecord, now: float) -> None:
        """Takes the orders of slow owners out of the current pass, which then ends without them."""
        for owner in device.owners.values():
            if not owner.slow(now):
                continue
            for order in owner.orders.values():
                part_of, order.part_of = order.part_of, None
                if part_of is not None:
                    part_of.open_orders -= 1
                    part_of.closed_at = max(part_of.closed_at, owner.waits_since + SLOW_S)

    def detach(self, entry: HeldEntry, now: float) -> None:
        """Removes an entry from its order, open or late."""
        order, entry.order = entry.order, None
        if order is None:
            return
        del order.entries[entry.key]
        if not order.entries:
            self._close(order, now)
            del self._open[order.number]

    def pop_late_owner(self, now: float) -> tuple[Owner, list[HeldEntry]] | None:
        """One owner that missed its deadline, and its entries that are still ordered away. Its orders are no longer
        open."""
        owner = self._due.pop_due(now)
        if owner is None:
            return None
        late = list(owner.orders.values())
        for order in late:
            self._close(order, now)
        return owner, [entry for order in late for entry in order.entries.values()]

    def check_invariants(self, devices: list[DeviceRecord]) -> None:
        """Asserts what the module's docstring promises."""
        under = [entry for device in devices for entry in device.entries.values() if entry.order is not None]
        assert sum(len(order.entries) for order in self._open.values()) == len(under)
        for entry in under:
            assert entry.order is not None and entry.order.entries[entry.key] is entry
            assert entry.order.open or not entry.ordered, "ordered away by an order that is late"
        for number, order in self._open.items():
            assert number == order.number <= self._last and order.entries
        for device in devices:
            open_parts = [o for o in self._open.values() if o.open and o.owner.device is device and o.part_of]
            assert all(o.part_of is device.current_pass for o in open_parts), "an open order of a pass that was settled"
            assert len(open_parts) == (device.current_pass.open_orders if device.current_pass else 0)
            for owner in device.owners.values():
                assert owner.orders == {n: o for n, o in self._open.items() if o.open and o.owner is owner}
                assert bool(owner.orders) == (owner in self._due)
        assert len(self._due) == sum(bool(owner.orders) for device in devices for owner in device.owners.values())

    def _send(
        self,
        owner: Owner,
        kind: Literal["offload", "drop"],
        entries: Sequence[HeldEntry],
        reason: str,
        now: float,
        part_of: Pass | None,
    ) -> None:
        if not owner.orders:
            owner.waits_since = now
            self._due.set(owner, now + self._limits.ack_s)
        self._last += 1
        by_key = {entry.key: entry for entry in entries}
        order = self._open[self._last] = OpenOrder(self._last, owner, kind, by_key, part_of)
        owner.orders[order.number] = order
        if part_of is not None:
            part_of.open_orders += 1
        for entry in entries:
            owner.device.order(entry, order)
        words = messages.Order(order.number, owner.device.name, kind, list(by_key), reason)
        self._tell(owner.client, words, sum(entry.size_bytes for entry in entries))

    def _tell(self, client: int, order: messages.Order, size_bytes: int) -> None:
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

    def _close(self, order: OpenOrder, now: float) -> None:
        if not order.open:
            return
        order.open = False
        owner = order.owner
        del owner.orders[order.number]
        if not owner.orders:
            self._due.drop(owner)
        if order.part_of is not None:
            order.part_of.open_orders -= 1
            order.part_of.closed_at = max(order.part_of.closed_at, now)


def _is_worth_its_copy(entry: HeldEntry, limits: GovernorLimits) -> bool:
    """Whether copying takes no longer than computing again. That takes the reported milliseconds; without them it is
    estimated from the tokens. An entry of which neither is known is worth its copy."""
    compute_s = entry.cost_ms / 1000 or entry.tokens * limits.compute_s_per_token
    return not compute_s or entry.size_bytes / limits.copy_bytes_per_s <= compute_s

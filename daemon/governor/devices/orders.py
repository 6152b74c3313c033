"""Orders to owners: their numbers, and their open keys.

Owns the orders. Does not own the choice of entries, nor what happens to acknowledged entries.

Entries of a late owner are resident again and stay known under their order, so a late acknowledgement is accepted.

Invariant: numbers rise and are never used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .choices import is_worth_its_copy
from .record import SLOW_S, DeviceRecord, HeldEntry, OpenOrder, Owner, Pass


class DeviceOrders:
    """The orders of all devices."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self._last = 0

    def order_away(
        self, entries: Sequence[HeldEntry], host_accepts: bool, reason: str, now: float, part_of: Pass | None = None
    ) -> None:
        """Orders resident entries away, each from its owner, as offload or drop. Every owner's first order is sent
        before any owner's second."""
        groups: dict[tuple[Owner, bool], list[HeldEntry]] = {}
        for entry in entries:
            self.detach(entry, now)
            offload = host_accepts and is_worth_its_copy(entry, self._limits)
            groups.setdefault((entry.owner, offload), []).append(entry)
        most = self._limits.keys_per_request_max
        parts = [
            (at, owner, offload, group[at : at + most])
            for (owner, offload), group in groups.items()
            for at in range(0, len(group), most)
        ]
        for _, owner, offload, part in sorted(parts, key=lambda each: each[0]):
            if not owner.orders:
                owner.waits_since = now
            by_key, size_bytes = {entry.key: entry for entry in part}, sum(entry.size_bytes for entry in part)
            number = self._send(owner, "offload" if offload else "drop", list(by_key), size_bytes, reason)
            order = owner.orders[number] = OpenOrder(number, owner, by_key, size_bytes, part_of)
            for entry in part:
                entry.order = order
        self._outbox.counters.ordered += len(entries)

    def promote(self, entries: Sequence[HeldEntry], reason: str, now: float) -> None:
        """Asks their owners to bring entries back. There is no acknowledgement."""
        wanted: dict[Owner, list[HeldEntry]] = {}
        for entry in entries:
            entry.not_before = now + self._limits.retry_s
            wanted.setdefault(entry.owner, []).append(entry)
        for owner, own in wanted.items():
            self._send(owner, "promote", [e.key for e in own], sum(e.size_bytes for e in own), reason)

    def leave_slow_owners(self, device: DeviceRecord, now: float) -> None:
        """Takes the orders of slow owners out of the current pass, which then ends without them."""
        for owner in device.owners.values():
            for order in owner.orders.values() if owner.slow(now) else ():
                part_of, order.part_of = order.part_of, None
                if part_of is not None:
                    part_of.closed_at = max(part_of.closed_at, owner.waits_since + SLOW_S)

    def detach(self, entry: HeldEntry, now: float) -> None:
        """Removes an entry from its order, open or late."""
        order, entry.order = entry.order, None
        if order is not None:
            del order.entries[entry.key]
            order.size_bytes -= entry.size_bytes
            if not order.entries:
                self._close(order, now)

    def close_late(self, owner: Owner, now: float) -> list[HeldEntry]:
        """The orders of an owner that missed its deadline are no longer open. Returns the entries of these."""
        late = list(owner.orders.values())
        for order in late:
            self._close(order, now)
        return [entry for order in late for entry in order.entries.values()]

    def check_invariants(self, device: DeviceRecord) -> None:
        """Asserts what the module's docstring promises."""
        for entry in device.entries.values():
            assert entry.order is None or entry.order.entries[entry.key] is entry
        for owner in device.owners.values():
            for number, order in owner.orders.items():
                assert number == order.number <= self._last and order.owner is owner
                assert order.open and order.entries and order.part_of in (None, device.current_pass)
                assert order.size_bytes == sum(entry.size_bytes for entry in order.entries.values())
                assert all(device.entries[key].order is order for key in order.entries)

    def _send(
        self,
        owner: Owner,
        kind: Literal["offload", "drop", "promote"],
        keys: list[bytes],
        size_bytes: int,
        reason: str,
    ) -> int:
        """Sends one order, and announces it to watchers. Returns its number."""
        self._last += 1
        number, client, device = self._last, owner.client, owner.device.name
        self._outbox.send(client, messages.Order(number, device, kind, keys, reason))
        about = {"kind": kind, "entries": len(keys), "bytes": size_bytes, "reason": reason}
        self._outbox.announce("order", client=client, device=device, order=number, **about)
        return number

    def _close(self, order: OpenOrder, now: float) -> None:
        if not order.open:
            return
        order.open = False
        del order.owner.orders[order.number]
        if order.part_of is not None:
            order.part_of.closed_at = max(order.part_of.closed_at, now)

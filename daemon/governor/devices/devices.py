"""The registry of the device tier: the entries of all owners, the orders to evict them, and the acknowledgements.

Owns devices, their tables, orders and acknowledgements, promotion. Does not own the course of a pass (device_passes),
modes, workflows, reservations or queueing: the governor passes a device's `Circumstances` with each sample and request.

    registered ──→ resident ──order──→ ordered ──acknowledged──→ gone (offloaded: remembered)
                       ↑                  │
                       └─── kept, late ───┘

Invariants: registered == resident + offloaded + dropped + released + gone_with_owner. A refused request changes
nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ....errors import LimitReached, NoGauge, OwnedElsewhere, UnderPressure
from ....ipc.messages import control as messages
from ..demand.workflows import Workflows
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from ..reservations.queue import FreeRoom
from . import passes
from . import room as device_room
from .acknowledgement import carry_out, take_back
from .copies import KINDS, CopyRates
from .course import DevicePasses
from .orders import DeviceOrders
from .passes import Circumstances, Outlook, PassPlan
from .promotion import Promotions
from .ranking import at_once
from .record import DeviceRecord, Owner
from .table import Rows, runs

__all__ = ["Circumstances", "Devices", "Outlook", "PassPlan"]

ORDERS_A_SLICE: Final = 4
"""Orders sent at a time, of keys_per_request_max keys each."""


class Devices:
    """Every device that a client has opened."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, outlook: Outlook) -> None:
        self._limits = limits
        self._outbox = outbox
        self._devices: dict[str, DeviceRecord] = {}
        self.copies = CopyRates(limits)
        self._orders = DeviceOrders(limits, outbox, self.copies)
        self._passes = DevicePasses(limits, outbox, self._orders, outlook)
        self._promotions = Promotions(limits, outlook)
        self._now = 0.0

    @property
    def remembered(self) -> int:
        """The number of offloaded entries that may be promoted."""
        return len(self._promotions.remembered)

    def change_limits(self, limits: GovernorLimits) -> None:
        """Applies from now on."""
        self._limits = limits
        self._orders.change_limits(limits)
        self._passes.change_limits(limits)
        self.copies.change_limits(limits)

    # ---- clients

    def open(self, client: int, device: str) -> None:
        """Lets the client register entries on a device.

        Raises:
            LimitReached: as many devices as may be are open; the text names the limit.
        """
        known = self._devices.get(device)
        if known is None:
            if len(self._devices) >= self._limits.devices_max:
                raise LimitReached(
                    f"{len(self._devices)} devices are open, and {self._limits.devices_max} may be (a fixed limit): "
                    f"{device!r} would be one more; close one that is not needed"
                )
            known = self._devices[device] = DeviceRecord(device)
            self._promotions.opened(device)
        known.open(client)

    def is_open(self, client: int, device: str) -> bool:
        """Whether the client may register entries on the device, and so may report about it."""
        return self._owner(client, device) is not None

    def register(
        self, client: int, message: messages.RegisterEntry, circumstances: Circumstances, now: float
    ) -> messages.Registered:
        """Registers a new entry, or a new version of a registered one. Other entries may be ordered away for it.

        Raises:
            NoGauge: the client has not opened the device.
            OwnedElsewhere: another client has registered the key on the device.
            UnderPressure: the device accepts no new entries.
            DeviceFull: a budget would be exceeded even after evicting every entry that may go.
            BelowFloor: only entries that the queueing floor protects could go.
        """
        self._now = now
        device = self._devices.get(message.device)
        owner = device.owners.get(client) if device else None
        if device is None or owner is None:
            raise NoGauge(
                f"device {message.device!r} was not opened by this client: open it before registering entries"
            )
        table = device.table
        row = table.find(message.key)
        if row is not None and table.owner[row] != owner.slot:
            other = device.owner_of_slot(int(table.owner[row])).client
            raise OwnedElsewhere(self._outbox.owned_elsewhere(other, message.key, device.name))
        if row is None and circumstances.refuses:
            raise UnderPressure(circumstances.refuses)
        rows = device_room.victims(device, row, message, circumstances, self._limits, now)
        # The owner drops the entries that the host does not accept.
        self._orders.order_away(device, rows, circumstances.host_accepts, "budget", now)
        self._orders.send(ORDERS_A_SLICE, self._now)
        self._mark_responsive(owner)
        if row is None:
            self._add(device, owner, message, now)
        else:
            kind = KINDS.index(message.kind)
            table.replace(row, message.size_bytes, message.tokens, message.agent, message.cost_ms, kind)
            table.use(np.array([row]), now)
            self._outbox.counters.renewed += 1
        return messages.Registered(message.id, renewed=row is not None)

    def use(self, client: int, message: messages.UseEntries, now: float) -> None:
        """Counts one use for each time that a key is listed. Keys that are not the client's are ignored."""
        self._now = now
        owner = self._owner(client, message.device)
        if owner is None:
            return
        table = owner.device.table
        rows = table.rows(message.keys)
        used = rows[(rows >= 0) & (table.owner[rows] == owner.slot)]
        table.use(used, now)
        self._outbox.counters.used += len(used)
        self._mark_responsive(owner)

    def release(self, client: int, message: messages.ReleaseEntries, now: float) -> int:
        """Removes entries that the client deleted. Returns how many of them were registered by it."""
        self._now = now
        owner = self._owner(client, message.device)
        if owner is None:
            return 0
        table = owner.device.table
        self._promotions.released(message.device, client, message.keys)
        rows = np.array([row for row, _ in runs(table.rows(message.keys))], np.int64)
        rows = rows[(rows >= 0) & (table.owner[rows] == owner.slot)]
        self._remove(owner.device, rows, now)
        self._outbox.counters.released += len(rows)
        self._mark_responsive(owner)
        return len(rows)

    def acknowledge(self, client: int, message: messages.AcknowledgeOrder, now: float) -> None:
        """Processes an owner's acknowledgement of an order, even a late one.

        Raises:
            UnknownOrder: the order, or one of the keys, is not the client's.
        """
        self._now = now
        order, rows = self._orders.find(client, message)
        kept_until = now + self._limits.retry_s
        carry_out(order, rows, message, self._orders, self._promotions, self.copies, self._outbox, kept_until, now)
        self._mark_responsive(order.owner)
        if len(rows):
            self._orders.extend_deadline(order.owner, now)

    def client_left(self, client: int, now: float) -> None:
        """Removes the client's entries, which ended with it."""
        self._now = now
        for device in list(self._devices.values()):
            owner = device.owners.get(client)
            if owner is None:
                continue
            rows = device.table.where(owner=owner.slot)
            self._remove(device, rows, now)
            self._outbox.counters.gone_with_owner += len(rows)
            device.close(client)
            if not device.owners:
                del self._devices[device.name]
                self._promotions.closed(device.name)
                self.copies.closed(device.name)
        self._promotions.remembered.client_left(client)

    # ---- gauges

    def sampled(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Processes a new sample of a device: the current pass may end, the next one begin, and entries may be
        promoted."""
        self._now = now
        device = self._devices.get(name)
        if device is None:
            return
        self._passes.settle(device, circumstances, now)
        self._passes.begin(device, circumstances, now)
        self._promote(device, circumstances, now)
        self._orders.send(ORDERS_A_SLICE, self._now)

    def make_room(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Begins a pass for a waiting reservation, without a new sample."""
        self._now = now
        device = self._devices.get(name)
        if device is not None and circumstances.wanted_bytes:
            self._passes.ask_again(device)
            self._passes.begin(device, circumstances, now)
            self._orders.send(ORDERS_A_SLICE, self._now)

    def room(self, name: str, circumstances: Circumstances, now: float) -> FreeRoom:
        """A device's memory, for a reservation."""
        coming_bytes = self._promotions.coming_bytes(name, now)
        return device_room.room(self._devices.get(name), circumstances, coming_bytes, self._limits, now)

    def held_bytes(self, name: str) -> int:
        """The bytes of a device's entries."""
        device = self._devices.get(name)
        return 0 if device is None else device.table.bytes

    def size_bytes(self, name: str, key: bytes) -> int:
        """The bytes of an entry; 0 if the key is not registered."""
        device = self._devices.get(name)
        row = None if device is None else device.table.find(key)
        return 0 if device is None or row is None else int(device.table.size_bytes[row])

    def is_passing(self, name: str) -> bool:
        """Whether a pass over a device's entries is under way."""
        device = self._devices.get(name)
        return device is not None and device.current_pass is not None

    def mode_changed(self, name: str, now: float) -> None:
        """Ends `stuck`: the next pass is of another kind, and repeats nothing."""
        device = self._devices.get(name)
        if device is not None:
            self._passes.mode_changed(device)

    def gauge_gone(self, name: str, now: float) -> None:
        """The device's fill level is unknown from now on. Orders stay in force."""
        self.mode_changed(name, now)

    def plan(self, name: str, circumstances: Circumstances, now: float) -> PassPlan:
        """What a pass would order now. Changes nothing."""
        device = self._devices.get(name)
        if device is None:
            return PassPlan()
        rows = at_once(self._passes.choose(device, circumstances, now))
        offload = self.copies.offloads(name, device.table, rows, circumstances.host_accepts, now)
        return passes.plan_of(device.table, rows, offload)

    def concerned_by(self, workflows: Workflows) -> set[str]:
        """The devices whose entries the workflows' steps may rank: open by a workflow's client, or with entries of its
        agents, resident or offloaded."""
        remembered = self._promotions.remembered
        return {
            name
            for name, device in self._devices.items()
            if workflows.concerns(device.owners, device.table.agents.known() | remembered.agents(name))
        }

    # ---- time

    def next_timer(self) -> float | None:
        """When `tick` is due: at once while orders wait to be sent."""
        return self._now if self._passes.unfinished or self._orders.unsent else self._orders.next_timer()

    def tick(self, now: float) -> None:
        """Sends the next orders, continues a pass, and processes missed deadlines."""
        self._now = now
        if self._passes.unfinished:
            self._passes.go_on(now)
            self._orders.send(1, self._now)
        else:
            self._orders.send(ORDERS_A_SLICE, self._now)
        while late := self._orders.pop_late_owner(now):
            owner, rows = late
            take_back(owner, rows, self._outbox, now + self._limits.retry_s)

    # ---- questions

    def status(self) -> list[dict[str, Any]]:
        """One row for each device."""
        rates = self.copies
        return [
            {**device.status(), "copy_bytes_per_s": round(rates.bytes_per_s(device.name, self._now))}
            for device in self._devices.values()
        ]

    def owners(self) -> list[dict[str, Any]]:
        """One row for each owner and device."""
        clients = self._outbox.clients
        rows = [row for device in self._devices.values() for row in device.owners_status()]
        return [
            {**row, "name": clients[row["client"]].name, "pid": clients[row["client"]].pid}
            for row in rows
            if row["client"] in clients
        ]

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        for device in self._devices.values():
            device.check_invariants()
        self._orders.check_invariants(list(self._devices.values()))
        self._promotions.check_invariants(self._devices)
        self.copies.check_invariants(set(self._devices))
        count = self._outbox.counters
        resident = sum(len(device.table) for device in self._devices.values())
        gone = count.offloaded + count.dropped + count.released + count.gone_with_owner
        assert count.registered == resident + gone, "entries were lost, or counted twice"
        assert count.promoted <= count.registered

    def _owner(self, client: int, device: str) -> Owner | None:
        known = self._devices.get(device)
        return known.owners.get(client) if known else None

    def _mark_responsive(self, owner: Owner) -> None:
        """Records that the owner responds."""
        if owner.unresponsive:
            owner.unresponsive = False
            owner.device.coldest.thaw(self._now)
            self._outbox.announce("owner", client=owner.client, device=owner.device.name, unresponsive=False)

    def _add(self, device: DeviceRecord, owner: Owner, message: messages.RegisterEntry, now: float) -> None:
        counters = self._outbox.counters
        uses = max(1, message.uses)
        trace = self._promotions.registered(device.name, message.key)
        if trace is not None:
            uses = max(trace.uses + 1, message.uses)
            counters.promoted += 1
        sizes = message.size_bytes, message.tokens
        kind = KINDS.index(message.kind)
        device.table.add(message.key, owner.slot, *sizes, message.agent, uses, now, message.cost_ms, kind)
        counters.registered += 1
        self._passes.clear_stuck(device)

    def _remove(self, device: DeviceRecord, rows: Rows, now: float) -> None:
        self._orders.detach(device, rows, now)
        device.table.remove(rows)

    def _promote(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        for client, entries in self._promotions.take(device, circumstances, self._limits, now).items():
            keys = [key for key, _ in entries]
            order = messages.Order(self._orders.number(), device.name, "promote", keys, circumstances.mode.value)
            self._orders.send_order(client, order, sum(trace.size_bytes for _, trace in entries))

"""The registry of the device tier: the entries of all owners, the orders to evict them, and the acknowledgements.

Owns devices and their entries, and what becomes of an entry that an owner acknowledges, or does not. Does not own the
choice of a pass (passes), the records of orders (orders), modes, workflows, reservations or queueing: the governor
passes a device's `Circumstances` with each sample and request.

    registered ──→ resident ──order──→ ordered ──acknowledged──→ gone (offloaded: remembered)
                       ↑                  │
                       └─── kept, late ───┘

Invariants: registered == resident + offloaded + dropped + released + gone_with_owner. A refused request changes
nothing.
"""

from __future__ import annotations

import math
from typing import Any

from ....errors import LimitReached, NoGauge, OwnedElsewhere, UnderPressure, UnknownOrder
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from ..reservations.queue import FreeRoom
from ..workflows import Workflows
from . import room as device_room
from .circumstances import Circumstances
from .orders import DeviceOrders
from .passes import DevicePasses, Outlook
from .promotion import Promotions
from .record import DeviceRecord, HeldEntry, Owner


class Devices:
    """Every device that a client has opened."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, outlook: Outlook) -> None:
        self._limits = limits
        self._outbox = outbox
        self._devices: dict[str, DeviceRecord] = {}
        self._orders = DeviceOrders(limits, outbox)
        self._passes = DevicePasses(limits, outbox, self._orders, outlook)
        self._promotions = Promotions(limits, outlook)

    @property
    def remembered(self) -> int:
        """The number of offloaded entries that may be promoted."""
        return len(self._promotions)

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
        if client not in known.owners:
            known.owners[client] = Owner(known, client)

    def is_open(self, client: int, device: str) -> bool:
        """Whether the client may register entries on the device, and so may report about it."""
        return self._owner(client, device) is not None

    def register(
        self, client: int, message: messages.RegisterEntry, circumstances: Circumstances, now: float
    ) -> messages.Registered:
        """Registers a new entry. Other entries may be ordered away for it. Of a registered one it is a use.

        Raises:
            NoGauge: the client has not opened the device.
            OwnedElsewhere: another client has registered the key on the device.
            UnderPressure: the device accepts no new entries.
            DeviceFull: a budget would be exceeded even after evicting every entry that may go.
            BelowFloor: only entries that the queueing floor protects could go.
        """
        owner = self._owner(client, message.device)
        if owner is None:
            raise NoGauge(
                f"device {message.device!r} was not opened by this client: open it before registering entries"
            )
        device = owner.device
        entry = device.entries.get(message.key)
        if entry is not None and entry.owner is not owner:
            raise OwnedElsewhere(self._outbox.owned_elsewhere(entry.owner.client, message.key, device.name))
        if entry is not None:
            self._use(entry, now)
        elif circumstances.refuses:
            raise UnderPressure(circumstances.refuses)
        else:
            victims = device_room.victims(device, message, circumstances, self._limits, now)
            # The owner drops the entries that the host does not accept.
            self._orders.order_away(device, victims, circumstances.host_accepts, "budget", now)
            self._add(device, owner, message, now)
        self._mark_responsive(owner)
        return messages.Registered(message.id)

    def use(self, client: int, message: messages.UseEntries, now: float) -> None:
        """Counts one use for each time that a key is listed. Keys that are not the client's are ignored."""
        owner = self._owner(client, message.device)
        if owner is None:
            return
        for key in message.keys:
            entry = owner.device.entries.get(key)
            if entry is not None and entry.owner is owner:
                self._use(entry, now)
        self._mark_responsive(owner)

    def release(self, client: int, message: messages.ReleaseEntries, now: float) -> int:
        """Removes entries that the client deleted. Returns how many of them were registered by it."""
        owner = self._owner(client, message.device)
        if owner is None:
            return 0
        self._promotions.released(message.device, client, message.keys)
        entries = owner.device.entries
        released = [entries[key] for key in dict.fromkeys(message.keys) if key in entries]
        released = [entry for entry in released if entry.owner is owner]
        self._remove(owner.device, released, now)
        self._outbox.counters.released += len(released)
        self._mark_responsive(owner)
        return len(released)

    def acknowledge(self, client: int, message: messages.AcknowledgeOrder, now: float) -> None:
        """Processes an owner's acknowledgement of an order, even a late one. Keys that are not ordered from it are
        ignored: it has released or registered them anew meanwhile.

        Raises:
            UnknownOrder: none of the keys is ordered from the client.
        """
        owner, counters = self._owner(client, message.device), self._outbox.counters
        under = [
            dict.fromkeys([] if owner is None else owner.under_order(keys))
            for keys in (message.offloaded, message.dropped, message.kept)
        ]
        offloaded, gone = under[0], under[0] | under[1]
        kept = [entry for entry in under[2] if entry not in gone]
        order = next((entry.order for entry in [*gone, *kept]), None)
        if owner is None or order is None:
            raise UnknownOrder(
                f"order {message.order} on {message.device!r} has no such key of this client: acknowledge each once"
            )
        device = owner.device
        offloaded_bytes = sum(entry.size_bytes for entry in offloaded)
        counters.offloaded += len(offloaded)
        counters.offloaded_bytes += offloaded_bytes
        counters.dropped += len(gone) - len(offloaded)
        counters.dropped_bytes += sum(entry.size_bytes for entry in gone) - offloaded_bytes
        counters.kept += len(kept)
        counters.freed_bytes += message.freed_bytes
        if order.part_of is not None:
            order.part_of.left += len(gone)
            order.part_of.freed_bytes += message.freed_bytes
            if gone:
                order.part_of.left_of.add(client)
        device.freed_by_driver(message.freed_bytes, now)
        if message.freed_bytes:
            owner.vain_until = -math.inf
        self._promotions.offloaded(device.name, offloaded)
        self._remove(device, list(gone), now)
        for entry in kept:  # in use
            self._orders.detach(entry, now)
            device.take_back(entry, now + self._limits.retry_s)
        self._mark_responsive(owner)
        self._orders.extend_deadline(owner, now)

    def client_left(self, client: int, now: float) -> None:
        """Removes the client's entries, which ended with it."""
        for device in list(self._devices.values()):
            owner = device.owners.get(client)
            if owner is None:
                continue
            own = [entry for entry in device.entries.values() if entry.owner is owner]
            self._remove(device, own, now)
            self._outbox.counters.gone_with_owner += len(own)
            del device.owners[client]
            if not device.owners:
                del self._devices[device.name]
                self._promotions.closed(device.name)
        self._promotions.client_left(client)

    # ---- gauges

    def sampled(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Processes a new sample of a device: the current pass may end, the next one begin, and entries may be
        promoted."""
        device = self._devices.get(name)
        if device is None:
            return
        self._passes.settle(device, circumstances, now)
        self._passes.begin(device, circumstances, now)
        for client, wanted in self._promotions.take(device, circumstances, self._limits, now).items():
            keys, size_bytes = [entry.key for entry in wanted], sum(entry.size_bytes for entry in wanted)
            self._orders.promote(device.name, client, keys, size_bytes, circumstances.mode.value)

    def make_room(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Begins a pass for a waiting reservation, without a new sample."""
        device = self._devices.get(name)
        if device is not None and circumstances.wanted_bytes:
            self._passes.begin(device, circumstances, now)

    def room(self, name: str, circumstances: Circumstances, now: float) -> FreeRoom:
        """A device's memory, for a reservation."""
        coming_bytes = self._promotions.coming_bytes(name, now)
        return device_room.room(self._devices.get(name), circumstances, coming_bytes, self._limits, now)

    def held_bytes(self, name: str) -> int:
        """The bytes of a device's entries."""
        device = self._devices.get(name)
        return 0 if device is None else device.held.bytes

    def is_passing(self, name: str) -> bool:
        """Whether a pass over a device's entries is under way."""
        device = self._devices.get(name)
        return device is not None and device.current_pass is not None

    def mode_changed(self, name: str) -> None:
        """Ends `stuck`: the next pass is of another kind, and repeats nothing. Orders stay in force."""
        device = self._devices.get(name)
        if device is not None:
            self._passes.mode_changed(device)

    def concerned_by(self, workflows: Workflows) -> set[str]:
        """The devices whose entries the workflows' steps may rank: open by a workflow's client, or with entries of its
        agents, resident or offloaded."""
        return {
            name
            for name, device in self._devices.items()
            if workflows.concerns(
                device.owners, {entry.agent for entry in device.entries.values()} | self._promotions.agents(name)
            )
        }

    # ---- time

    def next_timer(self) -> float | None:
        """When `tick` is due."""
        return self._orders.next_timer()

    def tick(self, now: float) -> None:
        """Processes missed deadlines: entries of late owners are resident again, since they are not known to be
        gone."""
        while late := self._orders.pop_late_owner(now):
            owner, entries = late
            for entry in entries:
                owner.device.take_back(entry, now + self._limits.retry_s)
            self._outbox.counters.timed_out += len(entries)
            if not owner.unresponsive:
                self._mark_unresponsive(owner, len(entries))

    # ---- questions

    def status(self) -> list[dict[str, Any]]:
        """One row for each device."""
        return [device.status() for device in self._devices.values()]

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
        count = self._outbox.counters
        resident = sum(len(device.entries) for device in self._devices.values())
        gone = count.offloaded + count.dropped + count.released + count.gone_with_owner
        assert count.registered == resident + gone, "entries were lost, or counted twice"
        assert count.promoted <= count.registered

    def _owner(self, client: int, device: str) -> Owner | None:
        known = self._devices.get(device)
        return known.owners.get(client) if known else None

    def _mark_responsive(self, owner: Owner) -> None:
        if owner.unresponsive:
            owner.unresponsive = False
            self._outbox.announce("owner", client=owner.client, device=owner.device.name, unresponsive=False)

    def _mark_unresponsive(self, owner: Owner, entries: int) -> None:
        owner.unresponsive = True
        client, device = self._outbox.clients.get(owner.client), owner.device.name
        self._outbox.announce("owner", client=owner.client, device=device, unresponsive=True)
        self._outbox.log(
            "warning",
            "owner does not answer",
            client=owner.client,
            name=client.name if client else "",
            pid=client.pid if client else 0,
            device=device,
            entries=entries,
        )

    def _use(self, entry: HeldEntry, now: float) -> None:
        entry.owner.device.use(entry, now)
        self._outbox.counters.used += 1

    def _add(self, device: DeviceRecord, owner: Owner, message: messages.RegisterEntry, now: float) -> None:
        uses, about = max(1, message.uses), (message.tokens, message.agent, message.cost_ms)
        trace = self._promotions.registered(device.name, message.key)
        if trace is not None:
            uses = max(trace.uses + 1, message.uses)
            if not message.agent:
                # An owner that brings an entry back does not remember it.
                about = trace.tokens, trace.agent, trace.cost_ms
            self._outbox.counters.promoted += 1
        device.add(HeldEntry(message.key, owner, message.size_bytes, *about, uses, now))
        self._outbox.counters.registered += 1
        self._passes.clear_stuck(device)

    def _remove(self, device: DeviceRecord, entries: list[HeldEntry], now: float) -> None:
        for entry in entries:
            self._orders.detach(entry, now)
            device.remove(entry)

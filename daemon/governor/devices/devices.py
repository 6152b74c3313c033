"""The registry of the device tier: the entries of all owners, the orders to evict them, and the acknowledgements.

Owns devices and their entries, when a pass begins and what it has shown, and what becomes of an entry that an owner
acknowledges, or does not. Does not own the choice of entries (choices), the records of orders (orders), modes,
workflows, reservations or queueing: the governor passes a device's `Circumstances` with each sample and request.

    registered ──→ resident ──order──→ ordered ──acknowledged──→ gone (offloaded: remembered)
                       ↑                  │
                       └─── kept, late ───┘

A device is stuck after a pass that lowered nothing. Its owners are left alone for `retry_s`; passes ask the others.

Invariants: registered == resident + offloaded + dropped + released + gone_with_owner. A refused request changes
nothing. A device has at most one current pass. At most `remembered_max` offloaded entries are remembered; the oldest of
a device are forgotten first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ....errors import LimitReached, NoGauge, OwnedElsewhere, UnknownOrder
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from ..workflows import Workflows
from . import choices
from .choices import Circumstances
from .orders import DeviceOrders
from .record import DeviceRecord, HeldEntry, Owner, Pass

STUCK_FALL: Final = 0.01
"""A device is no longer stuck once its gauge has fallen by this share of the total."""


class Devices:
    """Every device that a client has opened."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, workflows: Workflows) -> None:
        self._limits = limits
        self._outbox = outbox
        self._workflows = workflows
        self._devices: dict[str, DeviceRecord] = {}
        self._orders = DeviceOrders(limits, outbox)

    def __iter__(self) -> Iterator[DeviceRecord]:
        return iter(self._devices.values())

    def find(self, name: str) -> DeviceRecord:
        """The record of a device; an empty one if no client has opened it."""
        return self._devices.get(name) or DeviceRecord(name)

    @property
    def remembered(self) -> int:
        """The number of offloaded entries that may be promoted."""
        return sum(len(device.offloaded) for device in self._devices.values())

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
        known.owners.setdefault(client, Owner(known, client))

    def owner(self, client: int, device: str) -> Owner | None:
        """What the client has on the device; None if it has not opened it."""
        return self.find(device).owners.get(client)

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
        owner = self.owner(client, message.device)
        if owner is None:
            raise NoGauge(
                f"device {message.device!r} was not opened by this client: open it before registering entries"
            )
        entry = owner.device.entries.get(message.key)
        if entry is not None and entry.owner is not owner:
            peer = self._outbox.clients[entry.owner.client]
            raise OwnedElsewhere(
                f"client {peer.client} ({peer.name}, pid {peer.pid}) has registered key {message.key.hex()} on "
                f"{message.device}, where a key has one entry: share the payload by Client.put, which both processes "
                "read, or register this copy under a key with a parameter of this process"
            )
        if entry is not None:
            self._use(entry, now)
        else:
            victims = choices.for_registration(owner.device, message, circumstances, self._limits, now)
            # The owner drops the entries that the host does not accept.
            self._orders.order_away(victims, circumstances.host_accepts, "budget", now)
            self._add(owner, message, now)
        self._mark(owner, unresponsive=False)
        return messages.Registered(message.id)

    def use(self, client: int, message: messages.UseEntries, now: float) -> None:
        """Counts one use for each time that a key is listed. Keys that are not the client's are ignored."""
        owner = self.owner(client, message.device)
        if owner is not None:
            for entry in owner.own(message.keys):
                self._use(entry, now)
            self._mark(owner, unresponsive=False)

    def release(self, client: int, message: messages.ReleaseEntries, now: float) -> messages.Counted:
        """Removes entries that the client deleted. The answer counts those that were registered by it."""
        owner, keys = self.owner(client, message.device), dict.fromkeys(message.keys)
        if owner is None:
            return messages.Counted(message.id, 0)
        released, offloaded = owner.own(keys), owner.device.offloaded
        for key in keys:
            if key in offloaded and offloaded[key].owner is owner:
                del offloaded[key]
        self._remove(released, now)
        self._outbox.counters.released += len(released)
        self._mark(owner, unresponsive=False)
        return messages.Counted(message.id, len(released))

    def acknowledge(self, client: int, message: messages.AcknowledgeOrder, now: float) -> messages.Done:
        """Processes an owner's acknowledgement of an order, even a late one. Keys that are not ordered from it are
        ignored: it has released or registered them anew meanwhile.

        Raises:
            UnknownOrder: none of the keys is ordered from the client.
        """
        owner, counters = self.owner(client, message.device), self._outbox.counters
        offloaded, dropped, kept = (
            dict.fromkeys(entry for entry in (owner.own(keys) if owner else ()) if entry.order is not None)
            for keys in (message.offloaded, message.dropped, message.kept)
        )
        gone = offloaded | dropped
        kept = dict.fromkeys(entry for entry in kept if entry not in gone)
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
        if order.part_of is not None and gone:
            order.part_of.left += len(gone)
            order.part_of.left_of.add(client)
        if message.freed_bytes:
            device.freed.add(message.freed_bytes, now)
            owner.vain_until = -math.inf
            if order.part_of is not None:
                order.part_of.worked = True
        self._remove([*gone], now)
        device.offloaded |= {entry.key: entry for entry in offloaded}
        for key in list(device.offloaded)[: max(0, self.remembered - self._limits.remembered_max)]:
            del device.offloaded[key]
        for entry in kept:  # in use
            self._orders.detach(entry, now)
            entry.not_before = now + self._limits.retry_s
        self._mark(owner, unresponsive=False)
        owner.waits_since = now
        return messages.Done(message.id)

    def client_left(self, client: int, now: float) -> None:
        """Removes the client's entries, which ended with it."""
        for device in list(self._devices.values()):
            owner = device.owners.get(client)
            if owner is None:
                continue
            own = [entry for entry in device.entries.values() if entry.owner is owner]
            self._remove(own, now)
            self._outbox.counters.gone_with_owner += len(own)
            device.offloaded = {key: entry for key, entry in device.offloaded.items() if entry.owner is not owner}
            del device.owners[client]
            if not device.owners:
                del self._devices[device.name]

    # ---- gauges

    def sampled(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Processes a new sample of a device: the current pass may end, the next one begin, and entries may be
        promoted."""
        device = self.find(name)
        self._settle(device, circumstances, now)
        self._begin(device, circumstances, now)
        promoted = choices.to_promote(device, circumstances, self._limits, self._workflows, now)
        device.asked = device.coming(now) + promoted
        self._orders.promote(promoted, circumstances.mode.value, now)

    def make_room(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Begins a pass for a waiting reservation, without a new sample."""
        if circumstances.wanted_bytes:
            self._begin(self.find(name), circumstances, now)

    def mode_changed(self, name: str) -> None:
        """Ends `stuck`: the next pass is of another kind, and repeats nothing. It may ask every owner. Orders stay in
        force."""
        self._set_stuck(self.find(name), "")
        self._ask_all(self.find(name))

    def concerned_by(self, workflows: Workflows) -> set[str]:
        """The devices whose entries the workflows' steps may rank: open by a workflow's client, or with entries of its
        agents, resident or offloaded."""
        return {
            name
            for name, device in self._devices.items()
            if workflows.concerns(
                device.owners,
                {entry.agent for entries in (device.entries, device.offloaded) for entry in entries.values()},
            )
        }

    # ---- time

    def next_timer(self) -> float | None:
        """When `tick` is due: `ack_s` after an owner was sent its first open order, or acknowledged a part of them."""
        waits = [owner.waits_since for device in self for owner in device.owners.values() if owner.orders]
        return min(waits) + self._limits.ack_s if waits else None

    def tick(self, now: float) -> None:
        """Processes missed deadlines: entries of late owners are resident again, since they are not known to be
        gone."""
        for owner in [owner for device in self for owner in device.owners.values()]:
            if owner.orders and now >= owner.waits_since + self._limits.ack_s:
                entries = self._orders.close_late(owner, now)
                for entry in entries:
                    entry.not_before = now + self._limits.retry_s
                self._outbox.counters.timed_out += len(entries)
                self._mark(owner, unresponsive=True, entries=len(entries))

    # ---- questions

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        for device in self._devices.values():
            device.check_invariants()
            self._orders.check_invariants(device)
        assert self.remembered <= self._limits.remembered_max
        count = self._outbox.counters
        resident = sum(len(device.entries) for device in self._devices.values())
        gone = count.offloaded + count.dropped + count.released + count.gone_with_owner
        assert count.registered == resident + gone, "entries were lost, or counted twice"
        assert count.promoted <= count.registered

    # ---- passes

    def _begin(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Orders away what the mode and the waiting reservations ask for, unless a pass is under way."""
        if device.current_pass is not None:
            return
        chosen = choices.for_pass(device, circumstances, self._limits, self._workflows, now)
        if chosen:
            begun = Pass(circumstances.gauge.sample.used_bytes, circumstances.lowers, now)
            device.current_pass = begun
            reason = "reservation" if circumstances.for_reservations else circumstances.mode.value
            self._orders.order_away(chosen, circumstances.host_accepts, reason, now, begun)
            self._outbox.counters.passes += 1

    def _settle(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Processes a sample: ends `stuck` if it shows a fall, and the current pass if it shows its whole effect."""
        sample, passed = circumstances.gauge.sample, device.current_pass
        self._orders.leave_slow_owners(device, now)
        device.freed.sampled(sample.began_at)
        if device.stuck and sample.used_bytes <= device.stuck_used_bytes - STUCK_FALL * sample.total_bytes:
            self._set_stuck(device, "")
            self._ask_all(device)
        if passed is None:
            return
        if sample.began_at > passed.began_at and sample.used_bytes < passed.used_bytes:
            passed.worked = True
        under_way = any(order.part_of is passed for owner in device.owners.values() for order in owner.orders.values())
        if under_way or sample.began_at <= passed.closed_at:
            return
        device.current_pass = None
        # A pass that was not meant to lower the gauge, or by which no entry left, shows nothing.
        if not passed.lowers or not passed.left:
            return
        device.stuck_used_bytes = sample.used_bytes
        if passed.worked:
            self._set_stuck(device, "")
            return
        self._set_stuck(
            device,
            f"{passed.left} entries left in the last pass, and {sample.used_bytes} bytes are still used ("
            f"{passed.used_bytes} before): their owners returned nothing to the driver, and are left alone for a while",
        )
        for client in passed.left_of & device.owners.keys():
            device.owners[client].vain_until = now + self._limits.retry_s

    def _set_stuck(self, device: DeviceRecord, why: str) -> None:
        before, device.stuck = device.stuck, why
        if why != before:
            self._outbox.announce("stuck", device=device.name, why=why)
            if not before:
                self._outbox.log("warning", "device stuck", device=device.name, why=why)

    def _ask_all(self, device: DeviceRecord) -> None:
        """Passes may ask every owner again."""
        for owner in device.owners.values():
            owner.vain_until = -math.inf

    # ---- entries

    def _mark(self, owner: Owner, *, unresponsive: bool, entries: int = 0) -> None:
        """Announces that an owner answers no more, with so many entries ordered away, or answers again."""
        if owner.unresponsive == unresponsive:
            return
        owner.unresponsive = unresponsive
        client, device = self._outbox.clients[owner.client], owner.device.name
        self._outbox.announce("owner", client=owner.client, device=device, unresponsive=unresponsive)
        if unresponsive:
            about = {"client": owner.client, "name": client.name, "pid": client.pid}
            self._outbox.log("warning", "owner does not answer", **about, device=device, entries=entries)

    def _use(self, entry: HeldEntry, now: float) -> None:
        entries = entry.owner.device.entries
        entries[entry.key] = entries.pop(entry.key)
        entry.uses += 1
        entry.used_at = now
        self._outbox.counters.used += 1

    def _add(self, owner: Owner, message: messages.RegisterEntry, now: float) -> None:
        uses, about = max(1, message.uses), (message.tokens, message.agent, message.cost_ms)
        trace = owner.device.offloaded.pop(message.key, None)
        if trace is not None:
            uses = max(trace.uses + 1, message.uses)
            if not message.agent:
                # An owner that brings an entry back does not remember it.
                about = trace.tokens, trace.agent, trace.cost_ms
            self._outbox.counters.promoted += 1
        entry = HeldEntry(message.key, owner, message.size_bytes, *about, uses, now)
        owner.device.entries[message.key] = entry
        owner.count(entry, 1)
        self._outbox.counters.registered += 1
        # What the last pass has shown may be different now.
        self._set_stuck(owner.device, "")

    def _remove(self, entries: list[HeldEntry], now: float) -> None:
        for entry in entries:
            self._orders.detach(entry, now)
            entry.not_before = 0.0
            del entry.owner.device.entries[entry.key]
            entry.owner.count(entry, -1)

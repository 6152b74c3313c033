"""The registry of the device tier: the entries of all owners, the orders to evict them, and the acknowledgements.

Owns devices and their entries, when a pass begins and what it has shown, the orders to owners, and what becomes of an
entry that an owner acknowledges, or does not. Does not own the choice of entries (choices): the governor passes a
device's `Circumstances` with each sample and request.

    registered ──→ resident ──order──→ ordered ──acknowledged──→ gone (offloaded: remembered)
                       ↑                  │
                       └────── kept ──────┘

A device is stuck after a pass that lowered nothing. Its owners are left alone for `retry_s`; passes ask the others.

Invariants: registered == resident + offloaded + dropped + released + gone_with_owner. A refused request changes
nothing. A device has at most one current pass. The numbers of orders rise. At most `remembered_max` offloaded entries
are remembered; the oldest of a device are forgotten first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from ....errors import LimitReached, NoGauge, OwnedElsewhere, UnknownOrder
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from ..workflows import Workflows
from . import choices
from .choices import Circumstances
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
        self._last_order = 0

    def __iter__(self) -> Iterator[DeviceRecord]:
        return iter(self._devices.values())

    def find(self, name: str) -> DeviceRecord:
        """The record of a device; an empty one if no client has opened it."""
        return self._devices.get(name) or DeviceRecord(name)

    @property
    def remembered(self) -> int:
        """The number of offloaded entries that may be promoted."""
        return sum(len(device.offloaded) for device in self)

    def open(self, client: int, device: str) -> None:
        """Lets the client register entries on a device. Raises LimitReached if as many devices as may be are open."""
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
        """Registers a new entry. Other entries may be ordered away for it. Of a registered one it is a use. Raises
        NoGauge if the client has not opened the device; OwnedElsewhere if another client has registered the key; and as
        `choices.for_registration`."""
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
            self._order_away(victims, "budget", circumstances, now)
            self._add(owner, message, now)
        return messages.Registered(message.id)

    def use(self, client: int, message: messages.UseEntries, now: float) -> None:
        """Counts one use for each time that a key is listed. Keys that are not the client's are ignored."""
        owner = self.owner(client, message.device)
        if owner is not None:
            for entry in owner.own(message.keys):
                self._use(entry, now)

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
        if released:
            self._heard(owner, now)
        return messages.Counted(message.id, len(released))

    def acknowledge(self, client: int, message: messages.AcknowledgeOrder, now: float) -> messages.Done:
        """Processes an owner's acknowledgement of an order, even a late one. Keys that are not ordered from it are
        ignored: it has released or registered them anew meanwhile. Raises UnknownOrder if there are no others."""
        owner, counters = self.owner(client, message.device), self._outbox.counters
        outcomes: dict[HeldEntry, str] = {}
        for outcome in ("kept", "dropped", "offloaded"):
            named = owner.own(getattr(message, outcome)) if owner is not None else ()
            outcomes |= dict.fromkeys((entry for entry in named if entry.ordered), outcome)
        if owner is None or not outcomes:
            raise UnknownOrder(
                f"order {message.order} on {message.device!r} has no such key of this client: acknowledge each once"
            )
        offloaded, dropped, kept = (
            [entry for entry in outcomes if outcomes[entry] == outcome] for outcome in ("offloaded", "dropped", "kept")
        )
        device, gone = owner.device, offloaded + dropped
        counters.offloaded += len(offloaded)
        counters.offloaded_bytes += sum(entry.size_bytes for entry in offloaded)
        counters.dropped += len(dropped)
        counters.dropped_bytes += sum(entry.size_bytes for entry in dropped)
        counters.kept += len(kept)
        counters.freed_bytes += message.freed_bytes
        if message.freed_bytes:
            owner.vain_until = -math.inf
        if (passed := device.current_pass) is not None:
            passed.worked |= message.freed_bytes > 0
            if not passed.entries.isdisjoint(gone):
                passed.left_of.add(client)
        self._remove(gone, now)
        device.offloaded |= {entry.key: entry for entry in offloaded}
        for key in list(device.offloaded)[: max(0, self.remembered - self._limits.remembered_max)]:
            del device.offloaded[key]
        for entry in kept:  # in use
            owner.close(entry, now)
            entry.not_before = now + self._limits.retry_s
        self._heard(owner, now)
        return messages.Done(message.id)

    def client_left(self, client: int, now: float) -> None:
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

    def sampled(self, name: str, circumstances: Circumstances, now: float) -> None:
        """Processes a new sample: the current pass may end, the next one begin, and entries may be promoted."""
        device = self.find(name)
        self._settle(device, circumstances, now)
        self._begin(device, circumstances, now)
        promoted: dict[Owner, list[HeldEntry]] = {}
        for entry in choices.to_promote(device, circumstances, self._limits, self._workflows, now):
            entry.not_before = now + self._limits.retry_s
            promoted.setdefault(entry.owner, []).append(entry)
        for owner, entries in promoted.items():
            self._send(owner, "promote", entries, circumstances.gauge.mode.value)

    def make_room(self, name: str, circumstances: Circumstances, now: float) -> None:
        if circumstances.wanted_bytes:
            self._begin(self.find(name), circumstances, now)

    def mode_changed(self, name: str) -> None:
        """Ends `stuck`: the next pass is of another kind, and repeats nothing. Orders stay in force."""
        self._ask_all(self.find(name))

    def concerned_by(self, workflows: Workflows) -> set[str]:
        """The devices whose entries the workflows' steps may rank: open by a workflow's client, or with entries of its
        agents, resident or offloaded."""
        concerned = set()
        for name, device in self._devices.items():
            agents = {entry.agent for entry in [*device.entries.values(), *device.offloaded.values()]}
            if workflows.concerns(device.owners, agents):
                concerned.add(name)
        return concerned

    def next_timer(self) -> float | None:
        """When `tick` is due: `ack_s` after an owner was sent its first open order, or acknowledged a part of them."""
        waits = [owner.waits_since for owner in self._waited_for()]
        return min(waits) + self._limits.ack_s if waits else None

    def tick(self, now: float) -> None:
        """Processes missed deadlines. What is ordered stays so: its owner may carry it out later."""
        for owner in self._waited_for():
            if now >= owner.waits_since + self._limits.ack_s:
                owner.unresponsive = True
                self._outbox.counters.timed_out += owner.ordered_entries
                client, device = self._outbox.clients[owner.client], owner.device.name
                about = {"client": owner.client, "name": client.name, "pid": client.pid, "device": device}
                self._outbox.log("warning", "owner does not answer", **about, entries=owner.ordered_entries)
                self._outbox.announce("owner", client=owner.client, device=device, unresponsive=True)

    def check_invariants(self) -> None:
        for device in self:
            device.check_invariants()
        assert self.remembered <= self._limits.remembered_max
        count, resident = self._outbox.counters, sum(len(device.entries) for device in self)
        gone = count.offloaded + count.dropped + count.released + count.gone_with_owner
        assert count.registered == resident + gone, "entries were lost, or counted twice"

    def _begin(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Orders away what the mode and the waiting reservations ask for, unless a pass is under way."""
        if device.current_pass is not None:
            return
        chosen = choices.for_pass(device, circumstances, self._limits, self._workflows, now)
        if chosen:
            device.current_pass = Pass(circumstances.gauge.sample.used_bytes, circumstances.lowers, now, set(chosen))
            reason = "reservation" if circumstances.for_reservations else circumstances.gauge.mode.value
            self._order_away(chosen, reason, circumstances, now)
            self._outbox.counters.passes += 1

    def _settle(self, device: DeviceRecord, circumstances: Circumstances, now: float) -> None:
        """Processes a sample: ends `stuck` if it shows a fall, and the current pass if it shows its whole effect."""
        sample, passed = circumstances.gauge.sample, device.current_pass
        device.leave_slow_owners(now)
        if device.stuck and sample.used_bytes <= device.stuck_used_bytes - STUCK_FALL * sample.total_bytes:
            self._ask_all(device)
        if passed is None:
            return
        if sample.began_at > passed.began_at and sample.used_bytes < passed.used_bytes:
            passed.worked = True
        if passed.entries or sample.began_at <= passed.closed_at:
            return
        device.current_pass = None
        # A pass that was not meant to lower the gauge, or by which no entry left, shows nothing.
        if not passed.lowers or not passed.left_of:
            return
        device.stuck_used_bytes = sample.used_bytes
        if passed.worked:
            self._set_stuck(device, "")
            return
        self._set_stuck(
            device,
            f"entries left in the last pass, and {sample.used_bytes} bytes are still used, {passed.used_bytes} before: "
            "their owners returned nothing to the driver, and are left alone for a while",
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
        """The device is not stuck: passes may ask every owner again."""
        self._set_stuck(device, "")
        for owner in device.owners.values():
            owner.vain_until = -math.inf

    def _order_away(self, entries: Sequence[HeldEntry], reason: str, circumstances: Circumstances, now: float) -> None:
        """Orders resident entries away, each from its owner, as offload or drop. Every owner's first order is sent
        before any owner's second."""
        groups: dict[tuple[Owner, bool], list[HeldEntry]] = {}
        for entry in entries:
            offload = circumstances.host_accepts and choices.is_worth_its_copy(entry, self._limits)
            groups.setdefault((entry.owner, offload), []).append(entry)
        most = self._limits.keys_per_request_max
        parts = [
            (at, owner, offload, group[at : at + most])
            for (owner, offload), group in groups.items()
            for at in range(0, len(group), most)
        ]
        for _, owner, offload, part in sorted(parts, key=lambda each: each[0]):
            if not owner.ordered_entries:
                owner.waits_since = now
            self._send(owner, "offload" if offload else "drop", part, reason)
            for entry in part:
                owner.order(entry)
        self._outbox.counters.ordered += len(entries)

    def _send(
        self, owner: Owner, kind: Literal["offload", "drop", "promote"], entries: Sequence[HeldEntry], reason: str
    ) -> None:
        """Sends one order, and announces it to watchers."""
        self._last_order += 1
        number, client, device = self._last_order, owner.client, owner.device.name
        self._outbox.send(client, messages.Order(number, device, kind, [entry.key for entry in entries], reason))
        about = {"kind": kind, "entries": len(entries), "bytes": sum(entry.size_bytes for entry in entries)}
        self._outbox.announce("order", client=client, device=device, order=number, **about, reason=reason)

    def _waited_for(self) -> list[Owner]:
        owners = [owner for device in self for owner in device.owners.values()]
        return [owner for owner in owners if owner.ordered_entries and not owner.unresponsive]

    def _heard(self, owner: Owner, now: float) -> None:
        """The owner has carried out an order, or a part of one."""
        owner.waits_since = now
        if owner.unresponsive:
            owner.unresponsive = False
            self._outbox.announce("owner", client=owner.client, device=owner.device.name, unresponsive=False)

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
            entry.owner.close(entry, now)
            entry.not_before = 0.0
            del entry.owner.device.entries[entry.key]
            entry.owner.count(entry, -1)

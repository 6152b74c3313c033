"""The governor's core: which clients must return memory, and when. Events in, effects out; time is an argument.

    handle(event, now) ─┬─ tiers          readings, modes, and subscribers
                        ├─ devices        entries of all owners, orders, budgets
                        ├─ reservations   reserved free memory, and who waits for it
                        ├─ rooms          room that is made for an operator, also by neighbours that are no clients
                        ├─ workflows      how soon an agent's entries are needed
                        ├─ floors         the blocks that keep queues bounded
                        └─ host           how much the ring may keep, and when puts are refused

Owns the connections between these parts: each part gets from here what it needs of another.

Invariants: `handle` is the only mutator. Queries (`status`, `modes`, `next_timer`, `sample_every_s`) change nothing. A
refused request changes nothing but the count of refusals. No event takes long, whatever is registered: a pass orders a
limited number of entries away, and the next reading begins another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

from ...errors import DeviceFull, NoGauge, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers, id_of
from ...ipc.messages.modes import HOST_GAUGE, Tier
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ..forms.effects import HostHolds
from ..forms.events import ClientLeft, Tick
from . import report
from .devices.choices import Circumstances
from .devices.devices import Devices
from .floors import Floors
from .forms.events import (
    OWNERS_EVERY_S,
    OWNERS_SOURCE,
    Effect,
    Event,
    FormerDaemonFound,
    Governed,
    GovernorClientJoined,
    GovernorLimitsChanged,
    NeighbourAnswered,
    Sample,
    Sampled,
    SourceState,
)
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox
from .host import Host
from .reservations import FreeRoom, Reservations
from .rooms import Rooms
from .tiers import Gauge, Tiers
from .workflows import Workflows

Answer = messages.Answer | None


class Governor:
    """All tiers of one daemon."""

    def __init__(self, limits: GovernorLimits) -> None:
        self.limits = limits = replace(limits)
        self.outbox = GovernorOutbox()
        self.workflows = Workflows(limits, self.outbox)
        self.tiers = Tiers(limits, self.outbox)
        self.devices = Devices(limits, self.outbox, self.workflows)
        self.reservations = Reservations(limits, self.outbox, self._room)
        self.rooms = Rooms(limits, self.outbox, self.reservations, self._room)
        self.floors = Floors(lambda device: bool(self.tiers.find(device) or self.devices.find(device).entries))
        self.host = Host(limits, self.outbox)
        self.sources: tuple[SourceState, ...] = ()
        self._now = 0.0
        requests: dict[type[Any], Callable[[int, Any, float], Answer]] = {
            messages.Subscribe: self._subscribe,
            messages.OpenDevice: self._open_device,
            messages.RegisterEntry: self._register_entry,
            messages.UseEntries: self.devices.use,
            messages.ReleaseEntries: self.devices.release,
            messages.AcknowledgeOrder: self.devices.acknowledge,
            messages.ReserveDevice: self._reserve_device,
            messages.ReleaseReservation: self.reservations.release,
            messages.MakeRoom: self._make_room,
            messages.EndRoom: self.rooms.end,
            messages.RegisterWorkflow: self.workflows.register,
            messages.AdvanceWorkflow: self.workflows.advance,
            messages.EndWorkflow: self.workflows.end,
            messages.RequestsArrived: self.floors.arrived,
            messages.RequestCompleted: self.floors.completed,
        }
        self._requests = handlers(messages.GovernorRequest, requests)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Processes `event` at monotonic time `now` (seconds). Returns the effects to carry out, in this order."""
        self._now = now
        match event:
            case Governed(client, message):
                self._governed(client, message, now)
            case Sampled():
                self._sampled(event, now)
            case Tick():
                self.reservations.expire(now)
                self._serve_waiting(now)
                self.devices.tick(now)
            case HostHolds():
                self.host.reported(event, now)
            case NeighbourAnswered():
                self.rooms.answered(event, now)
            case GovernorClientJoined(client):
                assert client not in self.outbox.clients, "client numbers are not used again"
                self.outbox.clients[client] = event
            case ClientLeft(client):
                self._client_left(client, now)
            case FormerDaemonFound():
                self.reservations.follow(now)
            case GovernorLimitsChanged(limits):
                self.limits.become(limits)
                for gauge in self.tiers:
                    gauge.kept.clear()  # earlier readings do not count for other thresholds
            case _:
                assert_never(event)
        return self.outbox.take()

    def next_timer(self) -> float | None:
        timers = (self.devices.next_timer(), self.reservations.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def sample_every_s(self) -> float:
        """The interval between readings of the gauges: shorter under pressure, and while a reservation waits."""
        pressed = any(gauge.pressed for gauge in self.tiers) or self.reservations.waited_for()
        return self.limits.sample_pressed_s if pressed else self.limits.sample_s

    def modes(self) -> list[messages.TierState]:
        return [gauge.to_message() for gauge in self.tiers]

    def status(self) -> dict[str, Any]:
        """Everything known as of the last event, without a walk over entries."""
        return report.status(self, self._now)

    def check_invariants(self) -> None:
        for part in (self.tiers, self.devices, self.reservations, self.rooms):
            part.check_invariants()
        gauge = self.tiers.find(HOST_GAUGE)
        assert self.host.press.refuse == (gauge is not None and gauge.refuses), "a refusal that outlives its mode"

    def _client_left(self, client: int, now: float) -> None:
        del self.outbox.clients[client]
        self.rooms.client_left(client)
        self.reservations.client_left(client, now)
        self.devices.client_left(client, now)
        self.tiers.subscribers.discard(client)
        self.workflows.client_left(client)
        self._workflows_changed(now)
        self._serve_waiting(now)

    def _governed(self, client: int, message: messages.GovernorRequest | messages.GaugeRequest, now: float) -> None:
        try:
            answer = self._requests[type(message)](client, message, now)
        except TensordError as error:
            # Handlers raise before they change anything. Messages without an answer have no id.
            self.outbox.refuse(client, id_of(message), error)
            return
        if answer is not None:
            self.outbox.send(client, answer)
        if isinstance(message, messages.RegisterWorkflow | messages.EndWorkflow):
            self._workflows_changed(now)
        elif isinstance(message, messages.AdvanceWorkflow):
            self.workflows.report()

    def _sampled(self, event: Sampled, now: float) -> None:
        self.sources = event.sources
        self.floors.forget(now)
        self._workflows_changed(now)
        fresh, moved, gone = self.tiers.sampled(event.samples, now)
        for gauge in moved:
            self.devices.mode_changed(gauge.sample.gauge)
        for gauge in gone:
            device = gauge.sample.gauge
            if gauge.sample.tier is Tier.HOST:
                self.host.gauge_gone()
            else:
                self.devices.mode_changed(device)
                for asked in self.reservations.waiting(device):
                    why = f"device {device!r} has no gauge any more, so no memory of it can be reserved"
                    self.reservations.refuse(asked, NoGauge(why))
        for gauge in fresh:
            if gauge.sample.tier is Tier.HOST:
                self.host.sampled(gauge)
            else:
                self._device_sampled(gauge, now)

    def _subscribe(self, client: int, message: messages.Subscribe, now: float) -> Answer:
        self.tiers.subscribers.add(client)
        return messages.Modes(message.id, self.modes())

    def _open_device(self, client: int, message: messages.OpenDevice, now: float) -> Answer:
        if message.device == HOST_GAUGE:
            raise NoGauge(f"{HOST_GAUGE!r} is the host tier's gauge, not a device: give the device's name")
        self.devices.open(client, message.device)
        self._workflows_changed(now)
        gauge = self.tiers.find(message.device)
        state = None if gauge is None else gauge.to_message()
        # The owner of tensors reports what it sees of a device without a gauge.
        report_every_s = OWNERS_EVERY_S if gauge is None or gauge.sample.source == OWNERS_SOURCE else 0.0
        return messages.DeviceOpened(message.id, state, report_every_s)

    def _register_entry(self, client: int, message: messages.RegisterEntry, now: float) -> Answer:
        answer = self.devices.register(client, message, self._circumstances(message.device), now)
        self.reservations.registered(message.device, message.new_bytes, now)
        return answer

    def _reserve_device(self, client: int, message: messages.ReserveDevice, now: float) -> None:
        if not message.held:
            self._check_readable(message.device, promotes=message.promotes)
        self.reservations.ask(client, message, now)
        self.devices.make_room(message.device, self._circumstances(message.device), now)

    def _make_room(self, client: int, message: messages.MakeRoom, now: float) -> None:
        self._check_readable(message.device)
        self.rooms.begin(client, message, now)
        self.devices.make_room(message.device, self._circumstances(message.device), now)

    def _workflows_changed(self, now: float) -> None:
        """The devices that a step graph concerns may have changed, and the agents that have no step left."""
        self.workflows.report()
        devices = self.devices.concerned_by(self.workflows) if len(self.workflows) else ()
        for gauge in self.tiers.set_workflow(devices, now):
            self.devices.mode_changed(gauge.sample.gauge)

    def _device_sampled(self, gauge: Gauge, now: float) -> None:
        device = gauge.sample.gauge
        self.reservations.sampled(device, gauge.sample.began_at)
        self._serve_waiting(now)
        self.devices.sampled(device, self._circumstances(device), now)
        self.rooms.sampled(gauge, now, passing=self.devices.find(device).current_pass is not None)

    def _serve_waiting(self, now: float) -> None:
        for device in self.reservations.waited_for():
            gauge = self.tiers.find_device(device)
            if gauge is not None and not gauge.sample.stale:
                self.reservations.grant(device, gauge.free_bytes, now)

    def _check_readable(self, device: str, *, promotes: bool = False) -> None:
        """Raises NoGauge if a device has no gauge that can be read now, for a reservation; DeviceFull if that
        `promotes` an entry that has a copy in the host tier."""
        gauge = self.tiers.find_device(device)
        if gauge is not None and not gauge.sample.stale:
            return
        why, then = f"device {device!r} has no gauge, so no memory of it can be reserved", ""
        if gauge is not None:
            sample = gauge.sample
            why = (
                f"the gauge of {device} cannot be read ({sample.source}: {sample.shown.get('failure', '')}); its "
                f"last reading is {self._now - sample.began_at:.3g} s old, so no memory of it can be reserved"
            )
            then = ": try again when `tensorctl health` no longer names it"
        raise DeviceFull(f"{why}: use the host tier's copy") if promotes else NoGauge(why + then)

    def _room(self, device: str) -> FreeRoom:
        gauge = self.tiers.find_device(device)
        return FreeRoom(0, 0) if gauge is None else self.devices.find(device).room(gauge, self._now)

    def _circumstances(self, device: str) -> Circumstances:
        """The circumstances of a device. One of unknown size is limited by its budgets and its floor only."""
        unread = Sample(device, Tier.DEVICE, 0, SIZE_BYTES_MAX, "", -math.inf)
        gauge, host = self.tiers.find_device(device) or Gauge(unread, self.limits), self.tiers.find(HOST_GAUGE)
        reservations = self.reservations
        return Circumstances(
            gauge,
            host_accepts=host is None or not host.pressed,
            floor_blocks=self.floors.blocks(device, self._now),
            reserved_bytes=reservations.taken_bytes(device) + reservations.waiting_bytes(device),
            wanted_bytes=reservations.wanted_bytes(device, gauge.free_bytes),
        )

"""The governor's core: which clients must return memory, and when. Events in, effects out; time is an argument.

    handle(event, now) ─┬─ tiers          readings, modes, and subscribers
                        ├─ devices        entries of all owners, orders, budgets
                        ├─ reservations   reserved free memory
                        ├─ queue          reservations that wait for memory
                        ├─ rooms          room that is made for an operator, also by neighbours that are no clients
                        ├─ workflows      how soon an agent's entries are needed
                        ├─ floors         the blocks that keep queues bounded
                        └─ host           how much the ring may keep, and when puts are refused

Owns the connections between these parts: each part gets from here what it needs of another. Does not own gauges or
sockets.

Invariants: `handle` is the only mutator. Queries (`status`, `modes`, `next_timer`, `sample_every_s`) change nothing. A
refused request changes nothing but the count of refusals. No event takes long, whatever is registered: the next Tick
continues a pass over many entries. `next_timer` then asks for a Tick at once, and the caller may handle other events
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ...errors import NoGauge, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers, id_of
from ...ipc.messages.modes import HOST_GAUGE, Tier
from ..core.host_memory import HostHolds
from . import circumstances, report
from .devices.circumstances import Circumstances
from .devices.devices import Devices
from .floors import Floors
from .forms.counters import GovernorCounters
from .forms.effects import Effect
from .forms.events import (
    OWNERS_EVERY_S,
    Event,
    FormerDaemonFound,
    GovernorClientJoined,
    GovernorClientLeft,
    GovernorLimitsChanged,
    GovernorReceived,
    GovernorTick,
    NeighbourAnswered,
    Sampled,
    SourceState,
)
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorClient, GovernorOutbox
from .host import Host
from .modes.configured_cards import OWNERS_SOURCE
from .modes.tiers import Changes, Gauge, Tiers
from .reservations.queue import FreeRoom, ReservationQueue
from .reservations.reservations import Reservations
from .reservations.rooms import Rooms
from .workflows import Workflows

DUE_MAX: Final = 128
"""Reservations that one Tick ends."""


class Governor:
    """All tiers of one daemon."""

    def __init__(self, limits: GovernorLimits) -> None:
        self.limits = limits = replace(limits)
        self._outbox = GovernorOutbox()
        self.workflows = Workflows(limits.workflows_max, limits.workflow_steps_max)
        self.tiers = Tiers(limits, self._outbox)
        self.devices = Devices(limits, self._outbox, self.workflows)
        self.reservations = Reservations(limits)
        self.queue = ReservationQueue(limits, self._outbox, self.reservations)
        self.rooms = Rooms(
            limits,
            self._outbox,
            self.queue,
            self.reservations,
            gauge_of=self.tiers.find_device,
            room_of=lambda device: self._room(device, self._now),
            passing=self.devices.is_passing,
        )
        self.floors = Floors(lambda device: circumstances.known(self, device))
        self.host = Host(limits, self._outbox)
        self.sources: tuple[SourceState, ...] | None = None
        self._now = 0.0
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            GovernorClientJoined: self._client_joined,
            GovernorClientLeft: self._client_left,
            GovernorReceived: self._received,
            Sampled: self._sampled,
            HostHolds: self.host.holds,
            GovernorLimitsChanged: self._limits_changed,
            FormerDaemonFound: lambda _, now: self.queue.follow(now),
            NeighbourAnswered: self.rooms.answered,
            GovernorTick: self._tick,
        }
        requests: dict[type[Any], Callable[[int, Any, float], None]] = {
            messages.Subscribe: self._subscribe,
            messages.OpenDevice: self._open_device,
            messages.RegisterEntry: self._register_entry,
            messages.UseEntries: self.devices.use,
            messages.ReleaseEntries: self._release_entries,
            messages.AcknowledgeOrder: self._acknowledge_order,
            messages.ReserveDevice: self._reserve_device,
            messages.ReleaseReservation: self._release_reservation,
            messages.MakeRoom: self._make_room,
            messages.EndRoom: self.rooms.end,
            messages.RegisterWorkflow: self._register_workflow,
            messages.AdvanceWorkflow: self._advance_workflow,
            messages.EndWorkflow: self._end_workflow,
            messages.RequestsArrived: lambda _, message, now: self.floors.arrived(message, now),
            messages.RequestCompleted: lambda _, message, now: self.floors.completed(message, now),
        }
        self._requests = handlers(messages.GovernorRequest, requests)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Processes `event` at monotonic time `now` (seconds).

        Returns:
            The effects to carry out, in this order.
        """
        self._now = now
        self._handlers[type(event)](event, now)
        return self._outbox.take()

    def next_timer(self) -> float | None:
        """When the next Tick is due. Not after the time of the last event if a pass was postponed."""
        timers = (self.devices.next_timer(), self.reservations.next_timer(), self.queue.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def sample_every_s(self) -> float:
        """The interval between readings of the gauges: shorter while any tier is at pressure or above, or a reservation
        waits."""
        return self.limits.sample_pressed_s if self.tiers.pressed or len(self.queue) else self.limits.sample_s

    @property
    def clients(self) -> dict[int, GovernorClient]:
        """The connected clients."""
        return self._outbox.clients

    @property
    def counters(self) -> GovernorCounters:
        """Counters since the daemon started."""
        return self._outbox.counters

    def modes(self) -> list[messages.TierState]:
        """The state of every gauge."""
        return self.tiers.to_messages()

    def status(self) -> dict[str, Any]:
        """Everything known as of the last event, without a walk over entries."""
        return report.status(self, self._now)

    def check_invariants(self) -> None:
        """Asserts what every module's docstring promises."""
        self.tiers.check_invariants()
        self.devices.check_invariants()
        self.reservations.check_invariants()
        self.queue.check_invariants(set(self.clients))
        self.rooms.check_invariants(set(self.clients))
        self.workflows.check_invariants()
        self.host.check_invariants()
        self.floors.check_invariants()
        gauge = self.tiers.find(HOST_GAUGE)
        assert self.host.press.refuse == (gauge is not None and gauge.refuses), "a refusal that outlives its mode"
        counters, resident = self.counters, sum(row["entries"] for row in self.devices.status())
        gone = counters.offloaded + counters.dropped + counters.released + counters.gone_with_owner
        assert counters.registered == resident + gone, "entries were lost, or counted twice"

    # ---- events

    def _client_joined(self, event: GovernorClientJoined, now: float) -> None:
        assert event.client not in self.clients, "client numbers are not used again"
        self.clients[event.client] = GovernorClient(event.name, event.pid)

    def _client_left(self, event: GovernorClientLeft, now: float) -> None:
        client = event.client
        del self.clients[client]
        self.queue.client_left(client)
        self.rooms.client_left(client)
        self.reservations.client_left(client, now)
        self.devices.client_left(client, now)
        self.tiers.subscribers.discard(client)
        for name in self.workflows.client_left(client):
            self._announce_workflow(client, name, "ended")
        self._workflows_changed(now)
        self._serve_waiting(now)

    def _received(self, event: GovernorReceived, now: float) -> None:
        message = event.message
        try:
            self._requests[type(message)](event.client, message, now)
        except TensordError as error:
            # Handlers raise before they change anything. Messages without an answer have no id.
            self._outbox.refuse(event.client, id_of(message), error)

    def _sampled(self, event: Sampled, now: float) -> None:
        self.sources = event.sources
        self.floors.forget(now)
        self._workflows_changed(now)
        self._apply_changes(self.tiers.sampled(event.samples, now), now)

    def _limits_changed(self, event: GovernorLimitsChanged, now: float) -> None:
        self.limits.become(event.limits)
        self.tiers.change_thresholds()

    def _tick(self, event: GovernorTick, now: float) -> None:
        self.reservations.expire(now, DUE_MAX)
        self.queue.expire(now, DUE_MAX, lambda device: self._room(device, now))
        self._serve_waiting(now)
        self.devices.tick(now)

    # ---- requests

    def _subscribe(self, client: int, message: messages.Subscribe, now: float) -> None:
        self.tiers.subscribers.add(client)
        self._outbox.send(client, messages.Modes(message.id, self.modes()))

    def _open_device(self, client: int, message: messages.OpenDevice, now: float) -> None:
        device = message.device
        if device == HOST_GAUGE:
            raise NoGauge(f"{device!r} is the host tier's gauge, not a device: give the device's name")
        self.devices.open(client, device)
        self._workflows_changed(now)
        gauge = self.tiers.find(device)
        state = None if gauge is None else gauge.to_message()
        # The owner of tensors reports what it sees of a device without a gauge.
        report_every_s = OWNERS_EVERY_S if gauge is None or gauge.sample.source == OWNERS_SOURCE else 0.0
        self._outbox.send(client, messages.DeviceOpened(message.id, state, report_every_s))

    def _register_entry(self, client: int, message: messages.RegisterEntry, now: float) -> None:
        under = circumstances.of_device(self, message.device, now)
        self._outbox.send(client, self.devices.register(client, message, under, now))
        self.reservations.registered.add(message.device, message.new_bytes, now)

    def _release_entries(self, client: int, message: messages.ReleaseEntries, now: float) -> None:
        self._outbox.send(client, messages.Counted(message.id, self.devices.release(client, message, now)))

    def _acknowledge_order(self, client: int, message: messages.AcknowledgeOrder, now: float) -> None:
        self.devices.acknowledge(client, message, now)
        self._outbox.send(client, messages.Done(message.id))

    def _reserve_device(self, client: int, message: messages.ReserveDevice, now: float) -> None:
        if not message.held:
            circumstances.readable(self, message.device, now, promotes=message.promotes)
        self.queue.ask(client, message, self._room(message.device, now), now)
        if (gauge := self.tiers.find_device(message.device)) is not None:
            self.devices.make_room(message.device, self._circumstances(gauge, now), now)

    def _make_room(self, client: int, message: messages.MakeRoom, now: float) -> None:
        gauge = circumstances.readable(self, message.device, now)
        self.rooms.begin(client, message, now)
        self.devices.make_room(message.device, self._circumstances(gauge, now), now)

    def _release_reservation(self, client: int, message: messages.ReleaseReservation, now: float) -> None:
        self.reservations.release(client, message.reservation, now)
        self._outbox.send(client, messages.Done(message.id))

    def _register_workflow(self, client: int, message: messages.RegisterWorkflow, now: float) -> None:
        step = self.workflows.register(client, message.workflow, message.steps)
        self._outbox.send(client, messages.Done(message.id))
        self._announce_workflow(client, message.workflow, "registered", step=step)
        self._workflows_changed(now)

    def _advance_workflow(self, client: int, message: messages.AdvanceWorkflow, now: float) -> None:
        self.workflows.advance(client, message.workflow, message.step)
        self._outbox.send(client, messages.Done(message.id))
        self._announce_workflow(client, message.workflow, "advanced", step=message.step)
        self._report_agents()

    def _end_workflow(self, client: int, message: messages.EndWorkflow, now: float) -> None:
        self.workflows.end(client, message.workflow)
        self._outbox.send(client, messages.Done(message.id))
        self._announce_workflow(client, message.workflow, "ended")
        self._workflows_changed(now)

    # ---- consequences

    def _announce_workflow(self, client: int, workflow: str, change: str, **more: Any) -> None:
        self._outbox.announce("workflow", client=client, workflow=workflow, change=change, **more)

    def _report_agents(self) -> None:
        """Tells the store's replacement policy which agents have no step left, and which have one again."""
        for turned in self.workflows.take_turned():
            self._outbox.add(turned)

    def _workflows_changed(self, now: float) -> None:
        """The devices that a step graph concerns may have changed, and the agents that have no step left."""
        self._report_agents()
        devices = self.devices.concerned_by(self.workflows) if len(self.workflows) else ()
        self._apply_changes(self.tiers.set_workflow(devices, now), now)

    def _apply_changes(self, changes: Changes, now: float) -> None:
        """Passes changes of gauges, which are in their new state already, to every part."""
        fresh = {gauge.sample.gauge for gauge in changes.fresh}
        for gauge in changes.gone:
            if gauge.sample.tier is Tier.HOST:
                self.host.gauge_gone(now)
            else:
                self._device_gone(gauge.sample.gauge, now)
        for gauge in changes.moved:
            if gauge.sample.tier is Tier.DEVICE:
                self.devices.mode_changed(gauge.sample.gauge)
            elif gauge.sample.gauge not in fresh:
                self.host.mode_changed(gauge, now)
        for gauge in changes.fresh:
            if gauge.sample.tier is Tier.HOST:
                self.host.sampled(gauge, now)
            else:
                self.reservations.sampled(gauge.sample.gauge, gauge.sample.began_at)
                self._serve_waiting(now)
                self.devices.sampled(gauge.sample.gauge, self._circumstances(gauge, now), now)
                self.rooms.sampled(gauge.sample.gauge, now)

    def _device_gone(self, device: str, now: float) -> None:
        self.devices.mode_changed(device)
        gone = NoGauge(f"device {device!r} has no gauge any more, so no memory of it can be reserved")
        self.queue.refuse_all(device, gone)

    def _serve_waiting(self, now: float) -> None:
        """Grants the waiting reservations that fit."""
        for device in self.queue.devices():
            gauge = self.tiers.find_device(device)
            if gauge is not None and not gauge.sample.stale:
                self.queue.grant(device, gauge.sample.total_bytes - gauge.sample.used_bytes, now)

    def _room(self, device: str, now: float) -> FreeRoom:
        gauge = self.tiers.find_device(device)
        return FreeRoom(0, 0) if gauge is None else self.devices.room(device, self._circumstances(gauge, now), now)

    def _circumstances(self, gauge: Gauge, now: float) -> Circumstances:
        return circumstances.of_gauge(self, gauge, now)

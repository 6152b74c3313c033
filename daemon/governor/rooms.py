"""Room on a device, made for an operator: first cached entries leave, then neighbours give memory back, one at a time.

    begin ──→ cached entries leave ──→ ask a neighbour ──→ settle ──→ ask the next one ──→ … ──→ made, or not
                                             ↑ idle, busy, failed │
                                             └────────────────────┘

Owns which neighbour is asked when, and what each step freed. The reservation waits from the beginning (reservations);
the actor makes the requests to a neighbour.

What a step freed is the fall of the device's gauge from its beginning to its end, whatever the neighbour says. Memory
that another process frees or takes meanwhile is in it.

Invariants: a room is answered once, or its client has left. One room is made on a device at a time. A neighbour is
asked once for a room, and never again before it has answered, which may be long after its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ...errors import DeviceFull, LimitReached, TensordError
from ...ipc.messages import control as messages
from ...ipc.quantities import rounded_size
from .forms.events import AskNeighbour, NeighbourAnswered
from .forms.limits import GovernorLimits, NeighbourPlace
from .forms.outbox import GovernorOutbox
from .reservations import OPERATOR, FreeRoom, ReservationRequest, Reservations
from .tiers import Gauge

CACHED: Final = "cached tensors"
SETTLE_S: Final = 5.0
"""Seconds in which a neighbour's memory may be seen as free, after its answer: some free it after they have answered.
"""
GRACE_S: Final = 1.0
"""Seconds after its time in which a neighbour's answer still counts."""


@dataclass(slots=True, eq=False)
class _Making:
    """A room that is being made. `request`: the reservation that waits for it. `before_bytes`: used bytes at the
    beginning of the present step; `last_bytes`: by the last reading. `left`: neighbours to ask. `asking`: the question
    to the neighbour of the present step, asked at `since`; `answer`: what it answered, at `since` then."""

    client: int
    message: messages.MakeRoom
    before_bytes: int
    last_bytes: int
    left: deque[NeighbourPlace]
    request: ReservationRequest = field(init=False)
    steps: list[messages.RoomStep] = field(default_factory=list)
    asking: AskNeighbour | None = None
    answer: NeighbourAnswered | None = None
    since: float = 0.0

    @property
    def freed_bytes(self) -> int:
        """By the present step."""
        return max(0, self.before_bytes - self.last_bytes)


@dataclass(eq=False, repr=False)
class Rooms:
    """The rooms of all devices that are being made. `room_of` gives a device's memory."""

    _limits: GovernorLimits
    _outbox: GovernorOutbox
    _reservations: Reservations
    _room_of: Callable[[str], FreeRoom]

    def __post_init__(self) -> None:
        self._asked = 0
        self._making: dict[str, _Making] = {}
        self._under_way: dict[int, NeighbourPlace] = {}

    def begin(self, client: int, message: messages.MakeRoom, now: float) -> None:
        """Reserves memory for the operator, and lets the reservation wait if it does not fit. Raises LimitReached if a
        room is being made on the device, or the operator has as many as allowed; DeviceFull if the device is smaller.
        """
        device, room = message.device, self._room_of(message.device)
        other = self._making.get(device)
        if other is not None:
            raise LimitReached(
                f"{rounded_size(other.message.size_bytes)} of room are being made on {device} for client "
                f"{other.client}, and one room is made on a device at a time: wait for its answer"
            )
        self._reservations.check_count(OPERATOR)
        wait_s = min(message.wait_s, self._limits.room_s_max)
        request = messages.ReserveDevice(message.id, device, message.size_bytes, message.for_s, wait_s)
        used_bytes = room.total_bytes - room.free_bytes
        left = deque(place for place in self._limits.neighbours if place.card in ("", device))
        making = _Making(client, message, used_bytes, used_bytes, left)
        making.request = self._reservations.ask(client, request, now, partial(self._told, making))
        if making.request.waits:
            self._making[device] = making

    def end(self, client: int, message: messages.EndRoom, now: float) -> messages.Counted:
        count = self._reservations.end_rooms(message.device, now)
        making = self._making.get(message.device)
        if making is not None:
            count += 1
            ended = DeviceFull("the room was ended before it was made (tensorctl room 0)")
            self._reservations.refuse(making.request, ended)
        return messages.Counted(message.id, count)

    def client_left(self, client: int) -> None:
        """Forgets the client's rooms that are being made. Rooms that were made stay."""
        self._making = {device: making for device, making in self._making.items() if making.client != client}

    def sampled(self, gauge: Gauge, now: float, *, passing: bool) -> None:
        """A new reading of a device, after it was offered to the waiting reservations: the present step may be over.
        `passing`: a pass over its entries is under way."""
        making = self._making.get(gauge.sample.gauge)
        if making is None:
            return
        making.last_bytes = gauge.sample.used_bytes
        if making.asking is None:
            # Enough may be free by this reading, but for what was taken since: the next one shows that.
            if not passing and self._reservations.wanted_bytes(gauge.sample.gauge, gauge.free_bytes):
                self._go_on(making, now)
        elif making.answer is None:
            answer_s = making.asking.answer_s
            if now - making.since >= answer_s + GRACE_S:
                late = NeighbourAnswered(making.asking.number, "failed", f"no answer within {answer_s:g} s")
                making.answer, making.since = late, now
        elif gauge.sample.began_at >= making.since + SETTLE_S:
            self._go_on(making, now)

    def answered(self, event: NeighbourAnswered, now: float) -> None:
        """A neighbour has answered: in its time, or once its step was over, the room was there, or its client has
        left."""
        del self._under_way[event.number]
        for making in list(self._making.values()):
            if making.asking is not None and making.asking.number == event.number and making.answer is None:
                making.answer, making.since = event, now
                if event.outcome == "busy":
                    self._go_on(making, now)

    def check_invariants(self) -> None:
        for device, making in self._making.items():
            assert making.request in self._reservations.waiting(device), "a room that is neither made nor waits"
        names = [place.name for place in self._under_way.values()]
        assert len(names) == len(set(names)), "a neighbour is asked twice at once"

    def _go_on(self, making: _Making, now: float) -> None:
        """The present step is over: asks the next neighbour, or ends the room without one."""
        self._close(making)
        making.before_bytes, making.asking, making.answer = making.last_bytes, None, None
        making.since = now
        while making.left:
            place = making.left.popleft()
            if place not in self._limits.neighbours:
                continue
            if place in self._under_way.values():
                self._note(making, place.name, "failed", 0, "it has not answered since it was asked for another room")
                continue
            self._asked += 1
            making.asking = AskNeighbour(self._asked, place, self._limits.neighbour_answer_s)
            self._under_way[self._asked] = place
            self._outbox.add(making.asking)
            return
        self._reservations.refuse(making.request)

    def _close(self, making: _Making) -> None:
        freed_bytes, asking, answer, why = making.freed_bytes, making.asking, making.answer, ""
        outcome: messages.RoomOutcome = "freed" if freed_bytes else "nothing"
        if answer is not None and answer.outcome != "done":
            outcome, why = "failed" if answer.outcome == "failed" else "left alone", answer.why
            freed_bytes = freed_bytes if answer.outcome == "failed" else 0
        elif answer is not None:
            why = "" if freed_bytes else "it accepted the request, and the card's gauge did not fall"
        elif asking is not None and not freed_bytes:
            outcome, why = "asked", "it had not answered when the room was there, or the wait over"
        elif not freed_bytes:
            room = self._room_of(making.message.device)
            why = f"of {rounded_size(room.cached_bytes)} of tensors {rounded_size(room.pinned_bytes)} are in use"
            if room.silent_bytes:
                why += f", and {rounded_size(room.silent_bytes)} are of processes that do not answer"
            why = why if room.cached_bytes else "no entry is cached on the card"
        self._note(making, CACHED if asking is None else asking.place.name, outcome, freed_bytes, why)

    def _note(self, making: _Making, who: str, outcome: messages.RoomOutcome, freed_bytes: int, why: str) -> None:
        making.steps.append(messages.RoomStep(who, outcome, freed_bytes, why))
        if who != CACHED:
            level = "info" if outcome in ("freed", "left alone", "asked") else "warning"
            more = {"freed_bytes": freed_bytes, **({"why": why} if why else {})}
            self._outbox.log(level, "neighbour asked for memory", neighbour=who, outcome=outcome, **more)

    def _told(self, making: _Making, answer: messages.Reserved | TensordError) -> None:
        message = making.message
        self._making.pop(message.device, None)
        room = self._room_of(message.device)
        if room.total_bytes:
            making.last_bytes = room.total_bytes - room.free_bytes
        if making.asking is not None or making.freed_bytes:
            self._close(making)
        made, lasts_s, missing_bytes, why = True, 0.0, 0, ""
        if isinstance(answer, messages.Reserved):
            lasts_s = answer.lasts_s
        else:
            left_bytes = max(0, room.free_bytes - self._reservations.taken_bytes(message.device))
            made, missing_bytes, why = False, max(0, message.size_bytes - left_bytes), str(answer)
        told = messages.RoomMade(message.id, made, lasts_s, missing_bytes, making.steps, why)
        self._outbox.send(making.client, told)
        self._outbox.announce(
            "room",
            client=making.client,
            device=message.device,
            bytes=message.size_bytes,
            made=made,
            missing_bytes=missing_bytes,
            freed={step.who: step.freed_bytes for step in making.steps},
        )

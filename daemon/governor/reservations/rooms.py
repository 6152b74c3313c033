"""Room on a device, made for an operator: first cached entries leave, then neighbours give memory back, one at a time.

    begin ──→ cached entries leave ──→ ask a neighbour ──→ settle ──→ ask the next one ──→ … ──→ made, or not
                                             ↑ idle, busy, failed │
                                             └────────────────────┘

Owns which neighbour is asked when, and what each step freed. Does not own the reservation, which waits in the queue
from the beginning (reservation_queue), the choice of entries (passes), nor the requests to a neighbour (the actor).

What a step freed is the fall of the device's gauge from its beginning to its end, whatever the neighbour says. Memory
that another process frees or takes meanwhile is in it.

Invariants: a room is answered once, or its client has left. One room is made on a device at a time. A neighbour is
asked once for a room, and never while it is being asked for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from ....errors import DeviceFull, LimitReached, TensordError
from ....ipc.messages import control as messages
from ....ipc.quantities import rounded_size
from ..forms.effects import AskNeighbour
from ..forms.events import NeighbourAnswered
from ..forms.limits import GovernorLimits, NeighbourPlace
from ..forms.outbox import GovernorOutbox
from ..modes.tiers import Gauge
from .queue import FreeRoom, ReservationQueue
from .reservations import OPERATOR, Reservations

CACHED: Final = "cached tensors"
SETTLE_S: Final = 5.0
"""Seconds in which a neighbour's memory must be seen as free, after its answer: some free it after they have answered.
"""
CALM_READINGS: Final = 2
"""Readings without a fall after which a step that has freed memory is over."""
WHY_CHARS_MAX: Final = 300


@dataclass(slots=True)
class _Making:
    """A room that is being made. `before_bytes`: used bytes at the beginning of the present step; `last_bytes`: by the
    last reading. `asking`: the neighbour of the present step, asked under `number`; `answer`: what it answered at
    `answered_at`. `unshown`: by the last reading enough is free: the room waits for what was taken since, which the
    next reading shows."""

    client: int
    message: messages.MakeRoom
    waits: messages.ReserveDevice
    before_bytes: int
    last_bytes: int
    left: deque[NeighbourPlace]
    steps: list[messages.RoomStep] = field(default_factory=list)
    asking: NeighbourPlace | None = None
    number: int = 0
    answer: NeighbourAnswered | None = None
    answered_at: float = 0.0
    calm: int = 0
    unshown: bool = False

    @property
    def freed_bytes(self) -> int:
        """By the present step."""
        return max(0, self.before_bytes - self.last_bytes)

    @property
    def failed(self) -> bool:
        """Whether the present neighbour failed."""
        return self.answer is not None and self.answer.outcome == "failed"


class Rooms:
    """The rooms of all devices that are being made.

    Args:
        gauge_of: gives a device's gauge.
        room_of: gives a device's memory.
        passing: whether a pass over a device's entries is under way.
    """

    def __init__(
        self,
        limits: GovernorLimits,
        outbox: GovernorOutbox,
        queue: ReservationQueue,
        reservations: Reservations,
        *,
        gauge_of: Callable[[str], Gauge | None],
        room_of: Callable[[str], FreeRoom],
        passing: Callable[[str], bool],
    ) -> None:
        self._limits = limits
        self._outbox = outbox
        self._queue = queue
        self._reservations = reservations
        self._gauge_of = gauge_of
        self._room_of = room_of
        self._passing = passing
        self._asked = 0
        self._making: dict[str, _Making] = {}
        self._under_way: dict[int, NeighbourPlace] = {}

    def begin(self, client: int, message: messages.MakeRoom, now: float) -> None:
        """Reserves memory for the operator, and lets the reservation wait if it does not fit.

        Raises:
            LimitReached: a room is being made on the device, or the operator has as many as allowed.
            DeviceFull: the device is smaller.
        """
        device = message.device
        other = self._making.get(device)
        if other is not None:
            raise LimitReached(
                f"{rounded_size(other.message.size_bytes)} of room are being made on {device} for client "
                f"{other.client}, and one room is made on a device at a time: wait for its answer"
            )
        self._reservations.check_count(OPERATOR, 0)
        waits = messages.ReserveDevice(
            message.id, device, message.size_bytes, message.for_s, wait_s=min(message.wait_s, self._limits.room_s_max)
        )
        room = self._room_of(device)
        used_bytes = room.total_bytes - room.free_bytes
        left = deque(place for place in self._limits.neighbours if place.card in ("", device))
        making = self._making[device] = _Making(client, message, waits, used_bytes, used_bytes, left)
        try:
            self._queue.ask(client, waits, room, now, partial(self._told, making))
        except TensordError:
            del self._making[device]
            raise
        making.unshown = not self._queue.wanted_bytes(device, room.free_bytes)

    def end(self, client: int, message: messages.EndRoom, now: float) -> None:
        """Ends the operator's reservations of a device, and a room that is being made on it."""
        count = self._reservations.release_all(OPERATOR, message.device, now)
        making = self._making.get(message.device)
        if making is not None:
            count += 1
            self._queue.end(making.waits, DeviceFull("the room was ended before it was made (tensorctl room 0)"))
        self._outbox.send(client, messages.Counted(message.id, count))

    def client_left(self, client: int) -> None:
        """Forgets the client's rooms that are being made. Rooms that were made stay."""
        self._making = {device: making for device, making in self._making.items() if making.client != client}

    def sampled(self, device: str, now: float) -> None:
        """A new reading of a device, after it was offered to the waiting reservations: the present step may be over."""
        making, gauge = self._making.get(device), self._gauge_of(device)
        if making is None or gauge is None:
            return
        sample = gauge.sample
        fell, making.last_bytes = sample.used_bytes < making.last_bytes, sample.used_bytes
        if making.asking is None:
            if making.unshown:
                making.before_bytes = making.last_bytes
            making.unshown = not self._queue.wanted_bytes(device, sample.total_bytes - sample.used_bytes)
            if not making.unshown and not self._passing(device):
                self._go_on(making)
        elif making.answer is not None and sample.began_at > making.answered_at:
            making.calm = 0 if fell else making.calm + 1
            quiet = making.calm >= CALM_READINGS and (making.failed or making.freed_bytes)
            if quiet or now - making.answered_at >= SETTLE_S:
                self._go_on(making)

    def answered(self, event: NeighbourAnswered, now: float) -> None:
        """A neighbour has answered, or its time is over."""
        place, event = self._under_way.pop(event.number), replace(event, why=event.why[:WHY_CHARS_MAX])
        making = next((each for each in self._making.values() if each.number == event.number), None)
        if making is None:
            # The room was there before the answer, or its client has left.
            if event.outcome == "failed":
                self._log(place, "failed", 0, event.why)
            return
        making.answer, making.answered_at, making.calm = event, now, 0
        if event.outcome == "busy":
            self._go_on(making)

    def check_invariants(self, clients: set[int]) -> None:
        """Asserts what the module's docstring promises."""
        for device, making in self._making.items():
            assert making.client in clients, "a room of a client that left"
            assert self._queue.waits(making.waits), "a room that is neither made nor waits"
            assert making.message.device == device
            if making.asking is not None and making.answer is None:
                assert self._under_way[making.number] == making.asking
        names = [place.name for place in self._under_way.values()]
        assert len(names) == len(set(names)), "a neighbour is asked twice at once"

    # ---- steps

    def _go_on(self, making: _Making) -> None:
        """The present step is over: asks the next neighbour, or ends the room without one."""
        self._close(making)
        making.before_bytes, making.asking, making.answer, making.number = making.last_bytes, None, None, 0
        while making.left:
            place = making.left.popleft()
            if place not in self._limits.neighbours:
                continue
            if place in self._under_way.values():
                self._step(making, place, "failed", 0, "it has not answered since it was asked for another room")
                continue
            self._asked += 1
            making.number, making.asking = self._asked, place
            self._under_way[self._asked] = place
            self._outbox.add(AskNeighbour(self._asked, place, self._limits.neighbour_answer_s))
            return
        self._queue.end(making.waits, self._room_of(making.message.device))

    def _close(self, making: _Making) -> None:
        """Notes what the present step has done."""
        freed_bytes, answer = making.freed_bytes, making.answer
        outcome: messages.RoomOutcome = "freed" if freed_bytes else "nothing"
        if making.asking is None:
            why = "" if freed_bytes else self._why_cached(making.message.device)
            making.steps.append(messages.RoomStep(CACHED, outcome, freed_bytes, why))
            return
        if answer is None:
            why = "" if freed_bytes else "it had not answered when the room was there, or the wait over"
            outcome = "freed" if freed_bytes else "asked"
        elif answer.outcome == "done":
            accepted = "" if freed_bytes else "it accepted the request, and the card's gauge did not fall"
            why = "; ".join(filter(None, [accepted, answer.why]))
        else:
            outcome, why = "failed" if answer.outcome == "failed" else "left alone", answer.why
        self._step(making, making.asking, outcome, freed_bytes if outcome != "left alone" else 0, why)

    def _why_cached(self, device: str) -> str:
        """Why no cached entry left."""
        room = self._room_of(device)
        if not room.cached_bytes:
            return "no entry is cached on the card"
        why = f"of {rounded_size(room.cached_bytes)} of tensors {rounded_size(room.pinned_bytes)} are in use"
        if room.silent_bytes:
            why += f", and {rounded_size(room.silent_bytes)} are of processes that do not answer"
        return why

    def _step(
        self, making: _Making, place: NeighbourPlace, outcome: messages.RoomOutcome, freed_bytes: int, why: str
    ) -> None:
        making.steps.append(messages.RoomStep(place.name, outcome, freed_bytes, why))
        self._log(place, outcome, freed_bytes, why)

    def _log(self, place: NeighbourPlace, outcome: str, freed_bytes: int, why: str) -> None:
        level = "info" if outcome in ("freed", "left alone", "asked") else "warning"
        more = {"why": why} if why else {}
        self._outbox.log(
            level, "neighbour asked for memory", neighbour=place.name, outcome=outcome, freed_bytes=freed_bytes, **more
        )

    def _told(self, making: _Making, answer: messages.Reserved | TensordError) -> None:
        """The reservation was granted or refused: the room is made or not."""
        device, size_bytes = making.message.device, making.message.size_bytes
        del self._making[device]
        gauge = self._gauge_of(device)
        if gauge is not None:
            making.last_bytes = gauge.sample.used_bytes
        if making.asking is not None or making.freed_bytes:
            self._close(making)
        made = isinstance(answer, messages.Reserved)
        left_bytes = max(0, self._room_of(device).free_bytes - self._reservations.taken_bytes(device))
        missing_bytes = 0 if made else max(0, size_bytes - left_bytes)
        lasts_s = answer.lasts_s if isinstance(answer, messages.Reserved) else 0.0
        why = "" if made else str(answer)
        self._outbox.send(
            making.client, messages.RoomMade(making.message.id, made, lasts_s, missing_bytes, making.steps, why)
        )
        self._outbox.announce(
            "room",
            client=making.client,
            device=device,
            bytes=size_bytes,
            made=made,
            missing_bytes=missing_bytes,
            freed={step.who: step.freed_bytes for step in making.steps},
        )

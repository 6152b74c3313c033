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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

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
_LATE: Final = {"done": "asked", "busy": "left alone", "failed": "failed"}
"""The outcome of an answer that no room waits for any more."""


@dataclass(slots=True)
class _Making:
    """A room that is being made. `before_bytes`: used bytes at the beginning of the present step; `last_bytes`: by the
    last reading. `asking`: the neighbour of the present step. `answered_at`: when it answered; `failed`: why not;
    `keeps`: what it said that it keeps. `unshown`: by the last reading enough is free: the room waits for
    what was taken since, which the next reading shows."""

    client: int
    message: messages.MakeRoom
    waits: messages.ReserveDevice
    before_bytes: int
    last_bytes: int
    left: deque[NeighbourPlace]
    steps: list[messages.RoomStep] = field(default_factory=list)
    asking: NeighbourPlace | None = None
    number: int = 0
    answered_at: float | None = None
    failed: str | None = None
    keeps: str = ""
    calm: int = 0
    unshown: bool = False


@dataclass(frozen=True, slots=True)
class _LastAsked:
    """What a neighbour did when it was asked last, at monotonic time `at`. `number`: of the question; 0: none was
    asked."""

    number: int
    outcome: str
    why: str
    freed_bytes: int
    at: float


class Rooms:
    """The rooms of all devices that are being made, and what is known of each neighbour.

    Args:
        gauge_of: gives a device's gauge.
        room_of: gives a device's memory.
        passing: whether a pass over a device's entries is under way.
        clock: gives the time of the present event.
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
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._outbox = outbox
        self._queue = queue
        self._reservations = reservations
        self._gauge_of = gauge_of
        self._room_of = room_of
        self._clock = clock
        self._passing = passing
        self._asked = 0
        self._making: dict[str, _Making] = {}
        self._under_way: dict[int, NeighbourPlace] = {}
        self._known: dict[str, _LastAsked] = {}

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
        making.unshown = self._is_unshown(device, room.free_bytes)

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
        fell = gauge.sample.used_bytes < making.last_bytes
        making.last_bytes = gauge.sample.used_bytes
        if making.asking is None:
            if making.unshown:
                making.before_bytes = making.last_bytes
            making.unshown = self._is_unshown(device, gauge.sample.total_bytes - gauge.sample.used_bytes)
            if not making.unshown and not self._passing(device):
                self._close_cached(making)
                self._ask_next(making)
        elif making.answered_at is not None and gauge.sample.began_at > making.answered_at:
            making.calm = 0 if fell else making.calm + 1
            quiet = making.calm >= CALM_READINGS and (
                making.failed is not None or making.last_bytes < making.before_bytes
            )
            if quiet or now - making.answered_at >= SETTLE_S:
                self._close_asked(making)
                self._ask_next(making)

    def answered(self, event: NeighbourAnswered, now: float) -> None:
        """A neighbour has answered, or its time is over."""
        place = self._under_way.pop(event.number)
        making = next((each for each in self._making.values() if each.number == event.number), None)
        why = event.why[:WHY_CHARS_MAX]
        if making is None:
            # The room was there before the answer, or its client has left.
            known = self._known.get(place.name)
            freed = known is not None and known.number == event.number and known.freed_bytes > 0
            if event.outcome == "failed" or not freed:
                self._note(event.number, place, _LATE[event.outcome], why, 0)
        elif event.outcome == "busy":
            self._step(making, place, "left alone", 0, why)
            self._ask_next(making)
        else:
            making.answered_at, making.calm = now, 0
            making.failed, making.keeps = (why, "") if event.outcome == "failed" else (None, why)

    def status(self, now: float) -> list[dict[str, Any]]:
        """One row for each configured neighbour, in the order in which they are asked."""
        under_way = {place.name for place in self._under_way.values()}
        rows = []
        for place in self._limits.neighbours:
            known = self._known.get(place.name)
            rows.append(
                {
                    "neighbour": place.name,
                    "card": place.card or None,
                    "asking": place.name in under_way,
                    "outcome": "never asked" if known is None else known.outcome,
                    "why": "" if known is None else known.why,
                    "freed_bytes": 0 if known is None else known.freed_bytes,
                    "since_s": None if known is None else now - known.at,
                }
            )
        return rows

    def check_invariants(self, clients: set[int]) -> None:
        """Asserts what the module's docstring promises."""
        for device, making in self._making.items():
            assert making.client in clients, "a room of a client that left"
            assert self._queue.waits(making.waits), "a room that is neither made nor waits"
            assert making.message.device == device
            if making.asking is not None and making.answered_at is None:
                assert self._under_way[making.number] == making.asking
        names = [place.name for place in self._under_way.values()]
        assert len(names) == len(set(names)), "a neighbour is asked twice at once"

    # ---- steps

    def _is_unshown(self, device: str, free_bytes: int) -> bool:
        return not self._queue.wanted_bytes(device, free_bytes)

    def _ask_next(self, making: _Making) -> None:
        making.before_bytes = making.last_bytes
        making.asking, making.answered_at, making.failed, making.keeps = None, None, None, ""
        while making.left:
            place = making.left.popleft()
            if place not in self._limits.neighbours:
                continue
            if place.name in (each.name for each in self._under_way.values()):
                self._step(making, place, "failed", 0, "it has not answered since it was asked for another room")
                continue
            self._asked += 1
            making.number, making.asking = self._asked, place
            self._under_way[self._asked] = place
            self._outbox.add(AskNeighbour(self._asked, place, self._limits.neighbour_answer_s))
            return
        self._queue.end(making.waits, self._room_of(making.message.device))

    def _close_cached(self, making: _Making) -> None:
        freed_bytes = max(0, making.before_bytes - making.last_bytes)
        room = self._room_of(making.message.device)
        why = f"of {rounded_size(room.cached_bytes)} of tensors {rounded_size(room.pinned_bytes)} are in use"
        if room.silent_bytes:
            why += f", and {rounded_size(room.silent_bytes)} are of processes that do not answer"
        if freed_bytes:
            why = ""
        elif not room.cached_bytes:
            why = "no entry is cached on the card"
        making.steps.append(messages.RoomStep(CACHED, "freed" if freed_bytes else "nothing", freed_bytes, why))

    def _close_asked(self, making: _Making) -> None:
        assert making.asking is not None
        outcome: messages.RoomOutcome
        freed_bytes = max(0, making.before_bytes - making.last_bytes)
        if making.failed is not None:
            outcome, why = "failed", making.failed
        elif freed_bytes:
            outcome, why = "freed", making.keeps
        elif making.answered_at is None:
            outcome, why = "asked", "it had not answered when the room was there, or the wait over"
        else:
            outcome, why = "nothing", "it accepted the request, and the card's gauge did not fall"
            why += f"; {making.keeps}" if making.keeps else ""
        self._step(making, making.asking, outcome, freed_bytes, why)

    def _step(
        self, making: _Making, place: NeighbourPlace, outcome: messages.RoomOutcome, freed_bytes: int, why: str
    ) -> None:
        making.steps.append(messages.RoomStep(place.name, outcome, freed_bytes, why))
        self._note(making.number if making.asking is place else 0, place, outcome, why, freed_bytes)

    def _note(self, number: int, place: NeighbourPlace, outcome: str, why: str, freed_bytes: int) -> None:
        if place in self._limits.neighbours:
            self._known[place.name] = _LastAsked(number, outcome, why, freed_bytes, self._clock())
        level = "info" if outcome in ("freed", "left alone", "asked") else "warning"
        more = {"why": why} if why else {}
        self._outbox.log(
            level, "neighbour asked for memory", neighbour=place.name, outcome=outcome, freed_bytes=freed_bytes, **more
        )

    def _told(self, making: _Making, answer: messages.Reserved | TensordError) -> None:
        """The reservation was granted or refused: the room is made or not."""
        device = making.message.device
        del self._making[device]
        gauge = self._gauge_of(device)
        if gauge is not None:
            making.last_bytes = gauge.sample.used_bytes
        if making.asking is not None:
            self._close_asked(making)
        elif making.last_bytes < making.before_bytes:
            self._close_cached(making)
        made = isinstance(answer, messages.Reserved)
        missing_bytes = 0 if made else max(0, making.message.size_bytes - self._left_bytes(device))
        self._outbox.send(
            making.client,
            messages.RoomMade(
                making.message.id,
                made,
                answer.lasts_s if isinstance(answer, messages.Reserved) else 0.0,
                missing_bytes,
                making.steps,
                "" if made else str(answer),
            ),
        )
        self._outbox.announce(
            "room",
            client=making.client,
            device=device,
            bytes=making.message.size_bytes,
            made=made,
            missing_bytes=missing_bytes,
            freed={step.who: step.freed_bytes for step in making.steps},
        )

    def _left_bytes(self, device: str) -> int:
        """The bytes that are neither used nor reserved."""
        return max(0, self._room_of(device).free_bytes - self._reservations.taken_bytes(device))

"""The reservations that wait until memory is free, in order of arrival.

Owns the waiting requests, their deadlines, and their answers. Does not own granted reservations (reservations), which
entries leave for a waiting one (passes), nor the gauges: the caller passes a device's `FreeRoom`.

A request is granted only if no request of its device waits before it, so small ones do not overtake a large one. It
waits for `wait_s`, and is then refused with the state of the device. A granted reservation, and not the wait, makes a
promise: memory is promised once a reading shows it as free.

A daemon that follows another one grants nothing for REATTACH_S: within that time clients attach anew, and say what the
daemon before has granted them. That counts at once, whatever the gauge shows.

Invariants: a request is answered once, or its client has left. A client has at most reservations_max
requests and reservations together. A waiting request has a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ....errors import DeviceFull, TensordError
from ....ipc.messages import control as messages
from ....ipc.quantities import rounded_size
from ...claims.deadlines import Deadlines
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .reservations import OPERATOR, Reservations

REATTACH_S: Final = 2.0
"""Clients try once a second to attach anew."""
_ADVICE: Final = "reserve less, wait longer (wait_s), or release entries"
_ROOM_ADVICE: Final = "ask for less, wait longer (--wait), or end other rooms (tensorctl room 0)"


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """A device's memory. `free_bytes`: by the gauge, without regard to reservations. `calm_bytes`: what can be taken
    with the device still below pressure, promotions under way deducted. `cached_bytes`: of entries; `pinned_bytes` and
    `leaving_bytes`: of those in use, and of those that are ordered away. `silent_bytes`: of those whose owners do not
    answer."""

    total_bytes: int
    free_bytes: int
    calm_bytes: int = 0
    cached_bytes: int = 0
    pinned_bytes: int = 0
    leaving_bytes: int = 0
    silent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    client: int
    message: messages.ReserveDevice
    told: Callable[[messages.Reserved | TensordError], object] | None = None


class ReservationQueue:
    """The waiting requests of all devices by number, the oldest first."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, reservations: Reservations) -> None:
        self._grants_from = -math.inf
        self._limits = limits
        self._outbox = outbox
        self._reservations = reservations
        self._arrived = 0
        self._waiting: dict[int, _Waiting] = {}
        self._timers: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        return len(self._waiting)

    def devices(self) -> list[str]:
        """The devices that requests wait for."""
        return list(dict.fromkeys(waiting.message.device for waiting in self._waiting.values()))

    def count(self, device: str) -> int:
        """The number of waiting requests."""
        return len(self._of(device))

    def waiting_bytes(self, device: str) -> int:
        """The bytes of all waiting requests."""
        return sum(self._waiting[number].message.size_bytes for number in self._of(device))

    def wanted_bytes(self, device: str, free_bytes: int) -> int:
        """How many bytes of entries must leave for the waiting requests.

        Ended reservations and entries that are newer than the reading count as free here: the next reading shows
        whether their memory was taken.
        """
        waiting_bytes = self.waiting_bytes(device)
        return waiting_bytes and max(0, waiting_bytes + self._reservations.active_bytes(device) - free_bytes)

    def follow(self, now: float) -> None:
        """A daemon ran before this one: nothing is granted for REATTACH_S but what its clients hold."""
        self._grants_from = now + REATTACH_S

    def ask(
        self,
        client: int,
        message: messages.ReserveDevice,
        room: FreeRoom,
        now: float,
        told: Callable[[messages.Reserved | TensordError], object] | None = None,
    ) -> None:
        """Grants a reservation, or lets it wait. With `told`, it becomes the operator's, and `told` gets the answer in
        place of the client. The client waits for it all the same.

        Raises:
            LimitReached: the client has as many reservations as allowed; the text names the limit.
            DeviceFull: the device is smaller; or fewer bytes are free, and the request does not wait.
        """
        self._reservations.check_count(client, sum(each.client == client for each in self._waiting.values()))
        waiting, before = _Waiting(client, message, told), self.count(message.device)
        if message.promotes:
            self._check_calm(message, room)
        fits = not before and now >= self._grants_from and self._fits(message, room.free_bytes)
        if message.held or fits:
            self._grant(waiting, now)
        elif message.promotes or not message.wait_s or message.size_bytes > room.total_bytes:
            raise self._full(waiting, room, before, early=now < self._grants_from)
        else:
            self._arrived += 1
            self._waiting[self._arrived] = waiting
            wait_s_max = self._limits.reserve_s_max if told is None else self._limits.room_s_max
            self._timers.set(self._arrived, now + min(message.wait_s, wait_s_max))

    def grant(self, device: str, free_bytes: int, now: float) -> None:
        """Grants the first requests, as far as they fit what the gauge shows as free."""
        for number in self._of(device):
            if now < self._grants_from or not self._fits(self._waiting[number].message, free_bytes):
                return
            self._grant(self._remove(number), now)

    def waits(self, message: messages.ReserveDevice) -> bool:
        """Whether this very request waits."""
        return any(waiting.message is message for waiting in self._waiting.values())

    def end(self, message: messages.ReserveDevice, why: FreeRoom | TensordError) -> None:
        """Refuses a waiting request before its wait is over: because of the state of its device, or with an error."""
        number = next(each for each, waiting in self._waiting.items() if waiting.message is message)
        self._refuse(number, why)

    def expire(self, now: float, most: int, room_of: Callable[[str], FreeRoom]) -> None:
        """Refuses up to `most` requests whose wait is over."""
        if now >= self._grants_from:
            self._grants_from = -math.inf
        for _ in range(most):
            number = self._timers.pop_due(now)
            if number is None:
                break
            self._refuse(number, room_of(self._waiting[number].message.device), early=now < self._grants_from)

    def refuse_all(self, device: str, error: TensordError) -> None:
        """Refuses all requests of a device."""
        for number in self._of(device):
            self._refuse(number, error)

    def client_left(self, client: int) -> None:
        """Forgets the client's requests."""
        for number in [number for number, waiting in self._waiting.items() if waiting.client == client]:
            self._remove(number)

    def next_timer(self) -> float | None:
        """When `expire` is due, and when the first request may be granted."""
        first = self._timers.next_timer()
        return first if first is None or math.isinf(self._grants_from) else min(first, self._grants_from)

    def check_invariants(self, clients: set[int]) -> None:
        """Asserts what the module's docstring promises."""
        self._timers.check_invariants()
        assert all(number in self._timers for number in self._waiting) and len(self._timers) == len(self._waiting)
        assert {waiting.client for waiting in self._waiting.values()} <= clients, "a request of a client that left"

    def _of(self, device: str) -> list[int]:
        return [number for number, waiting in self._waiting.items() if waiting.message.device == device]

    def _fits(self, message: messages.ReserveDevice, free_bytes: int) -> bool:
        return message.size_bytes <= free_bytes - self._reservations.taken_bytes(message.device)

    def _check_calm(self, message: messages.ReserveDevice, room: FreeRoom) -> None:
        device = message.device
        left_bytes = room.calm_bytes - self._reservations.taken_bytes(device) - self.waiting_bytes(device)
        if message.size_bytes > left_bytes:
            raise DeviceFull(
                f"{message.size_bytes} bytes to promote to {device}, and {max(0, left_bytes)} are left below pressure: "
                "use the host tier's copy"
            )

    def _full(self, waiting: _Waiting, room: FreeRoom, before: int, *, early: bool) -> DeviceFull:
        """`before`: the requests that wait before this one. `early`: nothing is granted yet."""
        device, size_bytes = waiting.message.device, waiting.message.size_bytes
        for_room = waiting.told is not None
        said, unit = (rounded_size, "") if for_room else (str, " bytes")
        if for_room and size_bytes > room.total_bytes:
            return DeviceFull(
                f"{said(size_bytes)} are more than the {said(room.total_bytes)} of {device}: ask for less"
            )
        reserved_bytes = self._reservations.bytes_of(device)
        new_bytes = self._reservations.registered.of(device)
        left = said(max(0, room.free_bytes - reserved_bytes - new_bytes))
        new = f", and {said(new_bytes)} of entries are newer than the last reading" if new_bytes else ""
        waits = f", and {before} reservations wait before this one" if before else ""
        if early:
            waits += f", and for {REATTACH_S:g} s after its start a daemon waits for what clients held before it"
        silent = f", {said(room.silent_bytes)} are of processes that do not answer" if room.silent_bytes else ""
        return DeviceFull(
            f"{said(size_bytes)}{unit} to reserve on {device}, and {left} are free ({said(reserved_bytes)} more are "
            f"reserved{new}){waits}; of {said(room.cached_bytes)} cached{unit} {said(room.pinned_bytes)} are pinned"
            f"{silent} and {said(room.leaving_bytes)} are leaving: {_ROOM_ADVICE if for_room else _ADVICE}"
        )

    def _refuse(self, number: int, why: FreeRoom | TensordError, *, early: bool = False) -> None:
        waiting = self._waiting[number]
        if isinstance(why, FreeRoom):
            why = self._full(waiting, why, self._of(waiting.message.device).index(number), early=early)
        self._remove(number)
        if waiting.told is None:
            self._outbox.refuse(waiting.client, waiting.message.id, why)
        else:
            self._outbox.count_refusal(waiting.client, why)
            waiting.told(why)

    def _grant(self, waiting: _Waiting, now: float) -> None:
        if waiting.told is None:
            self._outbox.send(waiting.client, self._reservations.grant(waiting.client, waiting.message, now))
        else:
            waiting.told(self._reservations.grant(OPERATOR, waiting.message, now))

    def _remove(self, number: int) -> _Waiting:
        self._timers.drop(number)
        return self._waiting.pop(number)

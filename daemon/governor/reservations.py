"""Reservations of a device's free memory, so that two clients that read the same gauge do not both take it.

Owns the granted reservations and those that wait until memory is free, with their ends and answers; and what else was
taken since the last reading.

A request is granted only if no request of its device waits before it, so small ones do not overtake a large one. It
waits for `wait_s`, and is then refused with the state of the device. A granted reservation, and not the wait, makes a
promise: memory is promised once a reading shows it as free.

An ended reservation still counts until a reading that was begun after its end: only that reading shows what its owner
has taken meanwhile. So do entries, from their registration on. Of more than `devices_max` devices the oldest is
forgotten: a device whose gauge has vanished never gets another reading.

A daemon that follows another one grants nothing for REATTACH_S: within that time clients attach anew, and say what the
daemon before has granted them. That counts at once, whatever the gauge shows.

Invariants: a request is answered once, or its client has left. A client has at most reservations_max reservations,
those that wait included. Each has an end. A number is never used twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...errors import DeviceFull, LimitReached, TensordError, UnknownOrder
from ...ipc.messages import control as messages
from ...ipc.quantities import rounded_size
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox

OPERATOR: Final = 0
"""The owner of reservations that no client's end ends. No client has this number."""
REATTACH_S: Final = 2.0
"""Clients try once a second to attach anew."""
DUE_MAX: Final = 256
"""Reservations that one Tick ends."""
SUMS_MAX: Final = 64
"""Of unseen bytes. Beyond that the latest two become one, which counts until a reading later than both."""
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


class UnseenBytes:
    """Bytes that were taken since the last reading: sums by device, each of which counts until a reading that was begun
    later."""

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._sums: dict[str, deque[tuple[float, int]]] = {}

    def total(self, device: str) -> int:
        return sum(size_bytes for _, size_bytes in self._sums.get(device, ()))

    def add(self, device: str, size_bytes: int, now: float) -> None:
        if not size_bytes:
            return
        sums = self._sums.setdefault(device, deque())
        if len(sums) == SUMS_MAX:
            size_bytes += sums.pop()[1]
        sums.append((now, size_bytes))
        if len(self._sums) > self._limits.devices_max:
            del self._sums[next(iter(self._sums))]

    def sampled(self, device: str, began_at: float) -> None:
        """Drops the sums from before this reading was begun: the reading shows them."""
        sums = self._sums.get(device, deque())
        while sums and sums[0][0] < began_at:
            sums.popleft()
        if not sums:
            self._sums.pop(device, None)


Told = Callable[[messages.Reserved | TensordError], object]


@dataclass(slots=True, eq=False)
class ReservationRequest:
    """A reservation, or a request that waits for one. `ends_at`: of the reservation, or of the wait. `told`: gets the
    answer in place of the client; the reservation is the operator's once it is granted."""

    number: int
    client: int
    message: messages.ReserveDevice
    told: Told | None
    ends_at: float = math.inf
    waits: bool = True

    @property
    def owner(self) -> int:
        return self.client if self.waits or self.told is None else OPERATOR


class Reservations:
    """The granted and the waiting reservations of all devices, the oldest first. `room_of` gives a device's memory."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox, room_of: Callable[[str], FreeRoom]) -> None:
        self._limits = limits
        self._outbox = outbox
        self._room_of = room_of
        self._grants_from = -math.inf
        self._last = 0
        self._all: dict[int, ReservationRequest] = {}
        self._unseen = UnseenBytes(limits)

    @property
    def granted(self) -> int:
        return sum(not each.waits for each in self._all.values())

    def devices(self) -> list[str]:
        """The devices on which bytes are reserved, or waited for."""
        return list(dict.fromkeys(each.message.device for each in self._all.values()))

    def waited_for(self) -> list[str]:
        return list(dict.fromkeys(each.message.device for each in self._all.values() if each.waits))

    def waiting(self, device: str) -> list[ReservationRequest]:
        return [each for each in self._all.values() if each.waits and each.message.device == device]

    def waiting_bytes(self, device: str) -> int:
        return sum(each.message.size_bytes for each in self.waiting(device))

    def bytes_of(self, device: str) -> int:
        found = (each.message for each in self._all.values() if not each.waits)
        return sum(message.size_bytes for message in found if message.device == device)

    def taken_bytes(self, device: str) -> int:
        """The bytes that are reserved, and those of ended reservations and entries that are newer than the last
        reading."""
        return self.bytes_of(device) + self._unseen.total(device)

    def wanted_bytes(self, device: str, free_bytes: int) -> int:
        """How many bytes of entries must leave for the waiting requests. Ended reservations and entries that are newer
        than the reading count as free here: the next reading shows whether their memory was taken."""
        waiting_bytes = self.waiting_bytes(device)
        return waiting_bytes and max(0, waiting_bytes + self.bytes_of(device) - free_bytes)

    def check_count(self, owner: int) -> None:
        """Raises LimitReached if the owner has as many reservations as allowed, those that wait included."""
        held = sum(each.owner == owner for each in self._all.values())
        if held >= self._limits.reservations_max:
            raise LimitReached(
                f"{held} reservations of this client, and {self._limits.reservations_max} may be (a fixed limit): "
                "release one first"
            )

    def next_timer(self) -> float | None:
        """When `expire` is due, and when the first request may be granted."""
        first = min((each.ends_at for each in self._all.values()), default=None)
        return first if first is None or math.isinf(self._grants_from) else min(first, self._grants_from)

    def check_invariants(self) -> None:
        owners = {each.owner for each in self._all.values()}
        assert owners <= self._outbox.clients.keys() | {OPERATOR}, "of a client that left"
        assert all(each.ends_at < math.inf for each in self._all.values()), "a reservation that would never end"

    def follow(self, now: float) -> None:
        """A daemon ran before this one: nothing is granted for REATTACH_S but what its clients hold."""
        self._grants_from = now + REATTACH_S

    def ask(
        self, client: int, message: messages.ReserveDevice, now: float, told: Told | None = None
    ) -> ReservationRequest:
        """Grants a reservation, or lets it wait. With `told`, it becomes the operator's, and `told` gets the answer in
        place of the client. The client waits for it all the same. Raises LimitReached if the client has as many
        reservations as allowed; DeviceFull if the device is smaller, or fewer bytes are free and the request does not
        wait."""
        self.check_count(client)
        if now >= self._grants_from:
            self._grants_from = -math.inf
        device, room = message.device, self._room_of(message.device)
        left_bytes = room.calm_bytes - self.taken_bytes(device) - self.waiting_bytes(device)
        if message.promotes and message.size_bytes > left_bytes:
            raise DeviceFull(
                f"{message.size_bytes} bytes to promote to {device}, and {max(0, left_bytes)} are left below pressure: "
                "use the host tier's copy"
            )
        asked, before = ReservationRequest(self._last + 1, client, message, told), len(self.waiting(device))
        fits = not before and now >= self._grants_from and self._fits(message, room.free_bytes)
        refused = message.promotes or not message.wait_s or message.size_bytes > room.total_bytes
        if refused and not (message.held or fits):
            raise self._full(asked, room, before)
        self._last = asked.number
        self._all[asked.number] = asked
        if message.held or fits:
            self._grant(asked, now)
        else:
            asked.ends_at = now + min(message.wait_s, self._longest_s(asked))
        return asked

    def release(self, client: int, message: messages.ReleaseReservation, now: float) -> messages.Done:
        """Ends a reservation: the memory was taken, or is not needed. Raises UnknownOrder if this client has no such
        reservation."""
        known = self._all.get(message.reservation)
        if known is None or known.waits or known.owner != client:
            raise UnknownOrder(f"this client has no reservation {message.reservation}: it has ended, or never existed")
        self._end(known, now)
        return messages.Done(message.id)

    def end_rooms(self, device: str, now: float) -> int:
        rooms = [each for each in self._all.values() if each.owner == OPERATOR and each.message.device == device]
        for room in rooms:
            self._end(room, now)
        return len(rooms)

    def refuse(self, asked: ReservationRequest, error: TensordError | None = None) -> None:
        """Refuses a waiting request; without an error because of the state of its device."""
        if error is None:
            device = asked.message.device
            error = self._full(asked, self._room_of(device), self.waiting(device).index(asked))
        del self._all[asked.number]
        if asked.told is None:
            self._outbox.refuse(asked.client, asked.message.id, error)
        else:
            self._outbox.count_refusal(asked.client, error)
            asked.told(error)

    def registered(self, device: str, new_bytes: int, now: float) -> None:
        """Counts memory of a new entry that lies in no reservation."""
        self._unseen.add(device, new_bytes, now)

    def sampled(self, device: str, began_at: float) -> None:
        self._unseen.sampled(device, began_at)

    def grant(self, device: str, free_bytes: int, now: float) -> None:
        """Grants the first requests, as far as they fit what the gauge shows as free."""
        for asked in self.waiting(device):
            if now < self._grants_from or not self._fits(asked.message, free_bytes):
                return
            self._grant(asked, now)

    def expire(self, now: float) -> None:
        """Ends up to DUE_MAX reservations whose time is up, and refuses requests whose wait is over."""
        if now >= self._grants_from:
            self._grants_from = -math.inf
        due = sorted((each for each in self._all.values() if each.ends_at <= now), key=lambda each: each.ends_at)
        for each in due[:DUE_MAX]:
            if each.waits:
                self.refuse(each)
            else:
                self._end(each, now)

    def client_left(self, client: int, now: float) -> None:
        for each in [each for each in self._all.values() if each.owner == client]:
            if each.waits:
                del self._all[each.number]
            else:
                self._end(each, now)

    def _fits(self, message: messages.ReserveDevice, free_bytes: int) -> bool:
        return message.size_bytes <= free_bytes - self.taken_bytes(message.device)

    def _longest_s(self, asked: ReservationRequest) -> float:
        return self._limits.reserve_s_max if asked.told is None else self._limits.room_s_max

    def _grant(self, asked: ReservationRequest, now: float) -> None:
        asked.waits = False
        lasts_s = min(asked.message.for_s, self._longest_s(asked))
        asked.ends_at = now + lasts_s
        answer = messages.Reserved(asked.message.id, asked.number, lasts_s)
        if asked.told is None:
            self._outbox.send(asked.client, answer)
        else:
            asked.told(answer)

    def _end(self, granted: ReservationRequest, now: float) -> None:
        del self._all[granted.number]
        self._unseen.add(granted.message.device, granted.message.size_bytes, now)

    def _full(self, asked: ReservationRequest, room: FreeRoom, before: int) -> DeviceFull:
        """`before`: the requests that wait before this one."""
        device, size_bytes = asked.message.device, asked.message.size_bytes
        said, unit, advice = (str, " bytes", _ADVICE) if asked.told is None else (rounded_size, "", _ROOM_ADVICE)
        if asked.told is not None and size_bytes > room.total_bytes:
            return DeviceFull(
                f"{said(size_bytes)} are more than the {said(room.total_bytes)} of {device}: ask for less"
            )
        reserved_bytes, new_bytes = self.bytes_of(device), self._unseen.total(device)
        left = said(max(0, room.free_bytes - reserved_bytes - new_bytes))
        new = f", and {said(new_bytes)} may have been taken since the last reading" if new_bytes else ""
        waits = f", and {before} reservations wait before this one" if before else ""
        if not math.isinf(self._grants_from):
            waits += f", and for {REATTACH_S:g} s after its start a daemon waits for what clients held before it"
        silent = f", {said(room.silent_bytes)} are of processes that do not answer" if room.silent_bytes else ""
        return DeviceFull(
            f"{said(size_bytes)}{unit} to reserve on {device}, and {left} are free ({said(reserved_bytes)} more are "
            f"reserved{new}){waits}; of {said(room.cached_bytes)} cached{unit} {said(room.pinned_bytes)} are pinned"
            f"{silent} and {said(room.leaving_bytes)} are leaving: {advice}"
        )

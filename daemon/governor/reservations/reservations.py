"""Reservations of a device's free memory, so that two clients that read the same gauge do not both take it.

Owns the granted reservations: client, device, bytes and end; and what else was taken since the last reading. Does not
own the gauges, nor the requests that wait until memory is free (reservation_queue), which also checks that a
reservation fits.

An ended reservation still counts until a reading that was begun after its end: only that reading shows what its owner
has taken meanwhile. So do entries, from their registration on.

Invariant: every reservation has an end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ....errors import LimitReached, UnknownOrder
from ....ipc.messages import control as messages
from ...claims.deadlines import Deadlines
from ..forms.limits import GovernorLimits
from .unseen import UnseenBytes

OPERATOR: Final = 0
"""The owner of reservations that no client's end ends. No client has this number."""


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Bytes of one device that are reserved for one client."""

    client: int
    device: str
    size_bytes: int


class Reservations:
    """Every reservation by its token. A token is never used twice."""

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._last_token = 0
        self._active: dict[int, ReservedMemory] = {}
        self._timers: Deadlines[int] = Deadlines()
        self._ended = UnseenBytes(limits.devices_max)
        self.registered = UnseenBytes(limits.devices_max)
        """Memory of new entries that lies in no reservation."""

    def __len__(self) -> int:
        return len(self._active)

    def bytes_of(self, device: str) -> int:
        """The bytes that count as reserved on a device, ended reservations included."""
        return self.active_bytes(device) + self._ended.of(device)

    def taken_bytes(self, device: str) -> int:
        """The bytes that count as reserved, and those of entries that are newer than the last reading."""
        return self.bytes_of(device) + self.registered.of(device)

    def devices(self) -> set[str]:
        """The devices on which bytes count as reserved."""
        return self._ended.devices().union(reservation.device for reservation in self._active.values())

    def active_bytes(self, device: str) -> int:
        """The bytes of the reservations that have not ended."""
        return sum(each.size_bytes for each in self._active.values() if each.device == device)

    def check_count(self, client: int, waiting: int) -> None:
        """Raises LimitReached if the client has as many reservations as allowed, `waiting` ones included."""
        held = len(self._tokens(client)) + waiting
        if held >= self._limits.reservations_max:
            raise LimitReached(
                f"{held} reservations of this client, and {self._limits.reservations_max} may be (a fixed limit): "
                "release one first"
            )

    def grant(self, client: int, message: messages.ReserveDevice, now: float) -> messages.Reserved:
        """Reserves memory. The caller has checked that so much is free beside `bytes_of`."""
        limits = self._limits
        lasts_s = min(message.for_s, limits.room_s_max if client == OPERATOR else limits.reserve_s_max)
        self._last_token += 1
        token = self._last_token
        self._active[token] = ReservedMemory(client, message.device, message.size_bytes)
        self._timers.set(token, now + lasts_s)
        return messages.Reserved(message.id, token, lasts_s)

    def release(self, client: int, token: int, now: float) -> None:
        """Ends a reservation: the memory was taken, or is not needed.

        Raises:
            UnknownOrder: this client has no such reservation.
        """
        reservation = self._active.get(token)
        if reservation is None or reservation.client != client:
            raise UnknownOrder(f"this client has no reservation {token}: it has ended, or never existed")
        self._end(token, now)

    def release_all(self, client: int, device: str, now: float) -> int:
        """Ends the client's reservations of a device. Returns their number."""
        tokens = [token for token in self._tokens(client) if self._active[token].device == device]
        for token in tokens:
            self._end(token, now)
        return len(tokens)

    def client_left(self, client: int, now: float) -> None:
        """Ends all reservations of the client."""
        for token in self._tokens(client):
            self._end(token, now)

    def sampled(self, device: str, began_at: float) -> None:
        """Takes a reading that was begun at `began_at`: it shows what was taken before."""
        self._ended.sampled(device, began_at)
        self.registered.sampled(device, began_at)

    def expire(self, now: float, most: int) -> None:
        """Ends up to `most` reservations whose time is up."""
        for _ in range(most):
            token = self._timers.pop_due(now)
            if token is None:
                break
            self._end(token, now)

    def next_timer(self) -> float | None:
        """When `expire` is due."""
        return self._timers.next_timer()

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self._timers.check_invariants()
        assert all(token in self._timers for token in self._active), "a reservation that would never end"
        self._ended.check_invariants()
        self.registered.check_invariants()

    def _tokens(self, client: int) -> list[int]:
        return [token for token, reservation in self._active.items() if reservation.client == client]

    def _end(self, token: int, now: float) -> None:
        reservation = self._active.pop(token)
        self._timers.drop(token)
        self._ended.add(reservation.device, reservation.size_bytes, now)

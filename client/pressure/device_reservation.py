"""Reservations of a device's free memory, for one process before it allocates.

Does not own: the account of free bytes. The daemon keeps that for all processes, which never reserve more together than
was free.
Invariants: what was reserved is released once. A new daemon is told of each reservation whose time is not over, with
what is left of that time.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from functools import partial
from typing import Any, Final
from weakref import ref

from msgspec.structs import replace

from ...errors import Unavailable
from ...ipc.messages import control as messages
from ..link.link import SAY_S, Connected, Link
from ..threads.of_process import Releasable
from .modes import GovernorListener

RESERVE_WAIT_S: Final = 5.0
"""How long a reservation waits by default until memory is free."""
_log = logging.getLogger("tensord")


class DeviceReservation(Releasable):
    """Free memory of a device, reserved for this process until `release`, or for `lasts_s` seconds.

    It keeps other processes from reserving the same memory. It allocates nothing.

    Example:
        >>> with cache.reserve_device("card0", 4096) as reservation:
        ...     reservation.size_bytes                              # allocate so many bytes of card0 here
        4096
    """

    _instead = "reserve in the process that allocates"

    def __init__(
        self, link: Link, connected: Connected, device: str, size_bytes: int, answer: messages.Reserved
    ) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.lasts_s = answer.lasts_s
        self._link = link
        self._granted: tuple[Connected, int] | None = (connected, answer.reservation)
        self._ends_at = time.monotonic() + answer.lasts_s
        self._released = False

    def release(self) -> None:
        """Ends the reservation, after the memory was allocated or is not needed. Further calls do nothing."""
        self._released = True
        self._give_back()

    @property
    def left_s(self) -> float:
        """Seconds until it ends by itself; 0 if it has ended."""
        return 0.0 if self._released else max(0.0, self._ends_at - time.monotonic())

    def hold(self, governor: GovernorListener) -> None:
        """Has each new daemon told of the memory, until the end of the reservation. One that was forgotten without a
        release is not held again. For the library."""
        name = object()
        mine = ref(self, lambda _: governor.keep(name, None))

        def tell(connected: Connected) -> None:
            if (reservation := mine()) is not None:
                reservation._hold_again(connected)

        governor.keep(name, tell)

    def _hold_again(self, connected: Connected) -> None:
        device, size_bytes, left_s = self.device, self.size_bytes, self.left_s
        if left_s:
            self._link.ask(
                lambda number: messages.ReserveDevice(number, device, size_bytes, left_s, held=True),
                SAY_S,
                connected=connected,
                then=partial(self._granted_again, connected),
            )

    def _granted_again(self, connected: Connected, asked: Future[Any]) -> None:
        error = asked.exception()
        if error is None:
            self._granted = connected, asked.result().reservation
            if self._released:
                self._give_back()
        elif not isinstance(error, Unavailable):
            _log.warning("the new daemon does not hold %d bytes of %s: %s", self.size_bytes, self.device, error)

    def _give_back(self) -> None:
        granted, self._granted = self._granted, None
        if granted is not None:
            # On its connection only: a reservation ends with its connection.
            connected, number = granted
            self._link.ask(lambda request: messages.ReleaseReservation(request, number), SAY_S, connected=connected)


def reserve(link: Link, request: messages.ReserveDevice, timeout_s: float) -> DeviceReservation:
    """Asks for a reservation, and waits for the answer, `timeout_s` beside the wait of the request, or raises as
    `Client.reserve_device`. What is granted to a caller that waits no more is given back."""
    connected = link.connection
    if connected is None:
        raise link.unavailable()
    limit_s = timeout_s + request.wait_s
    answer = link.answers.wait(
        link.ask(lambda number: replace(request, id=number), limit_s, connected=connected), limit_s
    )
    return DeviceReservation(link, connected, request.device, request.size_bytes, answer)

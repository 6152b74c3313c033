"""Reservations of a device's free memory, for one process before it allocates.

Owns: releasing a reservation exactly once. Does not own: the memory, nor the account of free bytes. The daemon keeps
that account for all processes.
Invariants: two processes never reserve more together than was free (the daemon checks it).
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Self

from ...ipc import messages
from ...ipc.governance import PRIORITY_MAX
from ...ipc.schema import SIZE_BYTES_MAX
from .fields import check_count, check_name, check_seconds
from .link import SAY_S, Connected, Link

RESERVE_WAIT_S: Final = 5.0
"""How long a reservation waits by default until memory is free."""


class DeviceReservation:
    """Free memory of a device, reserved for this process until `release`, or for `lasts_s` seconds.

    It keeps other processes from reserving the same memory. It allocates nothing.

    Example:
        >>> with cache.reserve_device("card0", 4096) as reservation:
        ...     reservation.size_bytes                              # allocate so many bytes of card0 here
        4096
    """

    def __init__(self, link: Link, connected: Connected, size_bytes: int, answer: messages.Reserved) -> None:
        self.size_bytes = size_bytes
        self.lasts_s = answer.lasts_s
        self._link = link
        self._connected = connected
        self._number: int | None = answer.reservation

    def release(self) -> None:
        """Ends the reservation, after the memory was allocated or is not needed. Further calls, or calls without the
        daemon, do nothing.
        """
        number, self._number = self._number, None
        if number is not None:
            # On this connection only: a reservation ends with its connection.
            self._link.ask(
                lambda request: messages.ReleaseReservation(request, number), SAY_S, connected=self._connected
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def reserve(
    link: Link,
    device: str,
    size_bytes: int,
    for_s: float,
    priority: int,
    wait_s: float | None,
    timeout_s: float,
    *,
    promotes: bool = False,
) -> DeviceReservation:
    """See `Client.reserve_device`. `promotes`: for an entry of the host tier; the device must stay below pressure."""
    check_name("device", device)
    size_bytes = check_count("size_bytes", size_bytes, SIZE_BYTES_MAX, least=1)
    lasts_s = check_seconds("for_s", for_s, above_0=True)
    waits_s = min(RESERVE_WAIT_S, timeout_s) if wait_s is None else check_seconds("wait_s", wait_s)
    priority = check_count("priority", priority, PRIORITY_MAX, least=-PRIORITY_MAX)
    timeout_s += waits_s
    connected = link.connection
    if connected is None:
        raise link.unavailable()
    asked: Future[Any] = link.ask(
        lambda number: messages.ReserveDevice(number, device, size_bytes, lasts_s, priority, waits_s, promotes),
        timeout_s,
        connected=connected,
    )
    try:
        return DeviceReservation(link, connected, size_bytes, link.answers.wait(asked, timeout_s))
    except BaseException:
        # The daemon may have granted it meanwhile. Without a release it would last until its time limit.
        asked.add_done_callback(partial(_give_back, link, connected))
        raise


def _give_back(link: Link, connected: Connected, asked: Future[Any]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        number = asked.result().reservation
        link.ask(lambda request: messages.ReleaseReservation(request, number), SAY_S, connected=connected)

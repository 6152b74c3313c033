"""Which reservations a client tells to the next daemon, while several threads get theirs."""

from __future__ import annotations

import threading
from typing import Any, cast

from tensord.client.link.listeners import Connected
from tensord.client.pressure.device_reservation import DeviceReservation, HeldReservations
from tensord.client.pressure.modes import GovernorListener

CONNECTED = cast(Connected, object())


class Granted:
    """A reservation whose time is not over. `while_looked_at` runs when somebody asks for that."""

    def __init__(self) -> None:
        self.told = 0
        self.while_looked_at: Any = lambda: None

    @property
    def left_s(self) -> float:
        self.while_looked_at()
        return 1.0

    def hold_again(self, _: Connected) -> None:
        self.told += 1


class Governor:
    """Takes what is to be told to each new daemon."""

    def __init__(self) -> None:
        self.registrants: list[HeldReservations] = []

    def restore(self, registrant: HeldReservations) -> None:
        self.registrants.append(registrant)

    def new_daemon(self) -> None:
        for each in self.registrants:
            each.register_again(CONNECTED)


def hold(held: HeldReservations, reservation: Granted) -> None:
    held.hold(cast(DeviceReservation, reservation))


def test_a_reservation_that_is_granted_while_another_one_is_noted_is_told_to_the_next_daemon() -> None:
    governor, first, second, third = Governor(), Granted(), Granted(), Granted()
    held = HeldReservations(cast(GovernorListener, governor))
    hold(held, first)

    def meanwhile() -> None:
        first.while_looked_at = lambda: None
        thread = threading.Thread(target=hold, args=(held, second))
        thread.start()
        thread.join()

    first.while_looked_at = meanwhile
    hold(held, third)
    governor.new_daemon()
    assert [first.told, second.told, third.told] == [1, 1, 1]

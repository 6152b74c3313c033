"""Reservations: what was free is given away once, in the order of arrival."""

from __future__ import annotations

from typing import Any

from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, Make, Stand, refused


def reserve(stand: Stand, client: int, size: int, for_s: float = 10.0, **more: Any) -> Any:
    """The answer to a request for MiB."""
    return stand.ask(client, messages.ReserveDevice, GPU, size * MIB, for_s, **more)


def wait(stand: Stand, client: int, request: int, size: int, wait_s: float) -> None:
    stand.say(client, messages.ReserveDevice(request, GPU, size * MIB, 10.0, wait_s=wait_s))


def test_a_reservation_that_expired_counts_until_a_reading_that_began_later(make: Make) -> None:
    stand = make(reserve_s_max=2.0)
    stand.sample(0)
    assert reserve(stand, 1, 1000, 50.0).lasts_s == 2.0
    began_at = stand.now + 1
    stand.pass_time(2.0)
    assert stand.status()["reservations"] == 0
    stand.sample(0, after_s=0.0, began_at=began_at)
    refused(reserve(stand, 2, 1), "DeviceFull")
    stand.sample(0)
    assert isinstance(reserve(stand, 2, 1000), messages.Reserved)


def test_a_reservation_is_released_once_and_by_whoever_made_it(make: Make) -> None:
    stand = make()
    stand.sample(0)
    token = reserve(stand, 1, 10).reservation
    assert f"reservation {token}" in refused(stand.ask(2, messages.ReleaseReservation, token), "UnknownOrder")
    stand.ask(1, messages.ReleaseReservation, token)
    assert f"reservation {token}" in refused(stand.ask(1, messages.ReleaseReservation, token), "UnknownOrder")


def test_a_client_has_no_more_than_reservations_max_those_that_wait_included(make: Make) -> None:
    stand = make(reservations_max=2)
    stand.sample(0)
    first = reserve(stand, 1, 1000)
    wait(stand, 1, 70, 10, wait_s=50.0)
    for wait_s in (0.0, 5.0):
        assert "2 may be (a fixed limit)" in refused(reserve(stand, 1, 1, wait_s=wait_s), "LimitReached")
    stand.ask(1, messages.ReleaseReservation, first.reservation)
    stand.sample(0)
    assert isinstance(reserve(stand, 1, 10), messages.Reserved)


def test_a_gauge_that_shows_more_than_there_is_leaves_nothing_to_reserve(make: Make) -> None:
    stand = make()
    stand.sample(1.1)
    assert "and 0 are free" in refused(reserve(stand, 1, 1), "DeviceFull")


def test_a_small_request_does_not_overtake_a_large_one(make: Make) -> None:
    stand = make()
    stand.sample(950 * MIB)
    wait(stand, 1, 71, 80, wait_s=5.0)
    wait(stand, 2, 72, 10, wait_s=30.0)
    assert "2 reservations wait before this one" in refused(reserve(stand, 3, 10), "DeviceFull")
    stand.pass_time(5.0)
    refused(stand.answers[1][-1], "DeviceFull")
    assert isinstance(stand.answers[2][-1], messages.Reserved)


def test_what_no_device_has_is_refused_at_once_and_a_wait_ends_at_reserve_s_max(make: Make) -> None:
    stand = make(reserve_s_max=7.0)
    stand.sample(0.5)
    refused(reserve(stand, 1, 1001, wait_s=5.0), "DeviceFull")
    wait(stand, 1, 70, 1000, wait_s=1000.0)
    assert len(stand.answers[1]) == 1
    stand.pass_time(7.0)
    refused(stand.answers[1][-1], "DeviceFull")

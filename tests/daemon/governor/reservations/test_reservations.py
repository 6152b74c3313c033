"""Reservations: what was free is given away once, in the order of arrival, and none of what was taken meanwhile."""

from __future__ import annotations

from tensord.daemon.governor.forms.events import FormerDaemonFound
from tensord.daemon.governor.reservations import REATTACH_S, SUMS_MAX
from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, Stand, refused, with_clients


def wait(stand: Stand, client: int, size: int, wait_s: float = 5.0) -> int:
    return stand.begin(client, messages.ReserveDevice, GPU, size * MIB, 10.0, wait_s=wait_s)


def test_a_reservation_that_expired_counts_until_a_reading_that_began_later() -> None:
    stand = with_clients(reserve_s_max=2.0)
    stand.sample(0)
    assert stand.reserve(1, 1000, 50.0).lasts_s == 2.0
    waits = wait(stand, 3, 1, wait_s=50.0)
    began_at = stand.now + 1
    stand.pass_time(2.0)
    refused(stand.answer(3, waits), "DeviceFull")
    assert stand.status()["reservations"] == 0
    stand.sample(0, after_s=0.0, began_at=began_at)
    refused(stand.reserve(2, 1), "DeviceFull")
    stand.sample(0)
    assert isinstance(stand.reserve(2, 1000), messages.Reserved)


def test_a_reservation_is_released_once_and_by_whoever_made_it() -> None:
    stand = with_clients()
    stand.sample(0)
    token = stand.reserve(1, 10).reservation
    assert f"reservation {token}" in refused(stand.ask(2, messages.ReleaseReservation, token), "UnknownOrder")
    stand.ask(1, messages.ReleaseReservation, token)
    assert f"reservation {token}" in refused(stand.ask(1, messages.ReleaseReservation, token), "UnknownOrder")


def test_a_client_has_no_more_than_reservations_max_those_that_wait_included() -> None:
    stand = with_clients(reservations_max=2)
    stand.sample(0)
    first = stand.reserve(1, 1000)
    wait(stand, 1, 10, wait_s=50.0)
    for wait_s in (0.0, 5.0):
        assert "2 may be (a fixed limit)" in refused(stand.reserve(1, 1, wait_s=wait_s), "LimitReached")
    stand.ask(1, messages.ReleaseReservation, first.reservation)
    stand.sample(0)
    assert isinstance(stand.reserve(1, 10), messages.Reserved)


def filled(entries: int = 600) -> Stand:
    """An empty card of 1,000 MiB by its last reading, on which client 1 has registered one entry since."""
    stand = with_clients()
    stand.open(1, 2)
    stand.sample(0)
    stand.now += 0.5
    assert isinstance(stand.register(1, 1, entries * MIB), messages.Registered)
    return stand


def test_memory_of_entries_registered_since_the_reading_is_not_reserved() -> None:
    stand = filled()
    text = refused(stand.reserve(2, 500), "DeviceFull")
    assert f"{400 * MIB} are free" in text and f"{600 * MIB} may have been taken since the last reading" in text
    assert isinstance(stand.reserve(2, 400), messages.Reserved)


def test_what_waits_gets_entries_away_once_a_reading_shows_them_and_no_neighbour_is_asked_before() -> None:
    stand = filled()
    request = stand.begin(2, messages.MakeRoom, GPU, 500 * MIB, 30.0, 30.0)
    stand.sample(0, after_s=0.2, began_at=stand.now - 0.1)
    assert stand.orders() == [] and stand.answer(2, request) is None
    stand.sample(600 * MIB, after_s=0.25)
    stand.carry_out_all(600 * MIB)
    stand.sample(0, after_s=0.25)
    made = stand.answer(2, request)
    assert made.made and not stand.neighbours_asked


def test_an_entry_comes_back_to_a_card_only_if_it_stays_below_pressure_with_what_was_registered() -> None:
    stand = filled(entries=800)
    assert f"{50 * MIB - 1} are left below pressure" in refused(stand.reserve(2, 50, promotes=True), "DeviceFull")
    promoting = stand.reserve(2, 40, promotes=True)
    stand.ask(2, messages.ReleaseReservation, promoting.reservation)
    stand.register(2, 2, 40 * MIB, new_bytes=0)
    assert isinstance(stand.reserve(2, 9, promotes=True), messages.Reserved), "800 + 40 + 9 < 850"
    refused(stand.reserve(2, 1, promotes=True), "DeviceFull")


def test_however_many_entries_are_newer_than_the_reading_all_of_them_count() -> None:
    stand = filled(entries=1)
    for number in range(2, 2 * SUMS_MAX):
        stand.now += 0.001
        stand.register(1, number, MIB)
    left = 1000 - (2 * SUMS_MAX - 1)
    refused(stand.reserve(2, left + 1), "DeviceFull")
    assert isinstance(stand.reserve(2, left), messages.Reserved)


# ---- of a daemon that is gone: its clients tell the next one, which grants nothing to others before


def following() -> tuple[Stand, int]:
    """A daemon that follows another one, on a card of which 1,000 MiB are free; client 2 waits for 700."""
    stand = with_clients()
    stand.do(FormerDaemonFound())
    stand.sample(0, after_s=0.1)
    return stand, wait(stand, 2, 700)


def test_nothing_is_granted_before_clients_of_before_have_said_what_they_hold() -> None:
    stand, request = following()
    room = stand.begin(3, messages.MakeRoom, GPU, 200 * MIB, 30.0, 5.0)
    text = refused(stand.reserve(2, 1), "DeviceFull")
    assert "a daemon waits for what clients held before it" in text
    held = stand.reserve(1, 400, held=True)
    assert isinstance(held, messages.Reserved) and held.lasts_s == 10.0
    stand.pass_time(REATTACH_S)
    assert stand.answer(2, request) is None, "400 of 1,000 are held"
    stand.ask(1, messages.ReleaseReservation, held.reservation)
    stand.sample(0, after_s=0.1)
    assert isinstance(stand.answer(2, request), messages.Reserved) and stand.answer(3, room).made


def test_what_waits_is_granted_once_that_time_is_over_without_another_reading() -> None:
    stand, request = following()
    stand.sample(0, after_s=0.1)
    assert stand.answer(2, request) is None
    stand.pass_time(REATTACH_S)
    assert isinstance(stand.answer(2, request), messages.Reserved)
    assert isinstance(stand.reserve(3, 300), messages.Reserved)


def test_what_a_client_has_held_counts_whatever_the_gauge_shows() -> None:
    stand = with_clients(reserve_s_max=5.0, reservations_max=2)
    for _ in range(2):
        assert stand.reserve(1, 400, held=True).lasts_s == 5.0, "no gauge was read yet"
    refused(stand.reserve(1, 1, held=True), "LimitReached")
    stand.sample(700 * MIB, after_s=0.1)
    refused(stand.reserve(2, 1), "DeviceFull")
    stand.leave(1)
    stand.sample(700 * MIB, after_s=0.1)
    assert isinstance(stand.reserve(2, 300), messages.Reserved)

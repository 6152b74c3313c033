"""Memory that clients have taken since the last reading was begun: nobody else gets it, whatever the gauge shows."""

from __future__ import annotations

from typing import Any

from tensord.daemon.governor.unseen import SUMS_MAX
from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, Make, Stand, refused


def reserve(stand: Stand, client: int, size: int, **more: Any) -> Any:
    """The answer to a request for MiB that does not wait."""
    return stand.ask(client, messages.ReserveDevice, GPU, size * MIB, 30.0, **more)


def filled(make: Make, entries: int = 600, **more: Any) -> Stand:
    """An empty card of 1,000 MiB by its last reading, on which client 1 has registered one entry since."""
    stand = make()
    stand.open(1, 2)
    stand.sample(0)
    stand.now += 0.5
    assert isinstance(stand.register(1, 1, entries * MIB, **more), messages.Registered)
    return stand


def test_memory_of_entries_registered_since_the_reading_is_not_reserved(make: Make) -> None:
    stand = filled(make)
    text = refused(reserve(stand, 2, 500), "DeviceFull")
    assert f"{400 * MIB} are free" in text and f"{600 * MIB} of entries are newer than the last reading" in text
    assert isinstance(reserve(stand, 2, 400), messages.Reserved)


def test_a_waiting_reservation_gets_entries_away_once_a_reading_shows_them(make: Make) -> None:
    stand = filled(make)
    stand.say(2, messages.ReserveDevice(70, GPU, 500 * MIB, 30.0, wait_s=5.0))
    assert stand.orders() == [], "the next reading shows whether they are in the way"
    stand.sample(600 * MIB, after_s=0.25)
    (order,) = stand.orders(1)
    stand.carry_out(1, order, freed_bytes=600 * MIB)
    stand.sample(0, after_s=0.25)
    assert any(isinstance(each, messages.Reserved) for each in stand.answers[2])


def test_room_is_not_asked_of_neighbours_before_a_reading_shows_the_entries_that_are_in_its_way(make: Make) -> None:
    stand = filled(make)
    stand.say(2, messages.MakeRoom(70, GPU, 500 * MIB, 30.0, 30.0))
    stand.sample(0, after_s=0.2, began_at=stand.now - 0.1)
    assert not any(isinstance(each, messages.RoomMade) for each in stand.answers[2])
    stand.sample(600 * MIB, after_s=0.25)
    (order,) = stand.orders(1)
    stand.carry_out(1, order, freed_bytes=600 * MIB)
    stand.sample(0, after_s=0.25)
    (made,) = (each for each in stand.answers[2] if isinstance(each, messages.RoomMade))
    assert made.made and [step.who for step in made.steps] == ["cached tensors"]


def test_an_entry_in_memory_that_was_held_before_counts_only_what_it_has_taken_anew(make: Make) -> None:
    stand = filled(make, new_bytes=100 * MIB)
    assert isinstance(reserve(stand, 2, 900), messages.Reserved)


def test_an_entry_comes_back_to_a_card_only_if_it_stays_below_pressure_with_what_was_registered(make: Make) -> None:
    stand = filled(make, entries=800)
    refused(reserve(stand, 2, 50, promotes=True), "DeviceFull")
    promoting = reserve(stand, 2, 40, promotes=True)
    stand.ask(2, messages.ReleaseReservation, promoting.reservation)
    stand.register(2, 2, 40 * MIB, new_bytes=0)
    assert isinstance(reserve(stand, 2, 9, promotes=True), messages.Reserved), "800 + 40 + 9 < 850"
    refused(reserve(stand, 2, 1, promotes=True), "DeviceFull")


def test_however_many_entries_are_newer_than_the_reading_all_of_them_count(make: Make) -> None:
    stand = filled(make, entries=1)
    for number in range(2, 2 * SUMS_MAX):
        stand.now += 0.001
        stand.register(1, number, MIB)
    left = 1000 - (2 * SUMS_MAX - 1)
    refused(reserve(stand, 2, left + 1), "DeviceFull")
    assert isinstance(reserve(stand, 2, left), messages.Reserved)


def test_of_many_devices_without_a_gauge_the_oldest_are_forgotten(make: Make) -> None:
    stand = make(devices_max=2)
    for device in ("a", "b", "c"):
        held = stand.ask(1, messages.ReserveDevice, device, MIB, 10.0, held=True)
        stand.ask(1, messages.ReleaseReservation, held.reservation)
    assert [row["device"] for row in stand.status()["devices"]] == ["b", "c"]

"""Reservations of a daemon that is gone: its clients tell the next one, which grants nothing to others before."""

from __future__ import annotations

from tensord.daemon.governor.forms.events import FormerDaemonFound
from tensord.daemon.governor.reservations import REATTACH_S
from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, Make, Stand, refused


def following(make: Make) -> Stand:
    """A daemon that follows another one, on a card of which 1,000 MiB are free."""
    stand = make()
    stand.do(FormerDaemonFound())
    stand.sample(0, after_s=0.1)
    return stand


def test_nothing_is_granted_before_clients_of_before_have_said_what_they_hold(make: Make) -> None:
    stand = following(make)
    stand.say(2, messages.ReserveDevice(70, GPU, 700 * MIB, 30.0, wait_s=5.0))
    stand.say(3, messages.MakeRoom(71, GPU, 200 * MIB, 30.0, 5.0))
    text = refused(stand.ask(2, messages.ReserveDevice, GPU, MIB, 30.0), "DeviceFull")
    assert "a daemon waits for what clients held before it" in text
    held = stand.ask(1, messages.ReserveDevice, GPU, 400 * MIB, 10.0, held=True)
    assert isinstance(held, messages.Reserved) and held.lasts_s == 10.0
    stand.pass_time(REATTACH_S)
    assert not any(isinstance(each, messages.Reserved) for each in stand.answers[2]), "400 of 1,000 are held"
    stand.ask(1, messages.ReleaseReservation, held.reservation)
    stand.sample(0, after_s=0.1)
    assert any(isinstance(each, messages.Reserved) for each in stand.answers[2])
    assert any(isinstance(each, messages.RoomMade) and each.made for each in stand.answers[3])


def test_what_waits_is_granted_once_that_time_is_over_without_another_reading(make: Make) -> None:
    stand = following(make)
    stand.say(2, messages.ReserveDevice(70, GPU, 700 * MIB, 30.0, wait_s=5.0))
    stand.pass_time(REATTACH_S)
    assert any(isinstance(each, messages.Reserved) for each in stand.answers[2])
    assert isinstance(stand.ask(3, messages.ReserveDevice, GPU, 300 * MIB, 30.0), messages.Reserved)


def test_what_a_client_has_held_counts_whatever_the_gauge_shows(make: Make) -> None:
    stand = make(reserve_s_max=5.0, reservations_max=2)
    for _ in range(2):
        held = stand.ask(1, messages.ReserveDevice, GPU, 400 * MIB, 10.0, held=True)
        assert isinstance(held, messages.Reserved) and held.lasts_s == 5.0, "no gauge was read yet"
    refused(stand.ask(1, messages.ReserveDevice, GPU, MIB, 10.0, held=True), "LimitReached")
    stand.sample(700 * MIB, after_s=0.1)
    refused(stand.ask(2, messages.ReserveDevice, GPU, MIB, 30.0), "DeviceFull")
    stand.leave(1)
    stand.sample(700 * MIB, after_s=0.1)
    assert isinstance(stand.ask(2, messages.ReserveDevice, GPU, 300 * MIB, 30.0), messages.Reserved)

"""Reservations that make room: which entries leave for them, and what a wait ends with, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensord.daemon.forms.events import Tick
from tensord.daemon.governor.devices.record import SLOW_S
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import Mode

from ..stand import GPU, MIB, OTHER, TOTAL, Stand, key, named, refused, with_clients


class Card:
    """A card of TOTAL bytes: others hold `others` MiB, and client 1 has three idle entries of 100 MiB on it."""

    def __init__(self, others: int = 500, **limits: Any) -> None:
        self.stand = with_clients(**limits)
        self.others = others
        self.stand.open(1, 2)
        for number in (1, 2, 3):
            self.stand.register(1, number, 100 * MIB, tokens=0)
        self.answer = self.stand.answer
        self.sample()

    @property
    def held(self) -> int:
        return int(self.stand.device()["bytes"] // MIB)

    def sample(self, **more: Any) -> None:
        self.stand.sample((self.others + self.held) * MIB, **{"after_s": 0.25, **more})

    def reserve(self, client: int, size: int, wait_s: float = 5.0, **more: Any) -> int:
        request = self.stand.begin(client, messages.ReserveDevice, GPU, size * MIB, 30.0, wait_s, **more)
        self.stand.settle()
        return request

    def carry_out(self) -> None:
        """All open orders are acknowledged, and all their memory comes back."""
        self.stand.carry_out_all(100 * MIB)


@pytest.mark.parametrize(("others", "size", "mode"), [(500, 250, Mode.NORMAL), (100, 700, Mode.RELAXED)])
def test_as_many_entries_leave_as_a_reservation_needs_whether_they_are_idle_or_not(
    others: int, size: int, mode: Mode
) -> None:
    card = Card(others=others)
    request = card.reserve(2, size)
    assert card.answer(2, request) is None
    (order,) = card.stand.orders(1)
    assert len(order.keys) == 1 and order.reason == "reservation" and card.stand.mode() is mode
    assert card.stand.governor.sample_every_s == card.stand.limits.sample_pressed_s
    card.carry_out()
    assert card.answer(2, request) is None, "no reading shows the memory as free yet"
    card.sample()
    assert isinstance(card.answer(2, request), messages.Reserved)
    assert card.stand.device()["reserved_bytes"] == size * MIB
    card.stand.pass_time(5)
    assert len(card.stand.orders(1)) == 1


def test_memory_that_a_reservation_waits_for_is_not_promoted_into() -> None:
    card = Card(others=300)
    card.stand.ask(1, messages.RegisterWorkflow, "w", [messages.AgentStep("a")])
    card.stand.register(1, 4, 100 * MIB, tokens=0, agent="a")
    card.reserve(3, 500)
    card.carry_out()
    for _ in range(3):
        card.sample()
    assert card.stand.orders(1, "promote") == []


# ---- each state of a reservation crossed with what may happen


def has_left(card: Card) -> int:
    request = card.reserve(2, 250)
    card.carry_out()
    return request


def behind(card: Card) -> int:
    card.reserve(3, 400, wait_s=60.0)
    return card.reserve(2, 50)


STATES: dict[str, Callable[[Card], int]] = {
    "waits": lambda card: card.reserve(2, 250),
    "has left": has_left,
    "granted": lambda card: card.reserve(2, 150),
    "behind": behind,
}


def disturb(card: Card, how: str) -> None:
    match how:
        case "carried out":
            for _ in range(3):
                card.carry_out()
                card.sample()
            card.carry_out()
        case "owner dies":
            card.stand.leave(1)
        case "owner is stopped":
            for _ in range(7):
                card.sample()
        case "reloaded":
            card.stand.change_limits(reservations_max=1, reserve_s_max=1.0, pass_share=1.0)
            card.carry_out()
        case "gauge is stale":
            for _ in range(7):
                card.sample(stale=True)
                card.stand.do(Tick())
        case "gauge is gone":
            card.stand.lose()
            return
        case "others fill the card":
            card.others += 150
            card.carry_out()
        case "other card is full":
            card.stand.open(1, device=OTHER)
            card.stand.register(1, 9, 100 * MIB, device=OTHER)
            card.stand.sample(0.99, OTHER, after_s=0.25)
            card.carry_out()
    card.sample(stale=how == "gauge is stale")


# What the reservation has come to after the disturbance: "granted", "waiting", or the code of its refusal.
EXPECTED: dict[str, dict[str, str]] = {
    "carried out": {"waits": "granted", "has left": "granted", "behind": "granted"},
    "owner dies": {"waits": "granted", "has left": "granted", "behind": "granted"},
    "owner is stopped": {"waits": "waiting", "has left": "granted", "behind": "waiting"},
    "reloaded": {"waits": "granted", "has left": "granted", "behind": "waiting"},
    "gauge is stale": {"waits": "waiting", "has left": "waiting", "behind": "waiting"},
    "gauge is gone": {"waits": "NoGauge", "has left": "NoGauge", "behind": "NoGauge"},
    "others fill the card": {"waits": "waiting", "has left": "waiting", "behind": "waiting"},
    "other card is full": {"waits": "granted", "has left": "granted", "behind": "waiting"},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", EXPECTED)
def test_a_reservation_is_granted_waits_or_is_refused_whatever_happens(state: str, how: str) -> None:
    card = Card()
    request = STATES[state](card)
    disturb(card, how)
    answer = card.answer(2, request)
    outcome = {messages.Reserved: "granted", type(None): "waiting"}.get(type(answer)) or answer.code
    assert outcome == EXPECTED[how].get(state, "granted"), "what was granted stays"
    reserved = sum(row["reserved_bytes"] for row in card.stand.status()["devices"])
    assert reserved <= TOTAL
    card.stand.pass_time(61)
    assert card.answer(2, request) is not None, "every request is answered once"
    assert not any(row["waiting_reservations"] for row in card.stand.status()["devices"])


def two_owners(**limits: Any) -> Stand:
    """Client 1 has the entries that go first, client 2 others."""
    stand = with_clients(pass_share=1.0, **limits)
    stand.open(1, 2)
    for number in range(10):
        stand.register(1 if number < 5 else 2, number, 20 * MIB, tokens=0)
        stand.now += 0.01
    return stand


@pytest.mark.parametrize("share", [0.9, 0.94, 0.98])
def test_a_stopped_owner_delays_the_others_orders_by_a_second_and_not_by_ack_s(share: float) -> None:
    stand = two_owners(ack_s=10.0)
    stand.sample(share)
    (order,) = stand.orders(1)
    began, waited = stand.now, 0.0
    while len(order.keys) < 8 and not stand.orders(2):
        stand.sample(share, after_s=0.25)
        waited = stand.now - began
        assert waited < 10
    assert waited <= SLOW_S + 0.25
    if len(order.keys) < 5:
        assert not any(set(each.keys) & set(map(key, range(5))) for each in stand.orders(1)[1:]), (
            "no more to the stopped"
        )


@pytest.mark.parametrize("silent_s", [SLOW_S, 11.0])
def test_entries_of_a_stopped_owner_are_not_called_pinned_nor_leaving(silent_s: float) -> None:
    card = Card(ack_s=10.0)
    request = card.reserve(2, 450, wait_s=60.0)
    assert named(card.stand.orders(None, "offload", "drop")) and card.answer(2, request) is None
    card.stand.pass_time(silent_s)
    text = refused(card.answer(3, card.reserve(3, 450, wait_s=0.0)), "DeviceFull")
    assert (
        f"of {300 * MIB} cached bytes 0 are pinned, {300 * MIB} are of processes that do not answer and 0 are" in text
    )
    card.stand.ask(1, messages.Subscribe)
    card.stand.say(1, messages.MakeRoom(900, GPU, 450 * MIB, 30.0, 0.5))
    card.stand.pass_time(0.6)
    why = next(each for each in card.stand.answers[1] if isinstance(each, messages.RoomMade)).why
    assert "0 B are pinned, 300 MiB are of processes that do not answer and 0 B are leaving" in why

"""Reservations: what was free is given away once, whatever the gauge has not seen yet."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.daemon.core.governor.limits import GovernorLimits
from tensord.daemon.core.governor.reservations import ENDED_MAX, Reservations
from tensord.errors import DeviceFull, LimitReached, UnknownOrder
from tensord.ipc import messages

GPU = "0000:65:00.0"


class Desk:
    """Reservations of one device with so much free by its gauge."""

    def __init__(self, free_bytes: int, **limits: Any) -> None:
        self.reservations = Reservations(GovernorLimits(**limits))
        self.free_bytes = free_bytes

    def reserve(self, client: int, size_bytes: int, now: float, for_s: float = 10.0) -> messages.Reserved:
        message = messages.ReserveDevice(1, GPU, size_bytes, for_s)
        return self.reservations.reserve(client, message, self.free_bytes, now)


def test_two_clients_cannot_reserve_the_same_free_memory() -> None:
    desk = Desk(100)
    desk.reserve(1, 60, 0.0)
    with pytest.raises(
        DeviceFull, match=r"60 bytes to reserve on 0000:65:00\.0, and 40 are free \(60 more are reserved\)"
    ):
        desk.reserve(2, 60, 0.0)
    desk.reserve(2, 40, 0.0)
    desk.reservations.check_invariants()


def test_a_released_reservation_counts_until_a_later_reading() -> None:
    desk = Desk(100)
    token = desk.reserve(1, 100, 0.0).reservation
    desk.reservations.release(1, token, 5.0)
    for began_at in (4.0, 5.0):
        desk.reservations.sampled(GPU, began_at)
        with pytest.raises(DeviceFull, match="0 are free"):
            desk.reserve(2, 1, 6.0)
    desk.reservations.sampled(GPU, 5.5)
    desk.reserve(2, 100, 6.0)


def test_a_reservation_that_expired_counts_until_a_reading_that_began_later() -> None:
    desk = Desk(100, reserve_s_max=2.0)
    assert desk.reserve(1, 100, 0.0, for_s=50.0).lasts_s == 2.0
    assert desk.reservations.next_timer() == 2.0
    desk.reservations.expire(2.0, 10)
    assert len(desk.reservations) == 0
    with pytest.raises(DeviceFull):
        desk.reserve(2, 1, 2.0)
    desk.reservations.sampled(GPU, 3.0)
    assert desk.reservations.bytes_of(GPU) == 0
    assert desk.reservations.devices() == set()


def test_a_reservation_is_released_once_and_by_whoever_made_it() -> None:
    desk = Desk(100)
    token = desk.reserve(1, 10, 0.0).reservation
    with pytest.raises(UnknownOrder, match=f"reservation {token}"):
        desk.reservations.release(2, token, 1.0)
    desk.reservations.release(1, token, 1.0)
    with pytest.raises(UnknownOrder, match=f"reservation {token}"):
        desk.reservations.release(1, token, 1.0)


def test_reservations_end_with_their_client() -> None:
    desk = Desk(100)
    desk.reserve(1, 30, 0.0)
    desk.reserve(1, 30, 0.0)
    desk.reserve(2, 30, 0.0)
    desk.reservations.client_left(1, 1.0)
    assert len(desk.reservations) == 1
    desk.reservations.sampled(GPU, 2.0)
    assert desk.reservations.bytes_of(GPU) == 30
    desk.reservations.check_invariants()


def test_a_client_has_no_more_than_reservations_max() -> None:
    desk = Desk(100, reservations_max=2)
    first = desk.reserve(1, 1, 0.0).reservation
    desk.reserve(1, 1, 0.0)
    with pytest.raises(LimitReached, match="reservations_max is 2"):
        desk.reserve(1, 1, 0.0)
    desk.reserve(2, 1, 0.0)
    desk.reservations.release(1, first, 1.0)
    desk.reserve(1, 1, 1.0)


def test_a_gauge_that_shows_more_than_there_is_leaves_nothing_to_reserve() -> None:
    with pytest.raises(DeviceFull, match="0 are free"):
        Desk(-5).reserve(1, 1, 0.0)


def test_ended_reservations_take_bounded_memory_and_are_freed_by_a_later_reading() -> None:
    desk = Desk(10**6)
    now = 0.0
    for _ in range(10 * ENDED_MAX):
        now += 0.001
        desk.reservations.release(1, desk.reserve(1, 1, now).reservation, now)
        desk.reservations.check_invariants()
    assert desk.reservations.bytes_of(GPU) == 10 * ENDED_MAX
    desk.reservations.sampled(GPU, now)
    assert desk.reservations.bytes_of(GPU) == 9 * ENDED_MAX + 1
    desk.reservations.sampled(GPU, now + 1)
    assert desk.reservations.bytes_of(GPU) == 0


class Card(RuleBasedStateMachine):
    """A real card of which clients take what they reserved, and readings that come late."""

    TOTAL = 100

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(GovernorLimits(reservations_max=4, reserve_s_max=3.0))
        self.now = 0.0
        self.used = 20
        self.shown = self.used
        self.reading: tuple[float, int] | None = None
        self.untaken: dict[int, tuple[int, int, float]] = {}

    def late(self, seconds: float = 0.01) -> float:
        self.now += seconds
        return self.now

    @rule(client=st.integers(1, 3), size=st.integers(1, 60), for_s=st.sampled_from([0.5, 9.0]))
    def reserve(self, client: int, size: int, for_s: float) -> None:
        message = messages.ReserveDevice(1, GPU, size, for_s)
        try:
            granted = self.reservations.reserve(client, message, self.TOTAL - self.shown, self.late())
        except (DeviceFull, LimitReached):
            return
        self.untaken[granted.reservation] = (client, size, self.now + granted.lasts_s)

    @precondition(lambda self: self.untaken)
    @rule(data=st.data(), takes=st.booleans())
    def take_or_leave(self, data: st.DataObject, takes: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.untaken)))
        client, size, _ = self.untaken.pop(token)
        self.used += size if takes else 0
        self.reservations.release(client, token, self.late())

    @precondition(lambda self: self.used > 0)
    @rule(share=st.floats(0, 1))
    def give_back(self, share: float) -> None:
        self.used -= int(self.used * share)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.late(seconds)
        for token, (_, size, ends_at) in list(self.untaken.items()):
            if ends_at <= self.now:
                # Who took it in time has it; the gauge may not have seen it yet.
                self.used += size
                del self.untaken[token]
        self.reservations.expire(self.now, 100)

    @rule(client=st.integers(1, 3))
    def leave(self, client: int) -> None:
        self.untaken = {t: held for t, held in self.untaken.items() if held[0] != client}
        self.reservations.client_left(client, self.late())

    @precondition(lambda self: self.reading is None)
    @rule()
    def begin_reading(self) -> None:
        self.reading = (self.late(), self.used)

    @precondition(lambda self: self.reading is not None)
    @rule()
    def reading_arrives(self) -> None:
        assert self.reading is not None
        began_at, self.shown = self.reading
        self.reading = None
        self.reservations.sampled(GPU, began_at)

    @invariant()
    def nobody_was_promised_what_is_not_there(self) -> None:
        assert self.used + sum(size for _, size, _ in self.untaken.values()) <= self.TOTAL
        self.reservations.check_invariants()


TestCard = Card.TestCase
TestCard.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

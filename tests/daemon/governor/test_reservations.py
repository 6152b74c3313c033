"""Reservations: what was free is given away once, whatever the gauge has not seen yet."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.daemon.core.effects import Send
from tensord.daemon.governor.limits import GovernorLimits
from tensord.daemon.governor.outbox import GovernorClient, GovernorOutbox
from tensord.daemon.reservations.queue import FreeRoom, ReservationQueue
from tensord.daemon.reservations.reservations import Reservations
from tensord.daemon.reservations.unseen import SUMS_MAX
from tensord.errors import DeviceFull, LimitReached, UnknownOrder
from tensord.ipc import messages

GPU = "0000:65:00.0"


class Desk:
    """Reservations of one device with so much free by its gauge."""

    def __init__(self, free_bytes: int, **limits: Any) -> None:
        self.outbox = GovernorOutbox()
        self.outbox.clients.update({client: GovernorClient(f"client {client}", client) for client in (1, 2, 3)})
        self.reservations = Reservations(GovernorLimits(**limits))
        self.queue = ReservationQueue(GovernorLimits(**limits), self.outbox, self.reservations)
        self.free_bytes = free_bytes
        self.total_bytes = 1 << 40

    @property
    def room(self) -> FreeRoom:
        return FreeRoom(self.total_bytes, self.free_bytes)

    def ask(self, client: int, size_bytes: int, now: float, for_s: float = 10.0, **more: Any) -> None:
        """A request; its answer may come later."""
        number = more.pop("number", 1)
        self.queue.ask(client, messages.ReserveDevice(number, GPU, size_bytes, for_s, **more), self.room, now)

    def reserve(self, client: int, size_bytes: int, now: float, for_s: float = 10.0) -> messages.Reserved:
        """A request that does not wait."""
        self.ask(client, size_bytes, now, for_s)
        ((_, answer),) = self.answers()
        assert isinstance(answer, messages.Reserved)
        return answer

    def answers(self) -> list[tuple[int, Any]]:
        """The answers since the last call, with their clients."""
        self.queue.check_invariants({1, 2, 3})
        self.reservations.check_invariants()
        return [(e.client, e.message) for e in self.outbox.take() if isinstance(e, Send)]

    def sample(self, free_bytes: int, now: float) -> None:
        self.free_bytes = free_bytes
        self.reservations.sampled(GPU, now)
        self.queue.grant(GPU, free_bytes, now)


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
    for _ in range(10 * SUMS_MAX):
        now += 0.001
        desk.reservations.release(1, desk.reserve(1, 1, now).reservation, now)
        desk.reservations.check_invariants()
    assert desk.reservations.bytes_of(GPU) == 10 * SUMS_MAX
    desk.reservations.sampled(GPU, now)
    assert desk.reservations.bytes_of(GPU) == 9 * SUMS_MAX + 1
    desk.reservations.sampled(GPU, now + 1)
    assert desk.reservations.bytes_of(GPU) == 0


# ---- waiting


def test_waiting_requests_are_granted_by_priority_and_then_in_the_order_of_their_arrival() -> None:
    desk = Desk(0)
    for number, priority in enumerate((0, 5, 0, 5, -1), 1):
        desk.ask(1, 10, 0.0, number=number, priority=priority, wait_s=30.0)
    granted: list[int] = []
    for now in range(1, 6):
        desk.sample(10 * now, float(now))
        granted += [answer.id for _, answer in desk.answers()]
    assert granted == [2, 4, 1, 3, 5]


def test_a_small_request_does_not_overtake_a_large_one_of_its_priority() -> None:
    desk = Desk(50)
    desk.ask(1, 80, 0.0, number=1, wait_s=5.0)
    desk.ask(2, 10, 0.0, number=2, wait_s=30.0)
    with pytest.raises(DeviceFull, match="2 reservations wait before this one"):
        desk.ask(3, 10, 0.0)
    desk.ask(3, 10, 0.0, number=3, priority=1)
    assert [(client, answer.id) for client, answer in desk.answers()] == [(3, 3)]
    assert desk.queue.next_timer() == 5.0
    desk.queue.expire(5.0, 10, lambda device: desk.room)
    desk.queue.grant(GPU, desk.free_bytes, 5.0)
    (refused_to, refusal), (client, answer) = desk.answers()
    assert (refused_to, refusal.id, refusal.code) == (1, 1, "DeviceFull")
    assert (client, answer.id) == (2, 2)


def test_a_refusal_says_how_much_is_free_cached_pinned_and_leaving() -> None:
    desk = Desk(40)
    desk.ask(1, 90, 0.0, wait_s=5.0)
    desk.queue.expire(5.0, 10, lambda device: FreeRoom(100, 40, 25, 60, 30, 20))
    ((_, refusal),) = desk.answers()
    assert "90 bytes to reserve" in refusal.text and "40 are free" in refusal.text
    assert "of 60 cached bytes 30 are pinned and 20 are leaving" in refusal.text


def test_what_no_device_has_is_refused_at_once_and_a_wait_ends_at_reserve_s_max() -> None:
    desk = Desk(40, reserve_s_max=7.0)
    desk.total_bytes = 100
    with pytest.raises(DeviceFull):
        desk.ask(1, 101, 0.0, wait_s=5.0)
    desk.ask(1, 100, 0.0, wait_s=1000.0)
    assert desk.queue.next_timer() == 7.0


def test_waiting_requests_count_for_the_limit_and_end_with_their_client() -> None:
    desk = Desk(10, reservations_max=2)
    desk.reserve(1, 10, 0.0)
    desk.ask(1, 10, 0.0, wait_s=5.0)
    with pytest.raises(LimitReached, match="reservations_max is 2"):
        desk.ask(1, 10, 0.0, wait_s=5.0)
    desk.queue.client_left(1)
    desk.reservations.client_left(1, 1.0)
    assert len(desk.queue) == 0 and desk.queue.next_timer() is None
    desk.sample(10, 2.0)
    assert desk.answers() == []


class Card(RuleBasedStateMachine):
    """A real card of which clients take what they reserved, and readings that come late."""

    TOTAL = 100

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(0, reservations_max=4, reserve_s_max=3.0)
        self.desk.total_bytes = self.TOTAL
        self.reservations = self.desk.reservations
        self.now = 0.0
        self.requests = 0
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.used = 20
        self.shown = self.used
        self.reading: tuple[float, int] | None = None
        self.untaken: dict[int, tuple[int, int, float]] = {}

    def late(self, seconds: float = 0.01) -> float:
        self.now += seconds
        return self.now

    def hear(self) -> None:
        """Takes the answers. Of the requests that wait, the first by priority and arrival is answered first."""
        for client, answer in self.desk.answers():
            assert self.waiting[answer.id][0] == client, "answered twice, or not asked"
            _, size, priority = self.waiting.pop(answer.id)
            if isinstance(answer, messages.Reserved):
                before = [n for n, (_, _, p) in self.waiting.items() if (-p, n) < (-priority, answer.id)]
                assert not before, "a request was overtaken"
                self.untaken[answer.reservation] = (client, size, self.now + answer.lasts_s)

    @rule(
        client=st.integers(1, 3),
        size=st.integers(1, 60),
        for_s=st.sampled_from([0.5, 9.0]),
        priority=st.sampled_from([0, 0, 1, -1]),
        wait_s=st.sampled_from([0.0, 0.5, 2.0, 9.0]),
    )
    def reserve(self, client: int, size: int, for_s: float, priority: int, wait_s: float) -> None:
        self.desk.free_bytes = self.TOTAL - self.shown
        self.requests += 1
        self.waiting[self.requests] = (client, size, priority)
        more = {"number": self.requests, "priority": priority, "wait_s": wait_s}
        try:
            self.desk.ask(client, size, self.late(), for_s, **more)
        except (DeviceFull, LimitReached):
            del self.waiting[self.requests]
        self.hear()

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
        self.desk.queue.expire(self.now, 100, lambda device: self.desk.room)
        self.desk.queue.grant(GPU, self.TOTAL - self.shown, self.now)
        self.hear()

    @rule(client=st.integers(1, 3))
    def leave(self, client: int) -> None:
        self.untaken = {t: held for t, held in self.untaken.items() if held[0] != client}
        self.waiting = {n: held for n, held in self.waiting.items() if held[0] != client}
        self.desk.queue.client_left(client)
        self.reservations.client_left(client, self.late())
        self.desk.queue.grant(GPU, self.TOTAL - self.shown, self.now)
        self.hear()

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
        self.desk.queue.grant(GPU, self.TOTAL - self.shown, self.now)
        self.hear()

    @invariant()
    def nobody_was_promised_what_is_not_there(self) -> None:
        assert self.used + sum(size for _, size, _ in self.untaken.values()) <= self.TOTAL
        self.reservations.check_invariants()
        assert len(self.desk.queue) == len(self.waiting)


TestCard = Card.TestCase
TestCard.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

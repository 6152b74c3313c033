"""Owners that returned nothing to the driver, and entries that stayed since they were in use: who is asked next, and
when they are asked again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tensord.daemon.governor.devices.record import WAITING_RETRY_S
from tensord.ipc.messages.modes import Mode

from .registry import GPU, Registry, ordered

READING_S = 0.25


class Two(Registry):
    """Entries 1 to 10 of 10 bytes each; 1 to 5 are client 1's, and leave first."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**{"pass_share": 1.0, "normal_idle_s": 3600.0, **limits})
        for each in range(1, 11):
            self.register(1 if each < 6 else 2, each)
            self.now += 1

    def reading(self, used: int, mode: Mode = Mode.NORMAL, **more: Any) -> list[int]:
        """The gauge is read READING_S after the last event; the entries that are ordered away."""
        self.now += READING_S - 1
        return ordered(self.sample(used, 1000, mode, **more))

    def asked(self, seconds: float, **more: Any) -> list[float]:
        """Readings come for so long, and each order is carried out without a byte freed; the times of the orders."""
        began, at = self.now, []
        while self.now < began + seconds:
            if self.reading(800, **more):
                at.append(self.now - began)
            self.carry_out()
        return at


# ---- owners that return nothing


@pytest.mark.parametrize(("mode", "wanted"), [(Mode.NORMAL, 20), (Mode.PRESSURE, 0), (Mode.EMERGENCY, 0)])
def test_after_a_pass_in_vain_the_entries_of_other_owners_leave(mode: Mode, wanted: int) -> None:
    registry = Two()
    used = 831 if wanted else 867
    first = registry.reading(used, mode, wanted_bytes=wanted)
    assert first == [1, 2]
    registry.carry_out(freed=0)
    assert registry.reading(used, mode, wanted_bytes=wanted) == [6, 7]
    assert "returned nothing to the driver" in registry.status["stuck"]
    registry.carry_out(freed=20)
    assert registry.reading(used - 20, mode, wanted_bytes=0) == [] and not registry.status["stuck"]


def test_an_owner_is_left_alone_for_retry_s() -> None:
    registry = Two(retry_s=3.0)
    registry.leave(2)
    at = registry.asked(20.0, wanted_bytes=10)
    assert len(at) == 5 and all(3 <= later - earlier <= 3 + 3 * READING_S for earlier, later in pairwise(at))


def test_an_owner_that_returned_something_is_asked_again_at_once() -> None:
    registry = Two()
    registry.leave(2)
    assert registry.reading(800, wanted_bytes=20) == [1, 2]
    (_, order), *_ = registry.orders
    registry.acknowledge(1, order.order, dropped=[], offloaded=order.keys[:1])
    registry.acknowledge(1, order.order, offloaded=order.keys[1:], freed=10)
    registry.orders.clear()
    assert registry.reading(800, wanted_bytes=10) == [3] and not registry.status["stuck"]


def test_another_mode_asks_every_owner_again() -> None:
    registry = Two()
    registry.leave(2)
    assert len(registry.asked(4.0, wanted_bytes=10)) == 1
    registry.devices.mode_changed(GPU)
    assert registry.reading(970, Mode.EMERGENCY) == [2, 3, 4, 5]


# ---- what a pass has shown


def test_a_pass_that_shows_nothing_leaves_the_device_stuck() -> None:
    """One by which no entry left, and one that took idle entries below pressure."""
    registry = Two(relaxed_idle_s=600.0)
    registry.reading(855, Mode.PRESSURE)
    registry.carry_out(freed=0)
    assert registry.reading(855, Mode.PRESSURE) == [6]
    stuck = registry.status["stuck"]
    registry.carry_out(keep=True)
    registry.now += 900.0
    assert registry.reading(849, Mode.RELAXED) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    registry.carry_out(freed=0)
    assert registry.reading(849, Mode.RELAXED) == []
    assert stuck and registry.status["stuck"] == stuck


def test_memory_that_came_back_and_was_taken_meanwhile_is_not_returned_in_vain() -> None:
    registry = Two()
    assert registry.reading(900, wanted_bytes=20) == [1, 2]
    (_, order), *_ = registry.orders
    registry.orders.clear()
    registry.acknowledge(1, order.order, offloaded=order.keys[:1])
    assert registry.reading(890, wanted_bytes=10) == [], "the pass is under way"
    registry.acknowledge(1, order.order, offloaded=order.keys[1:])
    assert registry.reading(900, wanted_bytes=20) == [3, 4]
    assert not registry.status["stuck"]


# ---- entries in use


def test_an_entry_that_was_in_use_leaves_soon_after_if_a_reservation_waits() -> None:
    registry = Two(retry_s=30.0)
    assert registry.reading(800, wanted_bytes=100) == list(range(1, 11))
    registry.carry_out(keep=True)
    kept_at = registry.now
    assert registry.reading(800) == []
    while not (again := registry.reading(800, wanted_bytes=100)):
        assert registry.now < kept_at + WAITING_RETRY_S
    assert registry.now >= kept_at + WAITING_RETRY_S and again == list(range(1, 11))

"""The host tier: the ring gives back what is over, once, and takes it back when there is room, without see-sawing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.core.host_memory import Pressed
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from .stand import MIB, TOTAL, Make, Stand


class Ring:
    """A store that does what it is asked for, on a host where others use memory too."""

    def __init__(self, stand: Stand, wanted: int, others: int) -> None:
        self.stand = stand
        self.wanted = self.resident = wanted
        self.others = others
        self.pinned = 0
        self._carried_out = 0
        stand.holds(self.resident, self.wanted)

    def carry_out(self) -> None:
        """Whatever it was asked for last; tells the governor if there was anything."""
        asked, self._carried_out = len(self.stand.pressed) - self._carried_out, len(self.stand.pressed)
        if asked:
            most = self.stand.press.resident_bytes_max
            self.resident = self.wanted if most is None else max(self.pinned, min(most, self.wanted))
            self.stand.holds(self.resident, self.wanted)

    def read(self, times: int = 1) -> None:
        """The gauge is read, and the ring follows."""
        for _ in range(times):
            self.stand.sample(self.others + self.resident, HOST_GAUGE)
            self.carry_out()


@pytest.fixture
def stand(make: Make) -> Stand:
    return make()


def test_the_ring_gives_back_what_is_over_the_threshold_in_whole_mib_and_no_more(stand: Stand) -> None:
    ring = Ring(stand, wanted=500 * MIB, others=400 * MIB - 12345)
    ring.read()
    assert stand.pressed == [Pressed(450 * MIB)]
    ring.read(5)
    assert stand.pressed == [Pressed(450 * MIB)]


def test_memory_that_is_given_back_already_is_not_asked_for_again(stand: Stand) -> None:
    stand.holds(500 * MIB, 500 * MIB)
    stand.sample(0.90, HOST_GAUGE)
    assert stand.pressed == [Pressed(450 * MIB)]
    stand.sample(0.90, HOST_GAUGE)  # the store has not answered
    stand.holds(480 * MIB, 500 * MIB, settled=False)
    stand.sample(0.88, HOST_GAUGE)  # nor has it finished
    began_at = stand.now + 1
    stand.now = began_at + 1
    stand.holds(450 * MIB, 500 * MIB)
    stand.sample(0.87, HOST_GAUGE, began_at=began_at)  # begun before it was done
    assert stand.pressed == [Pressed(450 * MIB)]
    stand.sample(0.87, HOST_GAUGE)
    assert stand.pressed == [Pressed(450 * MIB), Pressed(430 * MIB)]


def test_the_ring_takes_back_as_much_as_leaves_the_host_below_pressure_and_then_all(stand: Stand) -> None:
    ring = Ring(stand, wanted=500 * MIB, others=450 * MIB)
    ring.read(2)
    assert stand.press.resident_bytes_max == 400 * MIB
    ring.others = 400 * MIB
    ring.read(4)
    assert stand.mode(HOST_GAUGE) is Mode.NORMAL
    assert stand.press.resident_bytes_max == 429 * MIB
    assert ring.others + ring.resident < 0.83 * TOTAL
    ring.others = 100 * MIB
    ring.read(4)
    assert stand.press == Pressed()
    assert ring.resident == ring.wanted


def test_room_that_is_being_taken_back_is_not_given_twice(stand: Stand) -> None:
    ring = Ring(stand, wanted=800 * MIB, others=110 * MIB)
    ring.read(2)
    ring.others = 50 * MIB
    stand.sample(ring.others + ring.resident, HOST_GAUGE)
    stand.sample(ring.others + ring.resident, HOST_GAUGE)
    asked = stand.press.resident_bytes_max
    assert asked == 779 * MIB
    began_at = stand.now + 1
    stand.now = began_at + 1
    used_before = ring.others + ring.resident
    ring.carry_out()
    stand.sample(used_before, HOST_GAUGE, began_at=began_at)
    assert stand.press.resident_bytes_max == asked


def test_emergency_refuses_at_once_and_says_why_and_accepts_again_when_it_ends(stand: Stand) -> None:
    ring = Ring(stand, wanted=100 * MIB, others=300 * MIB)
    ring.read()
    ring.others = 870 * MIB
    stand.sample(ring.others + ring.resident, HOST_GAUGE)
    press = stand.press
    assert press.refuse
    assert "97.0%" in press.reason and "96.0%" in press.reason
    assert press.resident_bytes_max == 0
    ring.carry_out()
    ring.others = 920 * MIB
    ring.read(2)
    assert stand.mode(HOST_GAUGE) is Mode.CRITICAL
    assert (stand.press.refuse, stand.press.reason) == (False, "")


def test_emergency_is_sent_though_the_store_is_still_at_work(stand: Stand) -> None:
    stand.holds(500 * MIB, 500 * MIB)
    stand.sample(0.90, HOST_GAUGE)
    stand.sample(0.97, HOST_GAUGE)
    assert stand.press.refuse
    assert stand.press.resident_bytes_max == 450 * MIB


def test_emergency_is_sent_to_the_store_before_its_first_report(stand: Stand) -> None:
    stand.sample(0.97, HOST_GAUGE)
    assert stand.press.refuse and stand.press.resident_bytes_max is None


def test_a_gauge_that_is_gone_leaves_no_pressure_behind(stand: Stand) -> None:
    ring = Ring(stand, wanted=500 * MIB, others=470 * MIB)
    ring.read()
    assert stand.press.refuse and stand.press.resident_bytes_max is not None
    stand.lose(HOST_GAUGE)
    assert stand.press == Pressed()


def test_a_stale_gauge_asks_for_nothing(stand: Stand) -> None:
    ring = Ring(stand, wanted=500 * MIB, others=300 * MIB)
    ring.read()
    for _ in range(4):
        stand.sample(0.99, HOST_GAUGE, stale=True)
    assert stand.pressed == []


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.integers(0, 900).map(lambda n: n * MIB),
    others=st.lists(st.integers(0, 1100 * MIB), min_size=1, max_size=8),
    pinned_share=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_with_any_use_by_others_the_ring_settles_and_regrows(
    wanted: int, others: list[int], pinned_share: float
) -> None:
    stand = Stand()
    ring = Ring(stand, wanted=wanted, others=0)
    ring.pinned = int(wanted * pinned_share)
    for used in others:
        ring.others = used
        ring.read(8)
        before = len(stand.pressed)
        ring.read(8)
        assert len(stand.pressed) == before, "it never comes to rest"
        over = used + ring.resident - int(0.85 * TOTAL)
        assert over <= 0 or ring.resident == ring.pinned, "it could give more back"
        stand.check()
    ring.others = 0
    ring.read(8)
    if wanted < 0.83 * TOTAL:
        assert stand.press == Pressed()
        assert ring.resident == wanted

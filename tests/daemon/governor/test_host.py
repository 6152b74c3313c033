"""The host tier: the ring gives back what is over, and takes it back, without see-sawing."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensord.daemon.forms.events import Pressed
from tensord.ipc.messages.modes import HOST_GAUGE, Mode

from .stand import MIB, TOTAL, Stand, with_clients


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

    def report_half(self) -> None:
        """It tells that it is at work on it."""
        self._carried_out = -1
        self.stand.holds(self.resident, self.wanted, settled=False)

    def read(self, times: int = 1) -> None:
        """The gauge is read, and the ring follows."""
        for _ in range(times):
            self.stand.sample(self.others + self.resident, HOST_GAUGE)
            self.carry_out()


@pytest.fixture
def stand() -> Stand:
    return with_clients()


def test_emergency_refuses_at_once_and_says_why_and_accepts_again_when_it_ends(stand: Stand) -> None:
    ring = Ring(stand, wanted=100 * MIB, others=300 * MIB)
    ring.read()
    ring.others = 870 * MIB
    stand.sample(ring.others + ring.resident, HOST_GAUGE)
    assert stand.press.refuse and stand.press.resident_bytes_max == 0
    assert "97.0%" in stand.press.reason and "96.0%" in stand.press.reason
    ring.carry_out()
    ring.others = 920 * MIB
    ring.read(2)
    assert stand.mode(HOST_GAUGE) is Mode.CRITICAL
    assert (stand.press.refuse, stand.press.reason) == (False, "")


@pytest.mark.parametrize("reported", [True, False])
def test_emergency_waits_neither_for_the_store_s_work_nor_for_its_first_report(stand: Stand, reported: bool) -> None:
    if reported:
        stand.holds(500 * MIB, 500 * MIB)
        stand.sample(0.90, HOST_GAUGE)
    stand.sample(0.97, HOST_GAUGE)
    assert stand.press.refuse
    assert stand.press.resident_bytes_max == (450 * MIB if reported else None)


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.integers(0, 900).map(lambda n: n * MIB),
    others=st.lists(
        st.tuples(st.integers(0, 1100 * MIB), st.sampled_from(["settled", "at work", "begun before"])), min_size=1
    ),
    pinned_share=st.sampled_from([0.0, 0.0, 0.3]),
)
@example(500 * MIB, [(400 * MIB, "begun before"), (20 * MIB, "begun before")], 0.0)
@example(500 * MIB, [(400 * MIB, "at work"), (20 * MIB, "at work")], 0.0)
def test_with_any_use_by_others_the_ring_settles_and_regrows_and_nothing_is_asked_for_twice(
    wanted: int, others: list[tuple[int, str]], pinned_share: float
) -> None:
    """Whether the store has done what it was asked for before the reading, does it afterwards, or is still at work."""
    stand = Stand()
    ring = Ring(stand, wanted=wanted, others=0)
    ring.pinned = int(wanted * pinned_share)
    for used, how in others:
        ring.others = used
        for _ in range(3):
            limit, before, began_at = stand.press.resident_bytes_max, ring.resident, stand.now + 1
            if how == "at work":
                ring.report_half()
            elif how == "begun before":
                stand.now += 2
                ring.carry_out()
            stand.sample(used + before, HOST_GAUGE, after_s=2.0, began_at=began_at)
            most = stand.press.resident_bytes_max
            if most in (None, limit):
                continue
            assert most % MIB == 0
            if most < ring.resident:
                assert most == 0 or most + used > 0.85 * TOTAL - MIB, "more than what is over"
            else:
                assert most + used < 0.83 * TOTAL, "the host would be under pressure again"
        ring.read(8)
        at_rest = len(stand.pressed)
        ring.read(8)
        assert len(stand.pressed) == at_rest, "it never comes to rest"
        over = used + ring.resident - int(0.85 * TOTAL)
        assert over <= 0 or ring.resident == ring.pinned, "it could give more back"
        stand.check()
    ring.others = 0
    ring.read(8)
    if wanted < 0.83 * TOTAL:
        assert stand.press == Pressed()
        assert ring.resident == wanted

"""Governor and store together, cores only: what one asks for the other does and says, and neither waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.forms.effects import Effect as StoreEffect
from tensord.daemon.forms.effects import HostHolds
from tensord.daemon.forms.events import Pressed
from tensord.ipc.messages.modes import HOST_GAUGE
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

from ..core.stand import Stand as StoreStand
from .stand import MIB, Stand

ENTRIES = 16
RING = ENTRIES * MIB
HOST = 100 * MIB


class Store(StoreStand):
    """Keeps all that it says of its memory."""

    def take(self, effects: list[StoreEffect]) -> None:
        self.said: list[HostHolds] = [
            *getattr(self, "said", []),
            *(e for e in effects if isinstance(e, HostHolds)),
        ]
        super().take(effects)


class Machine:
    """A host of 100 MiB with a ring of 16, full of entries of a MiB, and others that use memory."""

    def __init__(self) -> None:
        self.governor = Stand()
        self.store = Store(RING)
        self.store.join(1)
        for number in range(ENTRIES):
            assert self.store.put(number, MIB - SPAN_HEADER_BYTES) == "stored"
        self.others = 0
        self._carried_out = 0

    def read(self, times: int = 1) -> None:
        for _ in range(times):
            self.pass_on()
            used = self.others + self.store.store.status()["resident_bytes"]
            self.governor.sample(used, HOST_GAUGE, HOST)
            self.store.now = self.governor.now
            self.pass_on()

    def pass_on(self) -> None:
        """What each says to the other, until both are silent."""
        while self.store.said or len(self.governor.pressed) > self._carried_out:
            for press in self.governor.pressed[self._carried_out :]:
                self._carried_out += 1
                self.store.do(press)
                self.store.settle()
            said, self.store.said = self.store.said, []
            for holds in said:
                self.governor.holds(holds.resident_bytes, holds.wanted_bytes, settled=holds.settled)

    def check(self) -> None:
        self.governor.check()
        self.store.check()

    def is_unpressed(self) -> bool:
        status = self.store.store.status()
        return self.governor.press == Pressed() and status["resident_bytes"] == RING


def test_pressure_on_a_ring_that_could_give_nothing_back_ends() -> None:
    machine = Machine()
    views = [machine.store.pin(number) for number in range(ENTRIES)]
    machine.read(2)
    machine.others = 82 * MIB
    machine.read(6)
    assert machine.governor.press.refuse
    assert machine.store.put(99, MIB - SPAN_HEADER_BYTES) == "UnderPressure"
    machine.others = 10 * MIB
    machine.read(8)
    assert machine.is_unpressed()
    assert len(machine.store.stored()) == len(views)
    machine.check()


@settings(max_examples=15, deadline=None)
@given(others=st.lists(st.integers(0, 110), max_size=6), pinned=st.integers(0, ENTRIES), times=st.integers(1, 4))
def test_the_ring_is_whole_again_after_other_programs_free_their_memory(
    others: list[int], pinned: int, times: int
) -> None:
    machine = Machine()
    for number in range(pinned):
        machine.store.pin(number)
    for used in others:
        machine.others = used * MIB
        machine.read(times)
        machine.check()
    machine.others = 0
    machine.read(10)
    assert machine.is_unpressed()
    machine.check()

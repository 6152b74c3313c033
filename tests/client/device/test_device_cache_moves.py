"""What goes in a move, and what stays: each case by itself, and with the daemon's core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tensord.client.device.entries import DeviceEntries, DeviceEntry, DeviceLease
from tensord.client.device.moves import MoveResult, Moves
from tensord.client.device.registration import Registration
from tensord.client.device.upkeep import Upkeep
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

from .card import TOTAL_BYTES, card_folder, key, values
from .wire import CARD, HostTier, Wire


class Owner:
    """A cache without its thread: the test takes its turns."""

    def __init__(self, card: FakeCard) -> None:
        self.device = FakeVram(card)
        self.wire = Wire()
        self.host = HostTier(self.wire)
        self.entries = DeviceEntries()
        client: Any = self.host
        self.upkeep = Upkeep(client, self.device, self.entries, uses_every_s=1e-9)
        self.moves: Moves = self.upkeep.moves
        self.wire.listeners.add(self.upkeep)
        self.wire.connect()

    def put(self, number: int) -> DeviceEntry:
        tensor = self.device.upload(values(number))
        registration = Registration(key(number))
        entry = DeviceEntry(key(number), tensor, tensor.nbytes, 1, "", registration, [self.device.mark()])
        assert self.entries.put(entry)
        return entry

    def get(self, number: int) -> DeviceLease:
        lease = self.entries.lease(key(number), self.device)
        assert lease is not None
        return lease

    def away(self, *numbers: int, offload: bool = True, has_daemon: bool = True) -> MoveResult:
        return self.moves.away([key(n) for n in numbers], offload=offload, has_daemon=lambda: has_daemon)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        yield Owner(card)


# ---- one move


def test_an_entry_that_cannot_be_copied_is_dropped_unless_the_daemon_is_gone(owner: Owner) -> None:
    owner.host.full = True
    owner.put(1)
    assert owner.away(1, has_daemon=False).kept == [key(1)]
    moved = owner.away(1)
    assert moved.dropped == [key(1)] and moved.freed_bytes > 0 and len(owner.entries) == 0


@pytest.mark.parametrize("offload", [True, False])
def test_nothing_goes_before_every_stream_that_used_it_has_done_so(owner: Owner, offload: bool) -> None:
    """The mark that is missing is neither the last nor of the stream that put it."""
    entry = owner.put(1)
    with owner.device.on(FakeStream()) as stream, stream.hold() as hold:
        owner.get(1).release()
        entry.marks.append(FakeStream().mark())
        waits: list[float | None] = []

        class Slow:
            def wait(self, timeout_s: float | None = None) -> bool:
                waits.append(timeout_s)
                return False

        entry.marks[0] = Slow()
        assert owner.away(1, offload=offload).kept == [key(1)]
        assert waits
        hold.release()

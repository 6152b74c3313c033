"""What happens between two steps of a move, and what is said of it: each case by itself, and with the daemon's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensord.client.device import orders, upkeep
from tensord.client.device.entries import DeviceEntries, DeviceEntry, DeviceLease
from tensord.client.device.moves import MoveResult, Moves
from tensord.client.device.registration import Registration
from tensord.client.device.upkeep import Upkeep
from tensord.client.writing.outcomes import Put
from tensord.daemon.governor.events import Sample, Sampled
from tensord.ipc import messages
from tensord.ipc.modes import Tier
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

from .card import TOTAL_BYTES, card_folder, key, values
from .wire import CARD, HostTier, Wire


class Vram(FakeVram):
    """`meanwhile` is called while a tree is being copied to the host."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def _read(self, source: Any, to: Any, start: int, stop: int) -> None:
        super()._read(source, to, start, stop)
        self.meanwhile()


class Owner:
    """A cache without its thread: the test takes its turns."""

    def __init__(self, card: FakeCard) -> None:
        self.device = Vram(card)
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
        memory = self.device.memory_of(tensor)
        entry = DeviceEntry(key(number), tensor, memory, 1, "", registration, [self.device.mark()])
        assert self.entries.put(entry)
        return entry

    def get(self, number: int) -> DeviceLease:
        lease = self.entries.lease(key(number), self.device)
        assert lease is not None
        return lease

    def away(self, *numbers: int, offload: bool = True, has_daemon: bool = True) -> MoveResult:
        return self.moves.away([key(n) for n in numbers], offload=offload, has_daemon=lambda: has_daemon)

    def turn(self) -> None:
        self.upkeep.wake()
        self.upkeep.turn()

    def exchange(self) -> None:
        for _ in range(50):
            self.turn()
            self.wire.deliver_up()
            self.wire.deliver_down()

    def order_all_away(self) -> None:
        """The daemon says so; nobody has heard it yet."""
        self.wire.now += 6.0
        sample = Sample(CARD, Tier.DEVICE, int(0.94 * TOTAL_BYTES), TOTAL_BYTES, "file", self.wire.now)
        self.wire.happen(Sampled((sample,)))
        assert any(isinstance(message, messages.Order) for message in self.wire.answered)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        yield Owner(card)


# ---- one move


def test_an_entry_used_during_its_copy_stays(owner: Owner) -> None:
    owner.put(1)
    leases: list[DeviceLease] = []
    owner.device.meanwhile = lambda: leases.append(owner.get(1))
    assert owner.away(1).kept == [key(1)]
    assert np.array_equal(leases[0].tree.numpy(), values(1))


def test_an_entry_used_and_released_during_its_copy_stays(owner: Owner) -> None:
    """Its reader may have begun work that the copy did not wait for."""
    owner.put(1)
    owner.device.meanwhile = lambda: owner.get(1).release()
    assert owner.away(1).kept == [key(1)]
    assert key(1) in owner.entries


def test_an_entry_put_again_during_its_copy_stays(owner: Owner) -> None:
    owner.put(1)
    owner.device.meanwhile = lambda: owner.put(1)
    assert owner.away(1).kept == [key(1)]
    assert key(1) in owner.entries


def test_an_entry_whose_stream_cannot_be_awaited_stays_and_the_others_of_its_order_leave(owner: Owner) -> None:
    class Broken:
        def wait(self, timeout_s: float | None = None) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    owner.put(1).marks.append(Broken())
    owner.put(2)
    moved = owner.away(1, 2)
    assert (moved.kept, moved.offloaded) == ([key(1)], [key(2)])
    assert "illegal memory access" in str(moved.error)


def test_an_entry_deleted_during_its_copy_is_not_reported_as_moved(owner: Owner) -> None:
    owner.put(1)
    owner.device.meanwhile = lambda: owner.entries.delete([key(1)])
    moved = owner.away(1)
    assert moved == MoveResult(unknown=[key(1)])


def test_an_entry_that_cannot_be_copied_is_dropped_unless_the_daemon_is_gone(owner: Owner) -> None:
    owner.host.full = True
    owner.put(1)
    assert owner.away(1, has_daemon=False).kept == [key(1)]
    moved = owner.away(1)
    assert moved.dropped == [key(1)] and moved.freed_bytes > 0 and len(owner.entries) == 0


def test_a_copy_that_fails_is_a_drop_and_shown(owner: Owner) -> None:
    def fails() -> None:
        raise RuntimeError("the driver said no")

    owner.put(1)
    owner.device.meanwhile = fails
    moved = owner.away(1)
    assert moved.dropped == [key(1)]
    assert "the driver said no" in str(moved.error)


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


# ---- what crosses on the way


def test_a_delete_that_crosses_an_order_is_released_and_not_acknowledged(owner: Owner) -> None:
    for n in (1, 2):
        owner.put(n)
    owner.exchange()
    owner.order_all_away()
    owner.entries.delete([key(1)])
    owner.exchange()
    count = owner.wire.governor.counters
    assert (count.released, count.offloaded, count.kept) == (1, 1, 0)
    assert not owner.wire.errors
    assert owner.wire.registered() == set()


def test_an_entry_put_anew_across_an_order_goes_once_and_is_not_counted_twice(owner: Owner) -> None:
    owner.put(1)
    owner.exchange()
    owner.order_all_away()
    again = owner.put(1)
    owner.turn()
    owner.exchange()
    count = owner.wire.governor.counters
    assert (count.registered, count.renewed, count.offloaded) == (1, 1, 1)
    assert again.registration.state == "registered"
    assert not owner.wire.errors and owner.wire.registered() == set() == set(owner.entries.keys())


def test_each_use_is_reported_once(owner: Owner) -> None:
    owner.put(1)
    owner.exchange()
    for _ in range(5):
        owner.get(1).release()
    owner.exchange()
    table = owner.wire.governor.devices._devices[CARD].table
    assert table.uses[table.find(key(1))] == 6


def test_a_new_daemon_gets_the_uses_counted_under_the_old_one(owner: Owner) -> None:
    owner.put(1)
    owner.exchange()
    for _ in range(5):
        owner.get(1).release()
    owner.exchange()
    owner.wire.connect()
    owner.exchange()
    table = owner.wire.governor.devices._devices[CARD].table
    assert table.uses[table.find(key(1))] == 6


def test_an_order_does_not_apply_to_an_entry_put_after_the_ordered_one_was_released(owner: Owner) -> None:
    owner.put(1)
    owner.exchange()
    owner.order_all_away()
    owner.entries.delete([key(1)])
    owner.turn()
    owner.put(1)
    owner.exchange()
    count = owner.wire.governor.counters
    assert (count.registered, count.released, count.offloaded) == (2, 1, 0)
    assert not owner.wire.errors
    assert owner.wire.registered() == {key(1)} == set(owner.entries.keys())


def test_an_entry_that_a_new_daemon_refuses_is_copied_to_the_host_first(owner: Owner) -> None:
    entry = owner.put(1)
    owner.exchange()
    sample = Sample(CARD, Tier.DEVICE, int(0.99 * TOTAL_BYTES), TOTAL_BYTES, "file", owner.wire.now)
    owner.wire.happen(Sampled((sample,)))
    owner.wire.connect()
    owner.exchange()
    assert entry.registration.state == "refused"
    assert len(owner.entries) == 0 and owner.wire.registered() == set()
    assert np.array_equal(owner.host.trees[key(1)], values(1))


# ---- what its owner sends away


def test_an_entry_that_its_owner_offloads_is_in_the_host_tier_and_released(owner: Owner) -> None:
    for n in (1, 2):
        owner.put(n)
    owner.exchange()
    leaving = owner.upkeep.send_away([key(1), key(1), key(9)])
    owner.exchange()
    assert (leaving.count, leaving.gone, leaving.wait(0)) == (1, 1, True)
    assert np.array_equal(owner.host.trees[key(1)], values(1))
    assert owner.wire.registered() == {key(2)} == set(owner.entries.keys())
    assert owner.wire.governor.counters.released == 1


@pytest.mark.parametrize("full", [False, True], ids=["offloaded", "dropped"])
def test_an_entry_that_is_gone_from_the_device_is_counted(owner: Owner, *, full: bool) -> None:
    """Also in the middle of a move, when other threads may look at both."""
    owner.put(1)
    owner.exchange()
    owner.host.full = full
    seen: list[tuple[int, int, int]] = []
    give_back = owner.device.give_back

    def looked() -> int:
        seen.append((len(owner.entries), owner.entries.tally.offloaded, owner.entries.tally.dropped))
        return give_back()

    owner.device.give_back = looked  # type: ignore[method-assign]
    owner.order_all_away()
    owner.exchange()
    assert seen == [(0, 0, 1) if full else (0, 1, 0)]
    assert (owner.entries.tally.offloaded, owner.entries.tally.dropped) == seen[0][1:]


def test_memory_that_could_not_be_returned_at_once_is_returned_later(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no further order comes: another thread's work on the device took long, or a graph was captured."""
    monkeypatch.setattr(upkeep, "_GIVE_BACK_S", 0.0)
    owner.put(1)
    owner.exchange()
    give_back = owner.device.give_back

    def busy() -> int:
        owner.device.give_back = give_back  # type: ignore[method-assign]
        return 0

    owner.device.give_back = busy  # type: ignore[method-assign]
    owner.order_all_away()
    owner.exchange()
    assert len(owner.entries) == 0 and owner.device.card.held_bytes == 0


def test_an_entry_that_the_host_refuses_stays_with_its_owner(owner: Owner) -> None:
    owner.host.full = True
    owner.put(1)
    owner.exchange()
    leaving = owner.upkeep.send_away([key(1)])
    owner.exchange()
    assert (leaving.gone, leaving.wait(0)) == (0, True)
    assert owner.wire.registered() == {key(1)} == set(owner.entries.keys())
    assert (owner.entries.tally.stayed, owner.entries.tally.dropped) == (1, 0)
    owner.host.full = False
    owner.upkeep.send_away([key(1)])
    owner.exchange()
    assert key(1) in owner.host.trees and len(owner.entries) == 0


def test_an_entry_being_copied_when_the_daemon_ends_stays_with_its_owner(owner: Owner) -> None:
    def goes() -> None:
        owner.wire.connection = None

    owner.host.full = True
    owner.put(1)
    owner.device.meanwhile = goes
    leaving = owner.upkeep.send_away([key(1)])
    owner.turn()
    assert leaving.wait(0) and set(owner.entries.keys()) == {key(1)}


def test_an_ordered_entry_in_use_leaves_after_its_last_release(owner: Owner) -> None:
    for n in (1, 2):
        owner.put(n)
    leases = [owner.get(n) for n in (1, 2)]
    owner.upkeep.send_away([key(1), key(2)])
    owner.exchange()
    assert len(owner.entries) == 2 and not owner.host.trees
    owner.put(2)
    for lease in leases:
        lease.release()
    owner.exchange()
    assert set(owner.entries.keys()) == {key(2)} == owner.wire.registered()
    assert set(owner.host.trees) == {key(1)}


@pytest.mark.parametrize(("again_s", "times"), [(0.0, 2), (1000.0, 1)])
def test_an_entry_used_during_its_copy_is_copied_again_later(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, again_s: float, times: int
) -> None:
    monkeypatch.setattr(orders, "_AGAIN_S", again_s)
    copies: list[int] = []

    def used_once() -> None:
        copies.append(1)
        if len(copies) == 1:
            owner.get(1).release()

    owner.put(1)
    owner.device.meanwhile = used_once
    owner.upkeep.send_away([key(1)])
    owner.exchange()
    assert len(copies) == times
    assert (key(1) in owner.entries) == (times == 1)


def test_without_a_daemon_nothing_is_copied_and_nothing_goes(owner: Owner) -> None:
    owner.put(1)
    owner.wire.connection = None
    copies: list[int] = []
    owner.device.meanwhile = lambda: copies.append(1)
    leaving = owner.upkeep.send_away([key(1)])
    owner.turn()
    assert leaving.wait(0) and len(owner.entries) == 1 and not copies


def test_a_daemon_that_comes_anew_does_not_undo_what_its_owner_wants(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_SLICE_ENTRIES", 1)
    for n in range(3):
        owner.put(n)
    owner.exchange()
    leaving = owner.upkeep.send_away([key(n) for n in range(3)])
    owner.turn()
    assert (leaving.gone, leaving.wait(0)) == (1, False)
    owner.wire.connect()
    owner.exchange()
    assert (leaving.gone, leaving.wait(0), len(owner.entries), owner.wire.registered()) == (3, True, 0, set())


def test_the_host_copy_is_what_the_put_said(owner: Owner) -> None:
    """It is made by its owner, is found by its owner only, and is refused as any other."""
    given: list[Any] = []
    state: Any = "stored"

    def to_host(tree: Any) -> Put:
        given.append(tree)
        put = Put(key(99))
        put.settle(state)
        return put

    for n in (1, 2, 3):
        owner.put(n).to_host = to_host
    assert owner.away(1).offloaded == [key(1)]
    assert np.array_equal(given[0], values(1)) and not owner.host.trees
    assert key(1) not in owner.moves._remembered
    state = "refused"
    assert owner.away(2).dropped == [key(2)]
    assert owner.moves.away([key(3)], offload=True, has_daemon=lambda: True, may_drop=False).kept == [key(3)]


class _Unsure:
    state = "sent"

    def wait(self, timeout_s: float | None = None) -> object:
        raise OSError("the other tier is gone")


@pytest.mark.parametrize("copy", [True, None, _Unsure()], ids=["true", "none", "raises"])
def test_a_copy_whose_state_cannot_be_told_concerns_its_entry_alone(owner: Owner, copy: Any) -> None:
    for n in (1, 2, 3):
        owner.put(n)
    owner.put(2).to_host = lambda tree: copy
    moved = owner.away(1, 2, 3)
    assert (moved.offloaded, moved.dropped) == ([key(1), key(3)], [key(2)])
    assert len(owner.entries) == 0 and {key(1), key(3)} == set(owner.host.trees)


def test_nobody_waits_for_a_cache_that_is_closed(owner: Owner) -> None:
    owner.put(1)
    leaving = owner.upkeep.send_away([key(1)])
    owner.upkeep.stop()
    owner.upkeep._run()
    assert leaving.wait(0) and leaving.gone == 0 and len(owner.entries) == 0

"""What goes in a move, and what stays: each case by itself, with the daemon's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tensord.client.device.entries import DeviceEntries, DeviceEntry, DeviceLease
from tensord.client.device.registration import Registration
from tensord.client.device.upkeep import Upkeep
from tensord.ipc.messages import control as messages
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

from .card import TOTAL_BYTES, card_folder, key, values
from .wire import CARD, HostTier, Wire


class Owner:
    """A cache without its thread: the test takes its turns."""

    def __init__(self, card: FakeCard) -> None:
        self.device = FakeVram(card)
        self.wire = Wire()
        self.host = HostTier(self.wire)
        self.entries = DeviceEntries(self.device)
        client: Any = self.host
        self.upkeep = Upkeep(client, self.entries)
        self.wire.listeners.add(self.upkeep)
        self.wire.connect()
        self.exchange()

    def exchange(self) -> None:
        for _ in range(10):
            self.upkeep.wake()
            self.upkeep.turn()
            self.wire.deliver_up()
            self.wire.deliver_down()

    def put(self, number: int) -> DeviceEntry:
        tensor = self.device.upload(values(number))
        registration = Registration(key(number))
        entry = DeviceEntry(key(number), tensor, tensor.nbytes, 1, "", registration, [self.device.mark()])
        assert self.entries.put(entry)
        self.exchange()
        assert registration.state == "registered"
        return entry

    def get(self, number: int) -> DeviceLease:
        lease = self.entries.lease(key(number))
        assert lease is not None
        return lease

    def ordered(self, number: int, kind: Any) -> messages.AcknowledgeOrder | None:
        """What is acknowledged of an order that the daemon has just sent."""
        self.upkeep.received(messages.Order(1, CARD, kind, [key(number)], "test"), self.wire.connection)
        self.wire.said.clear()
        self.upkeep.turn()
        said = [message for message in self.wire.said if isinstance(message, messages.AcknowledgeOrder)]
        return said[0] if said else None

    @contextmanager
    def meanwhile(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> Iterator[None]:
        """Something happens after each copy to the host tier."""
        put = self.host.put

        def put_and_more(*arguments: Any) -> None:
            put(*arguments)
            happens()

        with monkeypatch.context() as patch:
            patch.setattr(self.host, "put", put_and_more)
            yield


@pytest.fixture
def owner() -> Iterator[Owner]:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card:
        yield Owner(card)


def test_an_entry_that_cannot_be_copied_is_dropped_unless_the_daemon_is_gone(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.host.full = True
    owner.put(1)
    connection = owner.wire.connection
    with owner.meanwhile(monkeypatch, lambda: setattr(owner.wire, "connection", None)):
        assert owner.ordered(1, "offload") is None and key(1) in owner.entries
    owner.wire.connection = connection
    moved = owner.ordered(1, "offload")
    assert moved is not None and moved.dropped == [key(1)] and moved.freed_bytes > 0 and len(owner.entries) == 0


def test_an_entry_that_is_read_while_it_is_copied_stays(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.put(1)
    with owner.meanwhile(monkeypatch, lambda: owner.get(1).release()):
        moved = owner.ordered(1, "offload")
    assert moved is not None and moved.kept == [key(1)] and key(1) in owner.entries


@pytest.mark.parametrize("kind", ["offload", "drop"])
def test_nothing_goes_before_every_stream_that_used_it_has_done_so(owner: Owner, kind: str) -> None:
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
        moved = owner.ordered(1, kind)
        assert moved is not None and moved.kept == [key(1)]
        assert waits
        hold.release()
